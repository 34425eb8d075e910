"""The foundation of all messages: the base struct, the bounds of fields, and the error for an
unusable message.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct

from shared.text import HIDDEN, visible

SchemaVersion = Literal[1]
SwarmSchemaVersion = Literal[3]
SCHEMA_VERSION = 1
"""Version of every message that is not on a rollout's path. It is also part of the subjects of
held-out scores.
"""

SWARM_SCHEMA_VERSION = 3
"""Version of the messages on a rollout's path: groups, scored groups, batches and the envelope that
crosses the swarm plane. Also part of the subjects of shared groups (`swarm.rollouts.v3...`).
Version 2 added the swarm's name; 3 made the question a prompt of messages and gave a task a key.
"""
_SWARM_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
SWARM_ID_PATTERN = rf"^{_SWARM_ID}$"
r"""For pydantic, in whose patterns `$` matches only at the very end, and which does not know \Z."""
DEFAULT_SWARM_ID = "swarm"
"""Swarm id of nodes without the setting, so that nodes that share a server form one swarm without
any setting.
"""
SwarmId = Annotated[str, Meta(pattern=rf"^{_SWARM_ID}\Z")]
_NODE_NAME = r"[a-z0-9][a-z0-9-]{0,31}"
# Patterns end with \Z because `$` also matches before a final newline, and a name with one could
# forge a line wherever names are listed.
NodeId = Annotated[str, Meta(pattern=rf"^{_NODE_NAME}\Z")]
DatasetName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_]{0,62}\Z")]
ShortText = Annotated[str, Meta(max_length=512)]
PlainText = Annotated[str, Meta(max_length=512, pattern=rf"^[^{HIDDEN}]*\Z")]
"""Short text that other nodes see, without invisible characters or ones that control a terminal."""
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Seed = Annotated[int, Meta(ge=0, le=2**62)]
UnixTime = Annotated[float, Meta(ge=0.0, le=1e11)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
MAX_REWARD = 1e9
"""Largest magnitude of a reward; one beyond it is unknown, like infinity."""
Reward = Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)]
Number = Annotated[float, Meta(ge=-1e30, le=1e30)]
FinishReason = Literal["stop", "length", "abort"]
Origin = Literal["local", "external"]
PartKind = Literal["text"]
Role = Literal["system", "user", "assistant", "tool"]
Encoding = Literal["none", "zstd"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
"""Encodings of a group's bytes that this version reads."""


_MAX_DETAIL = 400


def is_node_name(text: str) -> bool:
    """Check whether `text` can be a node's name. Needed because subjects and keys may contain
    anything but white space.
    """
    return re.fullmatch(_NODE_NAME, text) is not None


class MessageError(ValueError):
    """A message that cannot be used. `reason` is one short word that can serve as a metric
    label.
    """

    def __init__(self, reason: str, detail: str) -> None:
        # The decoder's error quotes the message, such as the name of an unknown field, so the
        # sender can choose its text.
        self.detail = visible(detail, _MAX_DETAIL)
        super().__init__(f"{reason}: {self.detail}")
        self.reason = reason


class Message(Struct, frozen=True, kw_only=True):
    """Base of every struct on the wire: immutable, keyword-only. Unknown fields are ignored, so a
    newer version may add a field with a default. It raises the schema version instead if older
    software must not ignore the field, or must not lose it when it writes a record back.
    """


class ModelIdentity(Message, frozen=True, kw_only=True):
    """The model that sampled: its public name and the hash of its tokenizer
    (`shared.model.prompts`).
    """

    name: PlainText
    tokenizer_hash: Sha256
