"""What `swarm model memory` says of configurations and ranks of which nothing can be told: one
sentence, at once.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from shared.model.configuration import MOST_LAYERS
from swarm_cli.errors import CommandError
from swarm_cli.model.memory import ModelMemory, configuration_of, model_memory

_PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "max_position_embeddings": 2048,
}


def memory_of(folder: Path, config: Any, rank: int = 8) -> ModelMemory:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return model_memory(configuration_of(str(folder)), torch.float32, rank=rank, tokens=256, width=64, gpus=1)


def refusal(folder: Path, config: Any, rank: int = 8) -> str:
    with pytest.raises(CommandError) as caught:
        memory_of(folder, config, rank)
    said = str(caught.value)
    assert "\n" not in said and ": " in said
    return said


@pytest.mark.slow
def test_an_ordinary_configuration_is_told(tmp_path: Path) -> None:
    assert memory_of(tmp_path / "plain", _PLAIN).size.layers == 2


@pytest.mark.parametrize("content", [None, [1], "text", 7, {}])
def test_a_file_that_holds_no_configuration_is_refused(tmp_path: Path, content: Any) -> None:
    said = refusal(tmp_path / "odd", content)
    assert "odd has no configuration that transformers can read" in said
    assert ("config.json holds no JSON object" in said) == (content != {})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 0}, "a number in it is 0 or too large"),
        ({"num_key_value_heads": 0}, "a number in it is 0 or too large"),
        ({"num_attention_heads": 3}, "hidden size (64) is not a multiple"),
        ({"hidden_size": "x"}, "Field 'hidden_size' expected int, got str"),
        ({"vocab_size": 2.5}, "Field 'vocab_size' expected int, got float"),
        ({"hidden_act": ["silu"]}, "Field 'hidden_act' expected str, got list"),
        ({"hidden_act": "nope"}, "nope"),
        ({"rope_parameters": "x"}, "check its config.json"),
        ({"num_hidden_layers": 0}, "has 0 layers; 1 to 500"),
        ({"num_hidden_layers": -1}, "has -1 layers; 1 to 500"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0.0}}, "the base of its rotary positions is 0.0"),
    ],
)
def test_numbers_that_make_no_model_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert said in refusal(tmp_path / "odd", {**_PLAIN, **changes})


def too_late(*_: object) -> None:
    raise AssertionError("still computing")


@pytest.mark.parametrize(
    "state",
    [
        lambda layers: {**_PLAIN, "num_hidden_layers": layers},
        # transformers makes a list as long as this before anybody can ask its configuration.
        lambda layers: {**_PLAIN, "model_type": "qwen2", "num_hidden_layers": layers},
        lambda layers: {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": layers}},
        lambda layers: {"model_type": "gpt2", "n_layer": layers},
    ],
    ids=["llama", "qwen2", "gemma3", "gpt2"],
)
def test_more_layers_than_any_model_has_are_refused_at_once(tmp_path: Path, state: Callable[[int], Any]) -> None:
    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(5)
    try:
        assert f"has 50,000,000 layers; 1 to {MOST_LAYERS}" in refusal(tmp_path / "deep", state(50_000_000))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "largest"),
    [
        (LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_hidden_layers=2, vocab_size=300), 64),
        (GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=300), 48),
    ],
    ids=["llama", "gpt2"],
)
def test_a_rank_larger_than_every_matrix_is_refused(tmp_path: Path, config: Any, largest: int) -> None:
    assert memory_of(tmp_path / "m", config.to_dict(), rank=largest).methods[1].plain is not None
    said = refusal(tmp_path / "m", config.to_dict(), rank=largest + 1)
    assert (
        said == f"--rank {largest + 1} is more than {largest}, the highest rank that this model's matrices allow: give a lower one"
    )
