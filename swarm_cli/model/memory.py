"""`swarm model memory`: estimates the memory for training and generating with a model, from its
configuration alone.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.hub_models import COMMIT, commit_hash
from swarm_cli.errors import CommandError
from swarm_cli.local.base_model import is_hub_name

if TYPE_CHECKING:
    import torch

    from services.trainer.memory_need import MemoryNeed
    from shared.model.model_size import ModelSize

SIDE_BY_SIDE_TOKENS = 10_000
"""Tokens of prompts and answers that a generator holds at once, for the estimate of its memory."""


@dataclass(frozen=True, slots=True)
class TrainingMethod:
    """A way to train, and the memory that a process then needs, without and with
    `trainer.gradient_checkpointing`; None if it cannot be estimated.
    """

    name: str
    plain: MemoryNeed | None
    recomputing: MemoryNeed | None


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """The memory that a model needs. methods: the ways to train. generating: bytes with
    `SIDE_BY_SIDE_TOKENS` tokens at once. reasons: why some needs cannot be estimated."""

    size: ModelSize
    methods: list[TrainingMethod]
    generating: int
    reasons: list[str]


def configuration_of(model: str, revision: str = "") -> Any:
    """The transformers configuration of a folder or hub name.

    Raises:
        CommandError: there is none, or it cannot be read.
    """
    from shared.hub_models import MODEL_INSTEAD, UnpinnedModelError, hub_unreached
    from shared.model.configuration import library_cause, read_configuration

    try:
        return read_configuration(model, revision)
    except (UnpinnedModelError, OSError) as error:
        if unreached := hub_unreached(error, MODEL_INSTEAD):
            raise CommandError(f"model {model}: {unreached}") from None
        raise CommandError(f"{model} has no configuration that transformers can read: {error}") from None
    # The file may hold anything, and transformers raises whatever one of its layers raises.
    except Exception as error:  # noqa: BLE001
        raise CommandError(
            f"{model} has no configuration that transformers can read ({library_cause(error)}): check its config.json"
        ) from None


def model_memory(config: Any, dtype: torch.dtype, *, rank: int, tokens: int, width: int, gpus: int) -> ModelMemory:
    """The memory that a model needs for each way to train it: all weights, adapters of `rank`, all
    weights split over `gpus`.

    `tokens`, `width`, `dtype`: as in `services.trainer.memory_need.TrainingPlan`.

    Raises:
        CommandError: it is not a causal language model, `rank` is higher than its matrices allow,
            or no way to train it can be estimated.
    """
    from services.trainer.memory_need import TrainingPlan, memory_need
    from shared.model.configuration import library_cause
    from shared.model.model_size import model_size

    def need(lora_rank: int, processes: int, checkpointing: bool) -> MemoryNeed | None:
        plan = TrainingPlan(
            dtype=dtype,
            lora_rank=lora_rank,
            gradient_checkpointing=checkpointing,
            tokens=tokens,
            width=width,
            processes=processes,
        )
        try:
            return memory_need(config, plan)
        except ValueError as error:
            reasons.append(str(error))
            return None
        except (LookupError, AttributeError, TypeError, RuntimeError, ArithmeticError) as error:
            reasons.append(library_cause(error))
            return None

    reasons: list[str] = []
    asked = [("all weights", 0, 1), (f"LoRA of rank {rank}", rank, 1)]
    if gpus > 1:
        asked.append((f"all weights, each of {gpus} GPUs", 0, gpus))
    try:
        size = model_size(config)
    # As above; the configuration's numbers are first used here.
    except Exception as error:  # noqa: BLE001
        raise CommandError(
            f"this model's memory cannot be estimated from its configuration ({library_cause(error)}): check its config.json"
        ) from None
    if rank > (highest := size.highest_rank or size.width):
        raise CommandError(
            f"--rank {rank} is more than {highest}, the highest rank that this model's matrices allow: give a lower one"
        )
    methods = [
        TrainingMethod(name, need(rank_, processes, False), need(rank_, processes, True)) for name, rank_, processes in asked
    ]
    if all(method.plain is None and method.recomputing is None for method in methods):
        raise CommandError(
            f"this model's memory cannot be estimated from its configuration: {reasons[0]}; run a training step and measure it"
        )
    return ModelMemory(size, methods, size.generation_bytes(dtype.itemsize, SIDE_BY_SIDE_TOKENS), list(dict.fromkeys(reasons)))


def memory_lines(found: ModelMemory, dtype: str, tokens: int, width: int) -> list[str]:
    """Lines for a terminal."""
    from shared.model.model_size import gigabytes

    def total(need: MemoryNeed | None) -> str:
        return "–" if need is None else gigabytes(need.total)

    def states(method: TrainingMethod) -> str:
        need = method.plain or method.recomputing
        return "–" if need is None else gigabytes(need.states)

    size = found.size
    lines = [
        f"{size.architecture}, {size.parameters:,} parameters; products in {dtype}, {tokens:,} tokens per pass "
        f"(trainer.token_budget) in rows of {width:,}",
        "",
        f"{'to train':<30}{'before a pass':>15}{'in a step':>15}{'with trainer.gradient_checkpointing':>38}",
    ]
    lines += [
        f"{method.name:<30}{states(method):>15}{total(method.plain):>15}{total(method.recomputing):>38}" for method in found.methods
    ]
    generating = f"{gigabytes(found.generating):>15}   weights, keys and values of {SIDE_BY_SIDE_TOKENS:,} tokens at once"
    return [
        *lines,
        f"{'to generate':<30}{generating}",
        "",
        "computed for the default settings; torch and CUDA need about 1 GB of a GPU more (docs/models.md: what is not included)",
        *(f"not estimated: {reason}" for reason in found.reasons),
    ]


def check_named(model: str, revision: str) -> None:
    """Refuse, before anything slow is imported, what can be neither a model's folder nor a hub name
    at a commit.

    Raises:
        CommandError: naming the model and what to give instead.
    """
    folder = Path(model)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CommandError(f"{model} holds no config.json: give the folder that save_pretrained or `swarm model import` wrote")
        return
    if folder.exists():
        raise CommandError(
            f"{model} is a file: give a model's folder. `swarm model import {shlex.quote(model)} OUT` makes one of a GGUF file"
        )
    if re.fullmatch(COMMIT, revision):
        return
    if not is_hub_name(model):
        raise CommandError(f"there is no folder {model}: check the spelling, or give a hub name (OWNER/NAME) with --revision")
    said = f"--revision {revision[:60]!r} is not the full hash of a commit" if revision else "a hub name needs --revision"
    raise CommandError(f"there is no folder {model}, and {said}: give {commit_hash(model)}")
