"""Writes the last refusals to `refused-<replica>.jsonl` in the node's run folder, for `swarm
rollouts --refused` and `swarm trace`.

The file is a snapshot of a bounded memory. It is written anew in a thread at most every
`WRITE_PERIOD_S`, so however many messages are refused, it neither grows nor slows the border.
Nothing else depends on it.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from services.verifier.refused_memory import RefusedGroup, RefusedMemory
from shared.drafts import remove_abandoned_drafts, replace_text
from shared.json_lines import read_jsonl
from shared.run_records import refused_file, refused_files
from shared.runtime.writes import Writes

WRITE_PERIOD_S = 5.0
FILES_KEPT = 8
"""Files of former replicas that are kept."""


class RefusedRecord:
    """The refusals of one verifier replica."""

    def __init__(self, run_dir: Path, replica: str, writes: Writes) -> None:
        """Continues with what this replica wrote before a restart."""
        self._run_dir, self._file, self._writes = run_dir, refused_file(run_dir, replica), writes
        self._memory = RefusedMemory()
        self._changed = False
        with self._trying():
            for line in read_jsonl(self._file):
                self._take_back(line)
            for path in refused_files(run_dir)[FILES_KEPT:]:
                path.unlink(missing_ok=True)
            remove_abandoned_drafts(run_dir)

    def note(self, refused: RefusedGroup, *, known: bool) -> None:
        """Remember a refusal; it is written with the next snapshot."""
        self._memory.note(refused, known=known)
        self._changed = True

    async def run(self) -> None:
        """Write new entries periodically, and once more at the end."""
        try:
            while True:
                await asyncio.sleep(WRITE_PERIOD_S)
                await self.write()
        finally:
            if self._changed:
                self._write(self._memory.all())

    async def write(self) -> None:
        """Write now if there is anything new."""
        if self._changed:
            self._changed = False
            await asyncio.to_thread(self._write, self._memory.all())

    def _write(self, kept: list[tuple[RefusedGroup, bool]]) -> None:
        with self._trying():
            lines = (json.dumps({**each.as_object(), "known": known}, separators=(",", ":")) for each, known in kept)
            replace_text(self._file, "".join(f"{line}\n" for line in lines))
        self._changed = self._changed or self._writes.failing("refusals")

    def _trying(self) -> AbstractContextManager[None]:
        return self._writes.trying("refusals", f"free space at {self._run_dir}; groups are checked as ever, tried again")

    def _take_back(self, line: dict[str, Any]) -> None:
        """Read a line from before a restart; invalid lines are skipped."""
        texts = [line.get(name) for name in ("reason", "detail", "sender", "id", "claimed_id")]
        numbers = [line.get(name) for name in ("time", "stored_at", "swarm_seq")]
        excerpt = line.get("group")
        if not all(isinstance(each, str) for each in texts) or not all(isinstance(each, int | float) for each in numbers):
            return
        reason, detail, sender, group_id, claimed_id = map(str, texts)
        refused = RefusedGroup(
            time=float(line["time"]),
            reason=reason,
            detail=detail,
            sender=sender,
            group_id=group_id,
            claimed_id=claimed_id,
            swarm_seq=int(line["swarm_seq"]),
            stored_at=float(line["stored_at"]),
            excerpt=excerpt if isinstance(excerpt, dict) else None,
        )
        self._memory.note(refused, known=line.get("known") is True)
