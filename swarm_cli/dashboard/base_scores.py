"""The base policies' held-out pass rates in the runs on this machine (`eval.jsonl`). The swarm may
not have them: a verifier passes on the newest evaluation every two seconds, and a short run has
several in that time; and a node without a swarm passes on none.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from shared.json_lines import read_jsonl
from swarm_cli.observe.evaluations import EVAL_FILE

SETS_KEPT = 64
Bases = Mapping[tuple[str, str, int], float]
"""Pass rate of the base policy by node, id of the held-out set ("" if unknown), and number of
tasks.
"""


class _Line(msgspec.Struct, frozen=True):
    policy_version: int
    pass_rate: Annotated[float, msgspec.Meta(ge=0, le=1)]
    n: int
    held_out: str | None = None


class BaseScores:
    """Reads a node's file again when it has changed."""

    def __init__(self) -> None:
        self._read: dict[Path, tuple[tuple[int, int], dict[tuple[str, int], float]]] = {}

    def read(self, folders: Mapping[str, Path]) -> dict[tuple[str, str, int], float]:
        """The pass rates in these folders, by node. If a set was evaluated again, the later line
        counts.
        """
        self._read = {folder: found for folder in folders.values() if (found := self._of(folder)) is not None}
        return {
            (node, *key): rate
            for node, folder in folders.items()
            for key, rate in (self._read[folder][1] if folder in self._read else {}).items()
        }

    def _of(self, folder: Path) -> tuple[tuple[int, int], dict[tuple[str, int], float]] | None:
        """The file's identity, by which a change is seen, and its pass rates."""
        try:
            found = (folder / EVAL_FILE).lstat()
            if not stat.S_ISREG(found.st_mode):
                return None
            state = found.st_ino, found.st_size
            known = self._read.get(folder)
            return known if known is not None and known[0] == state else (state, _bases(folder))
        except OSError:
            return None


def _bases(folder: Path) -> dict[tuple[str, int], float]:
    bases: dict[tuple[str, int], float] = {}
    for each in read_jsonl(folder / EVAL_FILE):
        try:
            line = msgspec.convert(each, _Line)
        except msgspec.ValidationError:
            continue
        key = (line.held_out or "", line.n)
        if line.policy_version == 0 and (key in bases or len(bases) < SETS_KEPT):
            bases[key] = line.pass_rate
    return bases
