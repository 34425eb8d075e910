"""The foundation of all messages: the base struct, the bounds of fields, and the error for an
unusable message.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.text import HIDDEN, visible

SchemaVersion = Literal[1]
SwarmSchemaVersion = Literal[2]
_SWARM_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
SWARM_ID_PATTERN = rf"^{_SWARM_ID}$"
"""For pydantic, whose `$` matches at the end only and which knows no \\Z."""
DEFAULT_SWARM_ID = "swarm"
"""What nodes are signed for that were told nothing: those that share a server are one swarm without
any setting.
"""
SwarmId = Annotated[str, Meta(pattern=rf"^{_SWARM_ID}\Z")]
_NODE_NAME = r"[a-z0-9][a-z0-9-]{0,31}"
# Patterns end with \Z: `$` also matches before a newline at the end, and such a name forges a line
# wherever names are listed.
NodeId = Annotated[str, Meta(pattern=rf"^{_NODE_NAME}\Z")]
DatasetName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_]{0,62}\Z")]
ShortText = Annotated[str, Meta(max_length=512)]
PlainText = Annotated[str, Meta(max_length=512, pattern=rf"^[^{HIDDEN}]*\Z")]
"""Short text that others see: nothing in it that acts on a terminal or hides."""
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Seed = Annotated[int, Meta(ge=0, le=2**62)]
UnixTime = Annotated[float, Meta(ge=0.0, le=1e11)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Reward = Annotated[float, Meta(ge=0.0, le=1.0)]
Number = Annotated[float, Meta(ge=-1e30, le=1e30)]
FinishReason = Literal["stop", "length", "abort"]
Origin = Literal["local", "external"]


_MAX_DETAIL = 400


def is_node_name(text: str) -> bool:
    """Whether `text` can be the name of a node. Subjects and keys may hold anything but white
    space.
    """
    return re.fullmatch(_NODE_NAME, text) is not None


class MessageError(ValueError):
    """A message that cannot be used. `reason` is one short word, fit for a metric label."""

    def __init__(self, reason: str, detail: str) -> None:
        # A decoder's words quote the message: the name of a field nobody knows is the sender's to
        # choose.
        self.detail = visible(detail, _MAX_DETAIL)
        super().__init__(f"{reason}: {self.detail}")
        self.reason = reason


class Message(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every struct on the wire: immutable, keyword-only, no unknown fields."""
