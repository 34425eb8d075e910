"""A node's steps for its page: the rewards of each, by the trainer's records where they are on this
machine, else by the batches that were read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swarm_cli.dashboard.recent_groups import StepPoint


def steps_object(recorded: Sequence[StepPoint], batches: Sequence[StepPoint], first_held: int) -> list[list[Any]]:
    """The steps, oldest first, each as its number, time, mean reward of local and of foreign
    groups, and whether the batch log still holds its groups. Pure.

    Args:
        recorded: What the trainer has recorded: the steps that it took.
        batches: The batches that were read. The newest may wait for its step, and never have it.
        first_held: The oldest step whose batch is in the log.
    """
    made = {point.step: point for point in batches}
    told = any(point.local is not None or point.foreign is not None for point in recorded)
    newest = max(made, default=-1)
    return [
        [
            point.step,
            made[point.step].at if point.step in made else point.at,
            *(None if rate is None else round(rate, 4) for rate in (point.local, point.foreign)),
            first_held <= point.step <= newest,
        ]
        for point in (recorded if told else batches)
    ]
