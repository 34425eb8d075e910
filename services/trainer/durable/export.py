"""Exports a trained policy as a folder: for `transformers`, with config, tokenizer and merged
adapters, or only its adapters, for peft.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.trainer.durable.checkpoint import (
    MANIFEST,
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    TrainedModel,
    read_checkpoint,
)
from services.trainer.durable.model_card import write_card
from services.trainer.policy_model import with_adapters
from shared.config.sections import LoraSection, ModelSection
from shared.model.adapter_merge import DeltaRounding, RoundingTally
from shared.model.loading import DTYPES, load_causal_lm
from shared.model.reading import load_tokenizer
from shared.model.weights import load_policy_tensors, load_trainable, policy_tensors
from shared.new_folder import appearing_whole, refuse_filled

CHECKPOINTS = "checkpoints"
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Exported:
    """An exported policy in `folder`, with weights in `dtype`. `rounding`: of adapters that were
    merged; else None.
    """

    folder: Path
    dtype: str
    rounding: DeltaRounding | None = None


def export_policy(source: Path, out_dir: Path, *, best: bool = False, dtype: str | None = None) -> Exported:
    """Write the policy of a checkpoint, or of a run's newest (or best) checkpoint, into `out_dir`,
    with adapters merged in float32.

    Args:
        source: A run's folder of one node (`var/runs/<run>/<node>`) or one checkpoint's folder.
        out_dir: Must not exist, or be empty. It appears completely or not at all.
        best: For a run, take the checkpoint nearest to the best held-out evaluation.
        dtype: Of the weights, a name in `DTYPES`; None: the one used for matrix products.

    Raises:
        CheckpointError: no usable checkpoint.
        ModelLoadError: the base model is missing.
        FileExistsError: `out_dir` contains files.
    """
    refuse_filled(out_dir, "the export")
    checkpoint = _chosen_checkpoint(source, best)
    wanted = dtype or checkpoint.model.dtype
    model, rounding = _policy_of(checkpoint, DTYPES[wanted])
    tokenizer = load_tokenizer(_base(checkpoint.model))
    with appearing_whole(out_dir) as staging:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        write_card(staging, checkpoint, dtype=wanted, adapter=False)
    return Exported(out_dir, wanted, rounding)


def export_adapter(source: Path, out_dir: Path, *, best: bool = False) -> Exported:
    """Write the adapters alone, in float32 and therefore without rounding, in the form that
    `peft.PeftModel.from_pretrained` loads onto the base model.

    Arguments and errors are those of `export_policy`; also raises CheckpointError if no adapters
    were trained.
    """
    refuse_filled(out_dir, "the export")
    checkpoint = _chosen_checkpoint(source, best)
    if not checkpoint.model.lora_rank:
        raise CheckpointError(f"{source} was trained without adapters (trainer.lora.rank = 0): export the whole policy")
    adapted = _adapted(checkpoint)
    for config in adapted.peft_config.values():
        config.revision = checkpoint.model.model_revision or None
    with appearing_whole(out_dir) as staging:
        # The base's embeddings were not trained. Without this argument peft asks the hub whether to
        # save them.
        adapted.save_pretrained(staging, save_embedding_layers=False)
        write_card(staging, checkpoint, dtype="float32", adapter=True)
    return Exported(out_dir, "float32")


def lora_section(model: TrainedModel) -> LoraSection:
    """The adapter settings that a checkpoint was trained with."""
    return LoraSection(
        rank=model.lora_rank, alpha=model.lora_alpha, dropout=model.lora_dropout, target_modules=model.lora_target_modules
    )


def _chosen_checkpoint(source: Path, best: bool) -> Checkpoint:
    if (source / MANIFEST).is_file():
        return read_checkpoint(source)
    store = CheckpointStore(source / CHECKPOINTS, keep=1, keep_best=True)
    if best:
        evaluation = store.best()
        if evaluation is None:
            raise CheckpointError(f"{source} has no evaluated checkpoint: export the newest one, or wait for an evaluation")
        return store.read(evaluation.step)
    checkpoint, _ = store.newest()
    if checkpoint is None:
        raise CheckpointError(f"{source} has no checkpoint: give a run's folder such as var/runs/<run>/<node> after its first one")
    return checkpoint


def _base(model: TrainedModel) -> ModelSection:
    return ModelSection(path=model.model_path, revision=model.model_revision)


def _policy_of(checkpoint: Checkpoint, dtype: torch.dtype) -> tuple[Any, DeltaRounding | None]:
    model: Any = load_causal_lm(_base(checkpoint.model), dtype=dtype, device=_CPU)
    tally = RoundingTally()
    if checkpoint.model.lora_rank:
        load_policy_tensors(model, policy_tensors(_adapted(checkpoint), dtype, tally=tally))
    else:
        # State that is not trained, such as the bias of a router without a gradient, comes from the
        # base.
        load_trainable(model, checkpoint.state.weights)
    return model, tally.rounding()


def _adapted(checkpoint: Checkpoint) -> Any:
    """The model as it was trained: its base in the dtype used then, the adapters in float32."""
    trained = checkpoint.model
    base = load_causal_lm(_base(trained), dtype=DTYPES[trained.dtype], device=_CPU)
    adapted = with_adapters(base, lora_section(trained))
    load_trainable(adapted, checkpoint.state.weights)
    return adapted
