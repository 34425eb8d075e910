"""One worker process, seen from its parent."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shared
from shared.cancelling import cancel_and_wait
from shared.reward_files import to_hold
from shared.tasks.derive import from_package
from shared.tasks.file_rows import FileRows, find_all_rows, inheritance
from shared.tasks.sandbox.confinement import path_from_elsewhere
from shared.tasks.sandbox.protocol import MAX_FRAME_BYTES, PROGRESS_BYTES, READY, Progress, frame_length, pack_frame, unpack_body
from shared.tasks.verifiers import VerifierChoice

if TYPE_CHECKING:
    from shared.config.task_sections import TaskSpec

START_TIMEOUT_S = 60.0
OUTSIDE_START_TIMEOUT_S = 600.0
"""Outside the sandbox a reward may load a model where its file is imported."""
POLLS_PER_TIMEOUT = 5
CHUNK_BYTES = 2**20
MAX_GROWTH_BYTES = 256 * 2**20
"""A worker is replaced when its resident memory has grown by this much since it was ready. Two such
workers and a foreign group fit into the memory limit of the shipped verifier pod.
"""
WORKER = "shared.tasks.sandbox.worker"
FORKER = "shared.tasks.sandbox.forker"
NOT_A_REPLY = "sent what is no result"

_ENVIRONMENT = {
    "PATH": os.defpath,
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""All that a worker inherits, apart from `_PASSED_ON`. The hash seed is fixed because some datasets
iterate over sets.
"""

_PASSED_ON = ("PYTHONPATH", "MPLCONFIGDIR")
"""Where a user's own verifier may be installed, and the folder with matplotlib's font cache, should
such a verifier import it.
"""


def _environment(*, outside: bool) -> dict[str, str]:
    passed_on = {name: os.environ[name] for name in (os.environ if outside else _PASSED_ON) if name in os.environ}
    passed_on["PYTHONPATH"] = path_from_elsewhere(passed_on.get("PYTHONPATH", ""))
    if outside:
        passed_on.pop("PYTHONSAFEPATH", None)  # it begins in the folder of this code
        return passed_on | {"PYTHONHASHSEED": "0"}
    return _ENVIRONMENT | passed_on


class WorkerLost(Exception):
    """The worker hung (`hung`) or died. `step` is the (job number, step) that it was working on;
    None if it was working on no job.

    Jobs are numbered from 0 over the worker's life; see `protocol` for steps.
    """

    def __init__(self, cause: str, step: tuple[int, int] | None, *, hung: bool = False) -> None:
        super().__init__(cause)
        self.step = step
        self.hung = hung


class Child:
    """A running worker. After `WorkerLost` it is dead, and a new one must be started."""

    def __init__(
        self, process: asyncio.subprocess.Process, progress: Progress, answer_timeout_s: float, *, outside: bool = False
    ) -> None:
        self._process = process
        self._progress = progress
        self._answer_timeout_s = answer_timeout_s
        self._outside = outside
        self._received = bytearray()
        self._ready_bytes = 0
        self._closed = False
        self.missing: dict[str, str] = {}
        """Protections that the system did not give this worker, by name, with cause and remedy."""

    @classmethod
    async def start(
        cls,
        *,
        memory_bytes: int,
        answer_timeout_s: float,
        verifiers: Sequence[str] = (),
        sources: Sequence[str] = (),
        rows: Sequence[FileRows] = (),
        module: str = WORKER,
        own_sources: Sequence[Sequence[str]] = (),
        reward_files: Sequence[Any] = (),
        outside: bool = False,
    ) -> Child:
        """Start a worker and wait until it can take work. It imports `verifiers` and
        the task `sources` of installed packages at once.

        `rows`: of files; it inherits them as open files, so that it needs no right to open any.
        `module`: the code to run, with `answer_timeout_s` as its third argument. `own_sources`: as
        `[dataset, config, verifier]`, and `reward_files` (`to_hold`), are sent to it before it is
        ready. `outside`: of the sandbox: it keeps this process's environment, folder and rights.

        Raises:
            WorkerLost: it exited or did not report in time; the reason is on standard error.
        """
        with tempfile.TemporaryFile() as file:
            file.truncate(PROGRESS_BYTES)
            progress = Progress(file.fileno())
            told = [str(file.fileno()), "outside" if outside else str(memory_bytes), str(answer_timeout_s), inheritance(rows)]
            arguments = [*told, *verifiers, "--", *sources]
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *([] if outside else ["-s"]),
                "-m",
                module,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=CHUNK_BYTES,
                env=_environment(outside=outside),
                cwd=Path(shared.__file__).parent.parent,
                pass_fds=[file.fileno(), *(each.descriptor for each in rows)],
                start_new_session=True,
            )
        child = cls(process, progress, answer_timeout_s, outside=outside)
        child.send([[*own_sources], [*reward_files], os.getcwd()])
        try:
            async with asyncio.timeout(OUTSIDE_START_TIMEOUT_S if outside else START_TIMEOUT_S):
                ready = await child._read_frame()
        except (TimeoutError, EOFError, OSError) as error:
            await child.kill()
            raise WorkerLost(f"worker did not start: {type(error).__name__}, exit code {process.returncode}", None) from None
        except BaseException:
            await child.kill()
            raise
        assert ready[0] == READY
        child.missing = ready[1]
        child._ready_bytes = child.resident_bytes()
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    def send(self, jobs: list[Any]) -> None:
        """Send a batch of jobs, or a single job to a forker.

        Does not wait until the worker has read it: a worker that is itself blocked on writing could
        not read.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(pack_frame(jobs))

    async def results(self) -> list[list[Any]]:
        """The next finished jobs, at least one, in the order in which they were sent.

        Raises:
            WorkerLost: no step was finished within the answer timeout, and the worker was killed;
                or it died.
        """
        try:
            frame: list[list[Any]] | None = self._take_frame()
        except (ValueError, TypeError):
            raise await self._lose(NOT_A_REPLY, hung=False) from None
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
        except (EOFError, OSError):
            raise await self._lose("died", hung=False) from None
        except (ValueError, TypeError):
            raise await self._lose(NOT_A_REPLY, hung=False) from None
        finally:
            await cancel_and_wait(reading)
        raise await self._lose(f"hung for {self._answer_timeout_s:g} s", hung=True)

    async def reply(self, timeout_s: float) -> list[Any]:
        """A forker's next result.

        Raises:
            WorkerLost: there was none within `timeout_s`, and the process was killed; or it died.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return list(await self._read_frame())
        except TimeoutError:
            cause = f"said nothing for {timeout_s:g} s"
        except (EOFError, OSError):
            cause = "died"
        except (ValueError, TypeError):
            cause = NOT_A_REPLY
        await self.kill()
        raise WorkerLost(cause, None)

    def interrupt(self) -> None:
        """Tell a forker to give up its current group; the reply then comes at once."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)

    def resident_bytes(self) -> int:
        """Memory in bytes that only this process holds, without what it shares with others (rows of
        files); 0 if the system does not report it.
        """
        try:
            _, resident, shared_pages, *_ = map(int, Path(f"/proc/{self.pid}/statm").read_text().split())
            return (resident - shared_pages) * mmap.PAGESIZE
        except (OSError, ValueError, IndexError):
            return 0

    @property
    def has_grown(self) -> bool:
        return not self._outside and self.resident_bytes() > self._ready_bytes + MAX_GROWTH_BYTES

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            if self._outside and not self._closed:
                os.killpg(self.pid, signal.SIGKILL)  # with the processes that a reward has started, which may outlive it
            self._process.kill()
        await self._process.wait()
        if not self._closed:
            self._closed = True
            self._progress.close()

    async def _lose(self, cause: str, *, hung: bool) -> WorkerLost:
        step = self._progress.read()
        await self.kill()
        return WorkerLost(cause, step, hung=hung)

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
        length = frame_length(bytes(received[:4]))
        if length > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {length} bytes: {MAX_FRAME_BYTES} at most")
        end = 4 + length
        if len(received) < end:
            return None
        frame = unpack_body(bytes(received[4:end]))
        del received[:end]
        return frame


# Starts the sandbox's processes, with a few retries, and ends all of them.


START_ATTEMPTS = 3


class SandboxError(Exception):
    """Workers do not start; the message says what to check."""


class Processes:
    """Starts workers and forkers, and keeps track of each until it has ended."""

    def __init__(
        self,
        *,
        answer_timeout_s: float,
        foreign_group_s: float,
        memory_bytes: int,
        tasks: Sequence[TaskSpec],
        verifiers: VerifierChoice,
    ) -> None:
        """`answer_timeout_s` is for workers, `foreign_group_s` for forkers; `memory_bytes`: address
        space of each. `tasks`: this node's sources. `verifiers`: imported at once.
        """
        self._answer_timeout_s = answer_timeout_s
        self._foreign_group_s = foreign_group_s
        self._memory_bytes = memory_bytes
        self._sources = [[spec.dataset, spec.canonical_config, spec.scorer_name] for spec in tasks if spec.sandbox]
        self._installed = sorted({spec.dataset for spec in tasks if from_package(spec.dataset)})
        self._rows = find_all_rows(spec.dataset for spec in tasks)
        self._verifiers = verifiers
        self._reward_files, self._files_outside = to_hold(verifiers.names), to_hold(verifiers.names_outside)
        self._children: set[Child] = set()
        """All that were started and have not been seen to end. Kept here because the task that was
        to end one may have been cancelled before it could.
        """

    async def worker(self) -> Child:
        """Start a process for local groups.

        Raises:
            SandboxError: it does not start.
        """
        return await self._started(WORKER, self._answer_timeout_s)

    async def outside(self) -> Child:
        """Start a process for local groups whose reward runs outside the sandbox.

        Raises:
            SandboxError: it does not start.
        """
        return await self._started(WORKER, self._answer_timeout_s, outside=True)

    async def forker(self) -> Child:
        """Start a process for foreign groups.

        Raises:
            SandboxError: it does not start.
        """
        return await self._started(FORKER, self._foreign_group_s)

    async def kill(self) -> None:
        await asyncio.gather(*(child.kill() for child in self._children))
        self._children.clear()

    async def _started(self, module: str, timeout_s: float, *, outside: bool = False) -> Child:
        """Tries `START_ATTEMPTS` times, because a machine that is briefly short of memory may kill
        a starting process. Children that have ended are also removed here, so that their number
        does not grow.
        """
        cause = ""
        for _ in range(START_ATTEMPTS):
            try:
                child = await Child.start(
                    memory_bytes=self._memory_bytes,
                    answer_timeout_s=timeout_s,
                    verifiers=self._verifiers.names_outside if outside else self._verifiers.names,
                    sources=self._installed,
                    rows=self._rows,
                    module=module,
                    own_sources=self._sources,
                    reward_files=self._files_outside if outside else self._reward_files,
                    outside=outside,
                )
                self._children = {known for known in self._children if known.running} | {child}
                return child
            except WorkerLost as error:
                cause = str(error)
        files = ", ".join(name for name, _ in self._files_outside)
        remedy = (
            f"the reward's file ({files}) ends or hangs as it is loaded: see standard error"
            if outside
            else "raise verifier.worker_memory_mb, or see standard error for the cause"
        )
        raise SandboxError(f"scorer processes do not start ({START_ATTEMPTS} attempts, {cause}): {remedy}")
