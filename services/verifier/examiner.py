"""Examines foreign messages without blocking the rest of the verifier: payloads that take longer
than about a millisecond are processed in a thread.

Decoding, hashing and verifying 8 MiB takes a few hundred milliseconds, and fingerprints of 64 KiB
take five, during which no local group would get its rewards. There is one thread, first come first
served, so that all strangers together use at most one processor. The border's memories are changed
only in the event loop; later checks see what changed there while the thread was working.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from services.verifier.border import Border, Candidate, Refused

AT_ONCE_BYTES = 8 * 1024


class Examiner:
    """Drives `Border.examination`."""

    def __init__(self, border: Border) -> None:
        self._border = border
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="examiner")

    async def examine(self, subject: str, payload: bytes, now_s: float, seq: int, stored_at_s: float) -> Candidate | Refused:
        """All checks before scoring; arguments as in `Border.examination`. Small messages are
        examined here at once.
        """
        examination, result = self._border.examination(subject, payload, now_s, seq, stored_at_s), None
        while True:
            try:
                work = examination.send(result)
            except StopIteration as done:
                verdict: Candidate | Refused = done.value
                return verdict
            result = work() if len(payload) <= AT_ONCE_BYTES else await self._apart(work)

    def close(self) -> None:
        """Start no further examinations."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _apart(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
