"""One worker process as its parent sees it."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import shared
from shared.tasks.sandbox.protocol import PROGRESS_BYTES, READY, Progress, frame_length, pack_frame, unpack_body

START_TIMEOUT_S = 60.0
POLLS_PER_TIMEOUT = 5
CHUNK_BYTES = 2**20

_ENVIRONMENT = {
    "PATH": os.defpath,
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""All that a worker inherits, apart from `_PASSED_ON`. The hash seed is fixed because some datasets iterate over sets."""

_PASSED_ON = ("PYTHONPATH", "MPLCONFIGDIR")
"""Where a user's own verifier may lie; a folder for a library of reasoning-gym, which does not start without one."""


class WorkerLost(Exception):
    """The worker hung (`hung`), or died. `step` is the (job number, step) it was at; None when it was at no job.

    Jobs count from 0 over the worker's life; see `protocol` for steps.
    """

    def __init__(self, cause: str, step: tuple[int, int] | None, *, hung: bool = False) -> None:
        super().__init__(cause)
        self.step = step
        self.hung = hung


class Child:
    """A running worker. After `WorkerLost` it is dead and a new one has to be started."""

    def __init__(self, process: asyncio.subprocess.Process, progress: Progress, answer_timeout_s: float) -> None:
        self._process = process
        self._progress = progress
        self._answer_timeout_s = answer_timeout_s
        self._received = bytearray()

    @classmethod
    async def start(cls, *, memory_bytes: int, answer_timeout_s: float, verifiers: Sequence[str] = ()) -> Child:
        """Start a worker and wait until it can take work. `verifiers` are those it is to import at once.

        Raises:
            WorkerLost: it ended or said nothing within `START_TIMEOUT_S`; why is on standard error.
        """
        with tempfile.TemporaryFile() as file:
            file.truncate(PROGRESS_BYTES)
            progress = Progress(file.fileno())
            arguments = [str(file.fileno()), str(memory_bytes), str(answer_timeout_s), *verifiers]
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-s",
                "-m",
                "shared.tasks.sandbox.worker",
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=CHUNK_BYTES,
                env=_ENVIRONMENT | {name: os.environ[name] for name in _PASSED_ON if name in os.environ},
                cwd=Path(shared.__file__).parent.parent,
                pass_fds=[file.fileno()],
                start_new_session=True,
            )
        child = cls(process, progress, answer_timeout_s)
        try:
            ready = await asyncio.wait_for(child._read_frame(), START_TIMEOUT_S)
        except (TimeoutError, EOFError, OSError) as error:
            await child.kill()
            raise WorkerLost(f"worker did not start: {type(error).__name__}, exit code {process.returncode}", None) from None
        except BaseException:
            await child.kill()
            raise
        assert ready == READY
        return child

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, jobs: list[list[Any]]) -> None:
        """Hand over a batch. Does not wait until it is read: a worker that waits to be read itself could not read it."""
        assert self._process.stdin is not None
        self._process.stdin.write(pack_frame(jobs))

    async def results(self, on_slow: Callable[[tuple[int, int]], None]) -> list[list[Any]]:
        """The next finished jobs, in the order in which they were sent, at least one.

        `on_slow` is told the job and step that have taken a part of the answer timeout already.

        Raises:
            WorkerLost: no step was finished for the answer timeout, and the worker was killed; or it died of itself.
        """
        frame: list[list[Any]] | None = self._take_frame()
        if frame is not None:
            return frame
        reading = asyncio.create_task(self._read_frame())
        last, unchanged = self._progress.read(), 0
        try:
            while unchanged < POLLS_PER_TIMEOUT:
                done, _ = await asyncio.wait({reading}, timeout=self._answer_timeout_s / POLLS_PER_TIMEOUT)
                if done:
                    return list(reading.result())
                now = self._progress.read()
                last, unchanged = now, unchanged + 1 if now == last else 0
                if unchanged and now is not None:
                    on_slow(now)
        except (EOFError, OSError):
            await self._lose("died", hung=False)
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError, EOFError, OSError):
                await reading
        await self._lose(f"hung for {self._answer_timeout_s:g} s", hung=True)
        raise AssertionError("unreachable")

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        self._progress.close()

    async def _lose(self, cause: str, *, hung: bool) -> None:
        step = self._progress.read()
        await self.kill()
        raise WorkerLost(cause, step, hung=hung)

    async def _read_frame(self) -> Any:
        assert self._process.stdout is not None
        while (frame := self._take_frame()) is None:
            chunk = await self._process.stdout.read(CHUNK_BYTES)
            if not chunk:
                raise EOFError("the worker closed its output")
            self._received += chunk
        return frame

    def _take_frame(self) -> Any:
        received = self._received
        if len(received) < 4:
            return None
        end = 4 + frame_length(bytes(received[:4]))
        if len(received) < end:
            return None
        frame = unpack_body(bytes(received[4:end]))
        del received[:end]
        return frame
