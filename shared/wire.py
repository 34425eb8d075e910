"""What every message is built on: its base struct, the bounds of its fields, and the error of a message that cannot be used."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

SchemaVersion = Literal[1]
NodeId = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]
DatasetName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_]{0,62}$")]
ShortText = Annotated[str, Meta(max_length=512)]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Seed = Annotated[int, Meta(ge=0, le=2**62)]
UnixTime = Annotated[float, Meta(ge=0.0, le=1e11)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Reward = Annotated[float, Meta(ge=0.0, le=1.0)]
Number = Annotated[float, Meta(ge=-1e30, le=1e30)]
FinishReason = Literal["stop", "length", "abort"]
Origin = Literal["local", "external"]


class MessageError(ValueError):
    """A message that cannot be used. `reason` is one short word, fit for a metric label."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class Message(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every struct on the wire: immutable, keyword-only, no unknown fields."""
