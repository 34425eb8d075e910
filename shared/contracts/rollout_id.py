"""The rollout id, which names a group in logs and message headers: the first 16 digits of its
content id, the same from generator to trainer.

It lets people follow a group through the logs. It is not a key: duplicates and replays are
recognised by the whole id. In a foreign message the header is only a claim; the border computes the
id from the bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from shared.contracts.messages import Batch

ROLLOUT_ID_HEADER = "Swarm-Rollout-Id"
MAX_NAMED = 40
"""Largest number of ids in one log line: less than 1 KB."""
MAX_TASKS = 8

_DIGITS = 16
_VALID = re.compile(r"[0-9a-f]{16}")


def rollout_id_of(group_id: str) -> str:
    """The rollout id of the group whose content id (64 hex digits) is `group_id`."""
    return group_id[:_DIGITS]


def claimed_rollout_id(headers: Mapping[str, str]) -> str | None:
    """The rollout id in a message's headers, or None if there is none or it is malformed. Safe to
    log, even from a foreign message.
    """
    claimed = headers.get(ROLLOUT_ID_HEADER, "")
    return claimed if _VALID.fullmatch(claimed) else None


def batch_fields(batch: Batch) -> dict[str, object]:
    """Fields of a log line about a batch: its number, size, datasets and rollout ids (at most the
    first `MAX_NAMED`).
    """
    groups = [item.scored for item in batch.items]
    return {
        "batch": batch.number,
        "groups": len(groups),
        "tasks": sorted({scored.group.task.ref.dataset for scored in groups})[:MAX_TASKS],
        "rollout_ids": [rollout_id_of(scored.group_id) for scored in groups[:MAX_NAMED]],
    }
