"""The engine over real model folders whose architectures take padding or a repeated cache in their
own way, or not at all.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.generator.engines import EngineError, SamplingParams, create_engine
from services.generator.engines.batching import WAYS, Batching, UnsafeModel, batches, choose_batching
from services.generator.engines.transformers_engine import draw_tokens
from tests.architectures.checks import PROMPTS, alone
from tests.architectures.tiny import tiny_model
from tests.engines.conftest import Run
from tests.engines.tiny_models import byte_tokenizer

SIZES = {"vocab_size": 260, "pad_token_id": 257, "eos_token_id": 256, "bos_token_id": 258}
PADDED, EQUAL, OWN, WHOLE = WAYS


def model_folder(folder: Path, kind: str) -> Path:
    tiny_model(kind, **SIZES).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["mistral", "gptj", "mamba", "recurrent_gemma"])
def test_unequal_prompts_get_the_logprobs_of_each_text_alone(run: Run, tmp_path: Path, kind: str) -> None:
    folder = model_folder(tmp_path / kind, kind)
    engine = create_engine("transformers", str(folder), max_model_len=100, threads=1, device="cpu")
    run(engine.start())
    groups = run(engine.generate(PROMPTS, 3, SamplingParams(max_new_tokens=20), seed=1))
    given = [([*prompt], [*sample.token_ids]) for prompt, group in zip(PROMPTS, groups, strict=True) for sample in group]
    scored = run(engine.score([prompt for prompt, _ in given], [answer for _, answer in given], SamplingParams()))
    run(engine.close())
    model = tiny_model(kind, **SIZES)
    found = [sample.logprobs for group in groups for sample in group]
    for (prompt, answer), logprobs, score in zip(given, found, scored, strict=True):
        with torch.no_grad():
            expected = alone(model, prompt, answer)
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=5e-5, rtol=0)
        torch.testing.assert_close(torch.tensor(score), expected, atol=5e-5, rtol=0)


def test_a_model_that_sees_later_tokens_is_refused_at_start(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    tiny_model("bert", is_decoder=False, **SIZES).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    engine = create_engine("transformers", str(folder), max_model_len=100, threads=1, device="cpu")
    with pytest.raises(EngineError, match="it is not a causal model.*use another engine or another model"):
        run(engine.start())
    run(engine.close())


def test_a_model_that_sees_later_tokens_only_in_texts_past_its_window_is_refused() -> None:
    with pytest.raises(UnsafeModel, match="it is not a causal model"):
        choose_batching(tiny_model("doge", keep_window_size=16), context_length=100, pad_token_id=0)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_prompt_is_in_one_batch_and_only_padding_mixes_lengths(way: Batching) -> None:
    prompts = [[1], [1, 2], [3], [4, 5], [6], [7, 8, 9]]
    found = list(batches(prompts, way, 2))
    assert sorted(number for numbers in found for number in numbers) == list(range(6))
    assert max(map(len, found)) == 2
    mixed = any(len({len(prompts[number]) for number in numbers}) > 1 for numbers in found)
    assert mixed == way.padded


def test_tokens_are_drawn_by_their_probability_and_excluded_ones_never() -> None:
    probabilities = torch.tensor([[0.0, 0.2, 0.0, 0.5, 0.3, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    rows = probabilities.repeat_interleave(20_000, dim=0)
    drawn = draw_tokens(rows, torch.Generator().manual_seed(1)).view(3, -1)
    shares = torch.stack([torch.bincount(each, minlength=6) for each in drawn]) / drawn.shape[1]
    assert (shares[probabilities == 0] == 0).all()
    torch.testing.assert_close(shares, probabilities, atol=0.015, rtol=0)  # four standard errors
