"""The parameters of many policies of one architecture, stacked along a node axis in one flat
buffer.

Gradients, norms and AdamW are then a few operations over `(nodes, parameters)`, and the forward
pass is batched matrix products. It supports Qwen3 (the toy policies) and Llama (SmolLM2), which
differ only in the norm of queries and keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.model.weights import read_tensors

_QK_NORM = {"qwen3": True, "llama": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The properties that policies must share to be stacked."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    eps: float
    rope_theta: float
    tied: bool
    max_length: int
    qk_norm: bool
    """Whether each head's queries and keys are normalised before rotation: yes in Qwen3, no in
    Llama.
    """

    @classmethod
    def from_folder(cls, folder: Path) -> Architecture:
        """Read it from a model folder's config.json.

        Raises: ValueError: the folder does not hold a Qwen3 or Llama model that this code computes
        exactly; the message says what it holds.
        """
        try:
            config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"model folder {folder}: config.json cannot be read ({error}): give a model folder") from None
        rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10_000.0), "rope_type": "default"}
        plain = {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "hidden_act": "silu"}
        unusual = [f"{name} {config[name]!r}" for name, wanted in plain.items() if config.get(name, wanted) != wanted]
        if config.get("model_type") not in _QK_NORM:
            unusual.insert(0, f"model_type {config.get('model_type')!r}")
        if rope.get("rope_type", "default") != "default":
            unusual.append(f"rope_type {rope['rope_type']!r}")
        if unusual:
            raise ValueError(
                f"model folder {folder}: {', '.join(unusual)}: the simulate driver computes plain Qwen3 and Llama only; "
                "use such a folder, or the services driver"
            )
        return cls(
            vocabulary=config["vocab_size"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_size=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            eps=config["rms_norm_eps"],
            rope_theta=rope["rope_theta"],
            tied=config["tie_word_embeddings"],
            max_length=config["max_position_embeddings"],
            qk_norm=_QK_NORM[config["model_type"]],
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every leaf by its name; projections that share their input are one leaf."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            shapes |= {
                f"{layer}.norm_in": (self.hidden,),
                f"{layer}.qkv": (queries + 2 * keys, self.hidden),
                **({f"{layer}.q_norm": (self.head_size,), f"{layer}.k_norm": (self.head_size,)} if self.qk_norm else {}),
                f"{layer}.out": (self.hidden, queries),
                f"{layer}.norm_mlp": (self.hidden,),
                f"{layer}.gate_up": (2 * self.intermediate, self.hidden),
                f"{layer}.down": (self.hidden, self.intermediate),
            }
        shapes["norm"] = (self.hidden,)
        if not self.tied:
            shapes["head"] = (self.vocabulary, self.hidden)
        return shapes

    @property
    def parameters(self) -> int:
        """Parameters of one policy."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    def _sources(self) -> dict[str, list[str]]:
        """Hugging Face names that make up each leaf, in order."""
        sources = {"embed": ["model.embed_tokens.weight"], "norm": ["model.norm.weight"]}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            sources |= {
                f"{layer}.norm_in": [prefix + "input_layernorm.weight"],
                f"{layer}.qkv": [prefix + f"self_attn.{part}_proj.weight" for part in "qkv"],
                f"{layer}.q_norm": [prefix + "self_attn.q_norm.weight"],
                f"{layer}.k_norm": [prefix + "self_attn.k_norm.weight"],
                f"{layer}.out": [prefix + "self_attn.o_proj.weight"],
                f"{layer}.norm_mlp": [prefix + "post_attention_layernorm.weight"],
                f"{layer}.gate_up": [prefix + f"mlp.{part}_proj.weight" for part in ("gate", "up")],
                f"{layer}.down": [prefix + "mlp.down_proj.weight"],
            }
        if not self.tied:
            sources["head"] = ["lm_head.weight"]
        return sources

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """(parameters,) float32 of a policy under Hugging Face names."""
        sources = self._sources()
        return torch.cat([tensors[name].float().flatten() for leaf in self.shapes() for name in sources[leaf]])


def leaves(architecture: Architecture, flat: Tensor) -> dict[str, Tensor]:
    """Views `(nodes, *shape)` into `(nodes, parameters)`, by leaf."""
    views: dict[str, Tensor] = {}
    start = 0
    for name, shape in architecture.shapes().items():
        size = math.prod(shape)
        views[name] = flat[:, start : start + size].view(flat.shape[0], *shape)
        start += size
    return views


def load_stack(folders: Sequence[Path], device: torch.device) -> tuple[Architecture, Tensor]:
    """The architecture and the stacked parameters `(nodes, parameters)` of model folders, one per
    node.

    Raises: ValueError: the folders hold different architectures, or one that is not supported here.
    """
    by_folder = {folder: Architecture.from_folder(folder) for folder in dict.fromkeys(folders)}
    architectures = list(by_folder.values())
    if any(other != architectures[0] for other in architectures[1:]):
        raise ValueError("these models are of different architectures and cannot be stacked")
    flat = {folder: architectures[0].flatten(read_tensors(folder / "model.safetensors")) for folder in by_folder}
    return architectures[0], torch.stack([flat[folder] for folder in folders]).to(device)
