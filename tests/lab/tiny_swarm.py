"""A tiny Qwen3, a tiny Llama and a spec for it, small enough that a simulated round takes a
blink.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lab.spec import Spec, merged, parse_spec
from tests.engines.tiny_models import byte_tokenizer

END = 256
_SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "eos_token_id": END,
    "pad_token_id": 257,
    "dtype": "float32",
}


def tiny_qwen3(folder: Path, *, tied: bool = True, seed: int = 3) -> Path:
    """A random Qwen3 of 2 layers of 32 with the byte tokenizer, whose answers are mostly a digit or
    two, so that some are right.
    """
    return _tiny(folder, Qwen3ForCausalLM, Qwen3Config(**_SHAPE, use_sliding_window=False, tie_word_embeddings=tied), seed)


def _tiny(folder: Path, kind: type[PreTrainedModel], config: PretrainedConfig, seed: int) -> Path:
    if not (folder / "config.json").exists():
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        model: Any = kind(config)
        with torch.no_grad():
            # What all tokens have in common stays in the hidden state; what has more of it is
            # likelier to come next.
            common = 0.5 * torch.randn(32).sign()
            model.model.embed_tokens.weight += common
            for token in (*byte_tokenizer()("0123456789", add_special_tokens=False)["input_ids"], END):
                model.lm_head.weight[token] += common
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
    return folder


def tiny_spec(folder: Path, nodes: Any = 3, arms: Any = None, seeds: Sequence[int] = (1,), rounds: int = 2, **changes: Any) -> Spec:
    """A spec whose every arm is a swarm of tiny nodes on sums of two digits."""
    source: dict[str, Any] = {
        "name": "tiny",
        "seeds": list(seeds),
        "rounds": rounds,
        "nodes": nodes,
        "model": {"path": str(folder), "device": "cpu", "dtype": "float32"},
        "generator": {"completions": 16, "max_new_tokens": 4},
        "eval": {"tasks": 6, "every_versions": 2},
        "sampler": {"local": 2, "external": 2, "max_staleness": 0, "max_external_age_s": 30.0, "max_share_per_node": 1.0},
        "trainer": {"learning_rate": 1e-3},
        "tasks": [{"dataset": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}],
        "arms": arms or {"base": {}},
    }
    return parse_spec(merged(source, changes))


def write_spec(folder: Path, rounds: int = 3) -> Path:
    """A file with an experiment of two arms and two seeds on the tiny Qwen3, and the model."""
    model = tiny_qwen3(folder / "model")
    file = folder / "spec.toml"
    file.write_text(
        f"""
name = "tiny"
seeds = [1, 2]
rounds = {rounds}
nodes = 2
model = {{ path = "{model}", device = "cpu", dtype = "float32" }}
generator = {{ completions = 4, max_new_tokens = 4 }}
eval = {{ tasks = 6, every_versions = 1 }}
sampler = {{ max_staleness = 0 }}
tasks = [{{ dataset = "gcd" }}]
[arms.8-0.sampler]
local = 4
external = 0
[arms.4-4.sampler]
local = 2
external = 2
"""
    )
    return file
