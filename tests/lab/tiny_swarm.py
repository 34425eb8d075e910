"""A tiny Qwen3 and a spec for it, small enough that a simulated round takes a blink."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lab.spec import Spec, merged, parse_spec
from lab.stacked_params import Architecture
from shared.config import NodeConfig
from tests.engines.tiny_models import byte_tokenizer

END = 256


def tiny_qwen3(folder: Path, *, tied: bool = True, seed: int = 3) -> Path:
    """A random Qwen3 of 2 layers of 32 with the byte tokenizer; its answers end after some tokens."""
    if not (folder / "config.json").exists():
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            initializer_range=0.15,
            tie_word_embeddings=tied,
            use_sliding_window=False,
            eos_token_id=END,
            pad_token_id=257,
            dtype="float32",
        )
        Qwen3ForCausalLM(config).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
    return folder


def spread_out(architecture: Architecture, flat: torch.Tensor, noise: float = 0.02) -> torch.Tensor:
    """Stacked parameters with different noise on every node."""
    generator = torch.Generator().manual_seed(5)
    return flat + noise * torch.randn(flat.shape, generator=generator)


def transformers_model(folder: Path, architecture: Architecture, flat: torch.Tensor) -> Any:
    """The transformers model with one node's parameters."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    outcome = model.load_state_dict(architecture.unflatten(flat), strict=False)
    assert not outcome.unexpected_keys
    assert set(outcome.missing_keys) <= {"lm_head.weight"}
    return model


def tiny_config(folder: Path, node: str = "n00", **sections: Any) -> NodeConfig:
    """A node's configuration over the tiny model."""
    values: dict[str, Any] = {
        "node": {"id": node},
        "model": {"path": str(folder), "device": "cpu", "dtype": "float32"},
        "tasks": [{"dataset": "chain_sum"}],
        "generator": {"completions": 4, "max_new_tokens": 8},
        "sampler": {"local": 4, "external": 0},
        "trainer": {"learning_rate": 1e-3, "threads": 1},
    }
    return NodeConfig(**merged(values, sections))


def tiny_spec(folder: Path, nodes: Any = 3, arms: Any = None, seeds: Sequence[int] = (1,), rounds: int = 2, **changes: Any) -> Spec:
    """A spec whose every arm is a swarm of tiny nodes. A verifier that pays for any digit makes most groups informative."""
    source: dict[str, Any] = {
        "name": "tiny",
        "seeds": list(seeds),
        "rounds": rounds,
        "nodes": nodes,
        "model": {"path": str(folder), "device": "cpu", "dtype": "float32"},
        "generator": {"completions": 4, "max_new_tokens": 6},
        "eval": {"tasks": 6, "every_versions": 2},
        "sampler": {"local": 2, "external": 2, "max_staleness": 0, "max_external_age_s": 30.0, "max_share_per_node": 1.0},
        "trainer": {"learning_rate": 1e-3},
        "tasks": [{"dataset": "fraction_simplification", "config": {"min_value": 1, "max_value": 9}}],
        "arms": arms or {"base": {}},
    }
    return parse_spec(merged(source, changes))
