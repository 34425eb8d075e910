"""Computes a model's size and memory needs from its configuration alone, without loading it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from shared.model.configuration import check_computable


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Sizes that follow from a model's shape.

    parameters: tied ones counted once. highest_rank: the highest rank that any of its matrices can
    have, without embeddings and head; 0 if it has no matrix. context_length, vocabulary: in tokens;
    context_length is 0 if the configuration states none. cache_numbers: numbers kept per sampled
    token if every layer keeps keys and values.
    """

    architecture: str
    parameters: int
    highest_rank: int
    layers: int
    width: int
    vocabulary: int
    context_length: int
    cache_numbers: int

    def generation_bytes(self, weight_bytes: int, tokens: int) -> int:
        """Memory for weights, and for keys and values of this many tokens at once."""
        return (self.parameters + self.cache_numbers * tokens) * weight_bytes


def model_size(config: Any) -> ModelSize:
    """The size of the causal model that a transformers configuration describes.

    Raises:
        ValueError, KeyError: there is no causal language model of this kind, or the number of
            layers or the rotary base is impossible.
        Exception: what transformers raises for other impossible numbers.
    """
    check_computable(config)
    with torch.device("meta"):
        skeleton: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    text = config.get_text_config()
    head = skeleton.get_output_embeddings()
    layers, width = int(getattr(text, "num_hidden_layers", 0) or 0), int(getattr(text, "hidden_size", 0) or 0)
    heads = int(getattr(text, "num_attention_heads", 0) or 1)
    key_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    head_width = int(getattr(text, "head_dim", None) or width // heads)
    return ModelSize(
        architecture=str(config.model_type),
        parameters=sum(parameter.numel() for parameter in skeleton.parameters()),
        highest_rank=_highest_rank(skeleton, head),
        layers=layers,
        width=width,
        vocabulary=int(skeleton.get_input_embeddings().weight.shape[0]),
        context_length=int(getattr(text, "max_position_embeddings", 0) or 0),
        cache_numbers=2 * layers * key_heads * head_width,
    )


def _highest_rank(model: nn.Module, head: Any) -> int:
    # Recognised by shape, because GPT-2's linear layers are not nn.Linear.
    parts = [part for part in model.modules() if part is not head and not isinstance(part, nn.Embedding)]
    weights = [weight for part in parts if isinstance(weight := getattr(part, "weight", None), torch.Tensor)]
    return max((min(weight.shape) for weight in weights if weight.ndim == 2), default=0)


def gigabytes(size_bytes: float) -> str:
    """A size for display: 2.15 GB, 43.0 MB."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.1f} MB"


def available_memory_bytes() -> int | None:
    """Memory that a process may still take: the free memory of the machine or of its control group;
    None if neither is known.
    """
    found = [amount for amount in (_machine_memory(), _control_group_memory()) if amount is not None]
    return min(found) if found else None


def _machine_memory(file: Path = Path("/proc/meminfo")) -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in file.read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _control_group_memory(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    try:
        limit, used = (folder / "memory.max").read_text().strip(), int((folder / "memory.current").read_text())
        cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return None if limit == "max" else int(limit) - used + int(cached.get("inactive_file", 0))
    except (OSError, ValueError):
        return None
