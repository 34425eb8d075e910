"""The error of an objective whose functions return what cannot be used. Needs no torch."""

from __future__ import annotations

from shared.registry import OBJECTIVES
from shared.runtime.errors import FatalError


class ObjectiveError(FatalError):
    """An objective's loss or advantages cannot be used. The message names the objective and what is
    wrong.
    """


def unusable(name: str, why: str, part: str = "loss") -> ObjectiveError:
    """The error of an objective with a part of which `why` tells what is wrong."""
    return ObjectiveError(f"the {part} of {OBJECTIVES.described(name)} {why}: correct it, or change {OBJECTIVES.setting}")
