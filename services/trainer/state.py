"""The state that a trainer resumes from: its learner's state, and its position in the batch log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from services.trainer.selection.capability import Window


@dataclass(frozen=True, slots=True)
class LearnerState:
    """The part of a checkpoint that belongs to the learner. `optimizer` and `random` are plain
    containers of tensors and numbers.

    earlier_groups: what is known about the senders in earlier batches
    (`services.trainer.selection.capability`).
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    random: dict[str, Tensor]
    earlier_groups: Window = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPosition:
    """The position of training: batch `batch_number`, at `stream_seq` of the batch log, is the last
    one that the weights contain.
    """

    batch_number: int = 0
    stream_seq: int = 0
    consumed_local: int = 0
