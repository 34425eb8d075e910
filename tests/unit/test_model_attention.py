"""What a model's configuration says of attention, rope and end tokens is read as the model means
it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig, GPTNeoConfig, LlamaConfig, MistralConfig, MptConfig, Phi3Config

from services.generator.engines.base import EngineError
from services.generator.engines.model_folder import read_model_folder
from shared.config.model_section import ModelSection
from shared.model.configuration import ModelLoadError, attention_windows, steady_rope_length
from shared.model.loading import load_causal_lm
from shared.model.reading import end_tokens, model_max_length
from tests.architectures.tiny import byte_model, tiny_config, tiny_model
from tests.engines.tiny_models import byte_tokenizer

LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


def saved(folder: Path, kind: str, **options: object) -> Path:
    byte_model(kind, **options).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_soft_capped_attention_is_computed_with_the_cap(tmp_path: Path) -> None:
    folder = saved(tmp_path / "gemma2", "gemma2")
    loaded = load_causal_lm(ModelSection(path=str(folder)), dtype=torch.float32, device=torch.device("cpu")).eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        found, eager = loaded(ids).logits, byte_model("gemma2", attention="eager")(ids).logits
        without_cap = byte_model("gemma2", attention="sdpa")(ids).logits
    torch.testing.assert_close(found, eager, atol=1e-5, rtol=0)
    assert (without_cap - eager).abs().max() > 1e-2, "sdpa applies the cap: eager is no longer needed"


def test_a_model_without_a_cap_keeps_the_attention_that_transformers_chooses(tmp_path: Path) -> None:
    folder = saved(tmp_path / "llama", "llama")
    loaded = load_causal_lm(ModelSection(path=str(folder)), dtype=torch.float32, device=torch.device("cpu"))
    assert loaded.config._attn_implementation == "sdpa"


def test_every_name_for_a_window_is_read() -> None:
    assert attention_windows(GPTNeoConfig(window_size=64)) == [64]
    assert attention_windows(MistralConfig(sliding_window=4096)) == [4096]
    assert attention_windows(tiny_config("llama4_text")) == [8]
    assert attention_windows(tiny_config("recurrent_gemma")) == [8]
    assert attention_windows(tiny_config("doge", keep_window_size=16)) == [16]
    assert attention_windows(MptConfig()) == attention_windows(LlamaConfig()) == []


def test_a_length_where_rope_changes_is_refused_and_not_taken_unasked(tmp_path: Path) -> None:
    folder = saved(tmp_path / "phi3", "phi3", rope_parameters=LONG | {"rope_theta": 10000.0}, original_max_position_embeddings=32)
    assert model_max_length(ModelSection(path=str(folder))) == 32
    assert model_max_length(ModelSection(path=str(folder), max_length=20)) == 20
    with pytest.raises(ModelLoadError, match="max_length 64: beyond 32 tokens this model rotates.*set model.max_length to 32"):
        model_max_length(ModelSection(path=str(folder), max_length=64))
    assert read_model_folder(str(folder), max_model_len=32).context_length == 32
    with pytest.raises(EngineError, match="beyond 32 tokens"):
        read_model_folder(str(folder), max_model_len=33)


def test_the_refused_length_is_where_logprobs_begin_to_depend_on_what_follows() -> None:
    model = tiny_model("phi3", rope_parameters=LONG | {"rope_theta": 10000.0}, original_max_position_embeddings=32)
    ids = torch.arange(3, 3 + 40)[None]
    with torch.no_grad():
        short, just, beyond = (model(ids[:, :length]).logits[0, :20] for length in (20, 32, 33))
    torch.testing.assert_close(short, just, atol=1e-5, rtol=0)
    assert (short - beyond).abs().max() > 1e-2


def test_rope_that_does_not_depend_on_length_has_no_limit() -> None:
    assert steady_rope_length(LlamaConfig()) is None
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    assert steady_rope_length(LlamaConfig(rope_parameters=yarn)) is None
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert steady_rope_length(LlamaConfig(max_position_embeddings=256, rope_parameters=dynamic)) == 256
    assert steady_rope_length(Phi3Config()) is None


TEMPLATE = (
    "{% for message in messages %}<|pad|>{{ message['role'] }}\n{{ message['content'] }}%END%{% endfor %}"
    "{% if add_generation_prompt %}<|pad|>assistant\n{% endif %}"
)


def folder_ending_with(folder: Path, ends: list[int], template: str | None) -> Path:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    assert tokenizer.convert_tokens_to_ids("<|turn|>") == 258
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    tiny_config("llama", vocab_size=300, eos_token_id=256).save_pretrained(folder)
    GenerationConfig(eos_token_id=ends).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TEMPLATE.replace("%END%", "<|turn|>"), 258),
        (TEMPLATE.replace("%END%", "<|end|>"), 256),
        (TEMPLATE.replace("%END%", "!"), 256),
        (None, 256),
        ("{{ raise_exception('no') }}", 256),
    ],
)
def test_an_answer_ends_as_the_template_ends_a_turn(tmp_path: Path, template: str | None, expected: int) -> None:
    model = ModelSection(path=str(folder_ending_with(tmp_path, [256, 258], template)))
    ends = end_tokens(model, AutoTokenizer.from_pretrained(tmp_path))
    assert ends[0] == expected and set(ends) == {256, 258}


def test_a_token_that_no_engine_stops_at_is_no_end(tmp_path: Path) -> None:
    model = ModelSection(path=str(folder_ending_with(tmp_path, [256], TEMPLATE.replace("%END%", "<|turn|>"))))
    assert end_tokens(model, AutoTokenizer.from_pretrained(tmp_path)) == (256,)
