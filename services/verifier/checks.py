"""The list of the border's checks, which `services.verifier.border` fills beside the code of each.
`python -m monitoring.border_doc` writes it to docs/security.md.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, Self, TypeVar


class Offence(Enum):
    """A finding about what a key has signed. Its value names it in reports and metrics.

    blame: how much it counts against the key, in [0, 1]. sufficient: whether it causes quarantine
    by itself.
    """

    blame: float
    sufficient: bool

    def __new__(cls, name: str, blame: float = 0.0, sufficient: bool = False) -> Self:
        """Make a member from its name alone, or with its blame."""
        made = object.__new__(cls)
        made._value_, made.blame, made.sufficient = name, blame, sufficient
        return made


class Stage(Enum):
    """When a check is made; each stage costs more than the one before."""

    UNREAD = "before the payload is read"
    PAYLOAD = "large payloads, stored in chunks"
    ENVELOPE = "envelope"
    KEY = "key"
    BODY = "body"
    CONTENT = "content"
    SANDBOX = "sandbox"
    ACCEPTANCE = "once more, before it is taken in"


class Check(NamedTuple):
    """A message that fails this check is refused as `refusal`, and no later check runs. spares:
    when the key is not blamed after all.
    """

    stage: Stage
    refusal: Offence
    fails: str
    spares: str = ""

    @property
    def blamed(self) -> str:
        """Who is blamed, as text for the documentation."""
        weight = 0.0 if self.stage in (Stage.UNREAD, Stage.PAYLOAD, Stage.ENVELOPE) else self.refusal.blame
        blamed = f"the key, {weight:g}" if weight else "nobody"
        return f"{blamed}; nobody {self.spares}" if self.spares else blamed


CHECKS: list[Check] = []
"""Every check, in order."""

T = TypeVar("T")


def refuses(stage: Stage, *checks: tuple[Offence, str] | tuple[Offence, str, str]) -> Callable[[T], T]:
    """List what a function of this stage refuses, in its order: reason, words, and when the key is
    spared.
    """
    CHECKS.extend(Check(stage, *each) for each in checks)
    CHECKS.sort(key=lambda each: list(Stage).index(each.stage))
    return lambda function: function
