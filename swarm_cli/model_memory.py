"""`swarm model memory`: what training and generating with a model take, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swarm_cli.errors import CommandError

if TYPE_CHECKING:
    import torch

    from shared.model.model_size import ModelSize

SIDE_BY_SIDE_TOKENS = 10_000
"""Tokens of prompts and answers that a generator holds at once, in what is said of its memory."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train. states, pass_, checkpointed: bytes a process holds: without any pass, in a step, and in a step with
    `trainer.gradient_checkpointing`."""

    name: str
    states: int
    pass_: int
    checkpointed: int


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What a model takes. ways: of training. generating: bytes with `SIDE_BY_SIDE_TOKENS` tokens side by side."""

    size: ModelSize
    ways: list[Way]
    generating: int


def configuration_of(model: str, revision: str = "") -> Any:
    """The transformers configuration of a folder or hub name.

    Raises:
        CommandError: there is none that can be read.
    """
    from transformers import AutoConfig

    from shared.hub_models import hub_arguments

    try:
        return AutoConfig.from_pretrained(model, **hub_arguments(model, revision))
    except (OSError, ValueError, KeyError) as error:
        raise CommandError(f"{model} has no configuration that transformers reads: {error}") from None


def model_memory(config: Any, dtype: torch.dtype, *, rank: int, tokens: int, width: int, gpus: int) -> ModelMemory:
    """The needs of a model under all ways to train it: all weights, adapters of `rank`, all weights split over `gpus`.

    `tokens`, `width`, `dtype`: as `services.trainer.memory_need.TrainingPlan` has them.

    Raises:
        CommandError: it is no causal language model, or its linear layers cannot be adapted.
    """
    from services.trainer.memory_need import TrainingPlan, memory_need
    from shared.model.model_size import model_size

    def way(name: str, lora_rank: int = 0, processes: int = 1) -> Way:
        plain, checkpointed = (
            memory_need(
                config,
                TrainingPlan(
                    dtype=dtype,
                    lora_rank=lora_rank,
                    gradient_checkpointing=checkpointing,
                    tokens=tokens,
                    width=width,
                    processes=processes,
                ),
            )
            for checkpointing in (False, True)
        )
        return Way(name, plain.states, plain.total, checkpointed.total)

    try:
        size = model_size(config)
        ways = [way("all weights"), way(f"LoRA of rank {rank}", lora_rank=rank)]
        if gpus > 1:
            ways.append(way(f"all weights, each of {gpus} GPUs", processes=gpus))
    except (ValueError, KeyError, AttributeError) as error:
        raise CommandError(f"this model's memory cannot be told from its configuration: {error}; try a step and watch it") from None
    return ModelMemory(size, ways, size.generation_bytes(dtype.itemsize, SIDE_BY_SIDE_TOKENS))


def gigabytes(size_bytes: float) -> str:
    """As people say it: 2.15 GB, 43.0 MB."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.1f} MB"


def told(found: ModelMemory, dtype: str, tokens: int, width: int) -> list[str]:
    """Lines for a terminal."""
    size = found.size
    lines = [
        f"{size.architecture}, {size.parameters:,} parameters; products in {dtype}, {tokens:,} padded tokens a pass "
        f"(trainer.token_budget) in rows of {width:,}",
        "",
        f"{'to train':<30}{'before a pass':>15}{'in a step':>15}{'with trainer.gradient_checkpointing':>38}",
    ]
    lines += [
        f"{way.name:<30}{gigabytes(way.states):>15}{gigabytes(way.pass_):>15}{gigabytes(way.checkpointed):>38}"
        for way in found.ways
    ]
    generating = f"{gigabytes(found.generating):>15}   weights, keys and values of {SIDE_BY_SIDE_TOKENS:,} tokens side by side"
    return [
        *lines,
        f"{'to generate':<30}{generating}",
        "",
        "computed, and at most; torch and CUDA keep about 1 GB of a GPU besides",
    ]
