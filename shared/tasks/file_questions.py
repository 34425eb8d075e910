"""What a process that has read a file of rows tells one that has not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FileQuestions:
    """How many different questions a file source has; `held_out` of them are never trained on.
    `left_out`: lines that say which rows are not used, as no answer to them earns full marks; empty
    if all are. `place`: as in `shared.tasks.specs.source_problems`; `part`: the part of all groups
    that are of this source.
    """

    place: int
    path: str
    questions: int
    held_out: int
    part: float
    left_out: tuple[str, ...] = ()
