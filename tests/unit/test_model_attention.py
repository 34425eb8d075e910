"""What a model's configuration says of attention, rope and end tokens is read as the model means
it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPTNeoConfig, LlamaConfig, MistralConfig, MptConfig, Phi3Config

from services.generator.engines.base import EngineError
from services.generator.engines.model_folder import read_model_folder
from shared.config.sections import ModelSection
from shared.model.attention import attention_windows
from shared.model.loading import end_token_id, end_token_ids, load_causal_lm
from shared.model.reading import ModelLoadError, model_max_length
from shared.model.rope import steady_rope_length
from tests.architectures.tiny import tiny_config, tiny_model
from tests.engines.tiny_models import byte_tokenizer

LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


def saved(folder: Path, kind: str, **options: object) -> Path:
    tiny_model(kind, **options).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_soft_capped_attention_is_computed_with_the_cap(tmp_path: Path) -> None:
    folder = saved(tmp_path / "gemma2", "gemma2")
    loaded = load_causal_lm(ModelSection(path=str(folder)), dtype=torch.float32, device=torch.device("cpu")).eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        found, eager = loaded(ids).logits, tiny_model("gemma2", attention="eager")(ids).logits
        without_cap = tiny_model("gemma2", attention="sdpa")(ids).logits
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


@pytest.mark.parametrize(("ends_with", "expected"), [("<|turn|>", 258), ("<|end|>", 256), ("!", 256)])
def test_an_answer_ends_as_the_template_ends_a_turn(ends_with: str, expected: int) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    assert tokenizer.convert_tokens_to_ids("<|turn|>") == 258
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [256, 258]
    tokenizer.chat_template = TEMPLATE.replace("%END%", ends_with)
    assert end_token_id(model, tokenizer) == expected
    assert end_token_ids(model, tokenizer)[0] == expected
    assert {256, 258} <= set(end_token_ids(model, tokenizer))
    tokenizer.chat_template = None
    assert end_token_id(model, tokenizer) == 256
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert end_token_id(model, tokenizer) == 256


def test_a_token_that_no_engine_stops_at_is_no_end() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.chat_template = TEMPLATE.replace("%END%", "<|turn|>")
    model = tiny_model("llama")
    assert end_token_id(model, tokenizer) == 256
