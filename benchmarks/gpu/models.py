"""Models for the check: the shapes of real models, with random weights if the real ones are
missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.finding import Setting
from benchmarks.shapes import SMOLLM2_135M
from benchmarks.workload import node_config
from shared.config import NodeConfig
from tests.engines.tiny_models import END_TOKEN_ID, PAD_TOKEN_ID, write_model_folder

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "SmolLM2-135M": SMOLLM2_135M,
    "0.5B": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}
"""Shapes by name. 0.5B: Qwen2.5-0.5B's."""
CONTEXT = 2048


def small_model(setting: Setting) -> tuple[str, Path]:
    """The name and folder of the model for most parts: the requested one, else a random one with
    SmolLM2's shapes.
    """
    if setting.model:
        return Path(setting.model).name, Path(setting.model)
    return random_model(setting, "tiny" if setting.short else "SmolLM2-135M")


def random_model(setting: Setting, shape: str) -> tuple[str, Path]:
    """A Llama of this shape with random weights and a byte tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = setting.folder / f"model-{shape}"
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            **SHAPES[shape],
            max_position_embeddings=CONTEXT,
            # Far enough from uniform that the logprobs of sampled tokens are meaningful.
            initializer_range=0.04,
            eos_token_id=END_TOKEN_ID,
            pad_token_id=PAD_TOKEN_ID,
            dtype="bfloat16",
        )
        write_model_folder(folder, LlamaForCausalLM(config).to(torch.bfloat16).eval())
    return f"{shape} (random weights)", folder


def config_for(setting: Setting, folder: Path, *, device: str = "", dtype: str = "float32", **sections: Any) -> NodeConfig:
    """A node's configuration for this model, on the setting's device unless `device` is given."""
    sections["trainer"] = {"token_budget": 4096, "threads": 1, "warmup_steps": 0, **sections.get("trainer", {})}
    sections["generator"] = {"max_new_tokens": 32, "engine": "transformers", **sections.get("generator", {})}
    model = {"path": str(folder), "device": device or setting.device, "dtype": dtype}
    return node_config(setting.folder, "nats://127.0.0.1:4222", model=model, **sections)
