"""The id of a rollout group in logs and message headers: the first 16 digits of its content id, the
same from generator to trainer.

It is for people who follow a group through the logs, not a key: decisions about duplicates and
replays use the whole id. The header of a foreign message is only a claim; the border computes the
id from the bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from shared.contracts.messages import Batch

ROLLOUT_ID_HEADER = "Swarm-Rollout-Id"
MAX_NAMED = 40
"""Ids in one line of a log: less than 1 KB."""
MAX_TASKS = 8

_DIGITS = 16
_VALID = re.compile(r"[0-9a-f]{16}")


def rollout_id_of(group_id: str) -> str:
    """The rollout id of the group whose content id (64 hex digits) is `group_id`."""
    return group_id[:_DIGITS]


def claimed_rollout_id(headers: Mapping[str, str]) -> str | None:
    """What a message's header says, or None where it says nothing or no rollout id. Fit for a log
    whoever wrote it.
    """
    claimed = headers.get(ROLLOUT_ID_HEADER, "")
    return claimed if _VALID.fullmatch(claimed) else None


def batch_fields(batch: Batch) -> dict[str, object]:
    """What a log line says of a batch: its number, size, datasets and rollout ids; of a large one
    the first `MAX_NAMED` ids.
    """
    groups = [item.scored for item in batch.items]
    return {
        "batch": batch.number,
        "groups": len(groups),
        "tasks": sorted({scored.group.task.ref.dataset for scored in groups})[:MAX_TASKS],
        "rollout_ids": [rollout_id_of(scored.group_id) for scored in groups[:MAX_NAMED]],
    }
