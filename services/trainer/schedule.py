"""The learning rate of a step, from its number alone, so that resuming needs no saved state."""

from __future__ import annotations

import math
from typing import Literal

from shared.config.trainer_section import TrainerSection

ScheduleKind = Literal["constant", "linear", "cosine"]


def learning_rate(step: int, *, peak: float, warmup_steps: int, kind: ScheduleKind, end_step: int) -> float:
    """Learning rate of step `step` (the first is 1).

    It rises linearly to `peak`, reached at step `warmup_steps + 1`, then stays (`constant`) or
    falls to 0 just after `end_step` along a line or half a cosine, and stays 0.

    Example: peak 1, warm-up 2, linear to step 6: 1/3, 2/3, 1, 3/4, 1/2, 1/4, 0.
    """
    if step <= warmup_steps:
        return peak * step / (warmup_steps + 1)
    if kind == "constant":
        return peak
    progress = (step - 1 - warmup_steps) / max(1, end_step - warmup_steps)
    if progress >= 1.0:
        return 0.0
    if kind == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))


def configured_rate(trainer: TrainerSection, step: int) -> float:
    """Learning rate of a step under the settings; without `schedule_steps`, a schedule ends with
    the run.
    """
    return learning_rate(
        step,
        peak=trainer.learning_rate,
        warmup_steps=trainer.warmup_steps,
        kind=trainer.schedule,
        end_step=trainer.schedule_steps or trainer.max_steps,
    )
