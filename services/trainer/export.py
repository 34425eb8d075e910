"""A trained policy as a Hugging Face folder that `transformers` loads: config, tokenizer, weights with adapters merged."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from services.trainer.checkpoint import MANIFEST, Checkpoint, CheckpointError, CheckpointStore, TrainedModel, read_checkpoint
from services.trainer.policy_model import with_adapters
from shared.config.sections import LoraSection, ModelSection
from shared.model.loading import DTYPES, load_causal_lm, load_tokenizer
from shared.model.weights import load_policy_tensors, load_trainable, policy_tensors

CHECKPOINTS = "checkpoints"


def export_policy(source: Path, out_dir: Path, *, best: bool = False) -> Path:
    """Write the policy of a checkpoint, or of a run's newest (or best) checkpoint, into `out_dir` and return it.

    Args:
        source: a run's folder of one node (`var/runs/<run>/<node>`) or one checkpoint's folder.
        out_dir: must not exist, or be empty; it appears whole or not at all.
        best: of a run, take the checkpoint nearest to the best held-out evaluation.

    Raises:
        CheckpointError: no usable checkpoint.
        ModelLoadError: the base model is gone.
        FileExistsError: `out_dir` holds files.
    """
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise FileExistsError(f"{out_dir} is not empty: choose another folder for the export")
    checkpoint = _chosen_checkpoint(source, best)
    model = _policy_of(checkpoint)
    tokenizer = load_tokenizer(_base(checkpoint.model))
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        staging.chmod(0o755)
        if out_dir.exists():
            out_dir.rmdir()
        os.replace(staging, out_dir)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return out_dir


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


def _policy_of(checkpoint: Checkpoint) -> Any:
    trained = checkpoint.model
    base = _base(trained)
    dtype, cpu = DTYPES[trained.dtype], torch.device("cpu")
    model: Any = load_causal_lm(base, dtype=dtype, device=cpu)
    if trained.lora_rank:
        adapted = with_adapters(load_causal_lm(base, dtype=dtype, device=cpu), lora_section(trained))
        load_trainable(adapted, checkpoint.state.weights)
        load_policy_tensors(model, policy_tensors(adapted, dtype))
    else:
        load_policy_tensors(model, checkpoint.state.weights)
    return model
