"""The parent of the processes that score foreign groups; started by `child` only.

`python -m shared.tasks.sandbox.forker PROGRESS_FD MEMORY_BYTES GROUP_TIMEOUT_S ROWS [VERIFIER...]
-- [SOURCE...]`, with ROWS in the format of `inheritance`.

It has imported everything and reads no foreign text. For each group it forks a process,
waits for it until the group's deadline at most, and collects the outcome: one message through a
pipe, CPU seconds from the kernel. If the kernel ends a process at one answer, that answer's reward
is unknown, and so are those of the answers that were not reached: the border takes in no group with
an unknown reward. A forked process can neither end nor block this one: a process that has closed
its pipe must exit, and what it wrote is validated before it is used. Behaviour that no
uncompromised scorer shows ends the group, and its sender is charged for it.

A job is `[dataset, config, seed, index, expected task or None, verifier, texts, want task]` as in
`protocol`. Its result is `[reason or None, detail, rewards, marks, task or None, said, CPU
seconds, lost, died]`, where `lost` counts the answers that ended a process, and `died` those of
them that ended it otherwise than by taking too long. The first frame lists this node's own sources
as `[dataset, config, verifier]`, and the files of rewards; what they load lazily is loaded once,
here.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import time
from collections.abc import MutableSequence, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import msgpack

from shared.contracts.messages import TaskRef
from shared.environment_files import is_environment
from shared.rewards import Mark
from shared.runtime.process_limits import MappedMemory, end_with_parent, limit_further
from shared.tasks.derive import Item, TaskError, derive_item, forget_derived
from shared.tasks.environments import play
from shared.tasks.file_rows import register_inherited_rows
from shared.tasks.prompt import content
from shared.tasks.reward_calls import Word
from shared.tasks.sandbox.confinement import confine, forbid_system_calls
from shared.tasks.sandbox.protocol import (
    DERIVING,
    READY,
    STEP_BITS,
    BrokenReply,
    Progress,
    Verdict,
    decode_verdict,
    most_bytes,
    pack_frame,
)
from shared.tasks.sandbox.worker import (
    clean_numbers,
    clean_random,
    import_everything,
    named_imports,
    read_frame,
    take_standard_streams,
)
from shared.tasks.scoring import score_texts

CHUNK_BYTES = 2**16
WARM_S = 5.0
"""What a source may take to load what it loads lazily."""
EXIT_S = 0.05
"""How long a process may take to exit after it has closed its pipe, which the kernel closes during
the exit.
"""
TAKEN_OVER_S = 1.0
"""Smallest number of CPU seconds charged to a group whose process was taken over: the full blame
(`Border.conclude`).
"""
LATE_PART = 0.02
"""A group that misses its deadline is charged at least this part of it. The part is small because a
busy machine makes honest groups late, and not zero because a process that only sleeps uses no CPU
time.
"""


class _Interrupt:
    """Handles SIGUSR1: the sender has been shut out, so its group is given up."""

    def __init__(self) -> None:
        self.given = False
        self.process = 0
        signal.signal(signal.SIGUSR1, self._take)

    def _take(self, *_: object) -> None:
        self.given = True
        if self.process:
            os.kill(self.process, signal.SIGKILL)


class _Ended(NamedTuple):
    reply: Verdict | None
    cpu_s: float
    held_s: float
    signal: int
    late: bool
    broken: str
    """Act of the process that no uncompromised scorer does; empty for all others."""


def main() -> None:
    """Serve groups until the parent closes the pipe."""
    progress = Progress(int(sys.argv[1]))
    progress.rest()
    memory_bytes, group_timeout_s = int(sys.argv[2]) + register_inherited_rows(sys.argv[4]), float(sys.argv[3])
    mapped = MappedMemory()
    missing = confine(memory_bytes, forking=True)
    requests, results = take_standard_streams()
    own_sources, reward_files, _ = read_frame(requests) or ([], [], "")
    import_everything(*named_imports(sys.argv[5:]), reward_files)
    _warm(own_sources)
    missing |= forbid_system_calls(forking=True)
    gc.collect()
    gc.freeze()
    before_bytes = mapped.size_bytes()
    group_bytes = memory_bytes if before_bytes is None else min(memory_bytes, before_bytes + MEMORY_BYTES)
    bounds = ProcessBounds(group_bytes, filtered="seccomp" not in missing)
    results.write(pack_frame([READY, missing]))
    results.flush()
    interrupt = _Interrupt()
    while (job := read_frame(requests)) is not None:
        interrupt.given = False
        started_s = time.monotonic()
        try:
            result = _judged(job, progress, started_s + group_timeout_s, bounds, interrupt)
        except (OSError, MemoryError) as error:
            detail = f"no process for it ({type(error).__name__})"
            result = ["scoring_timeout", detail, [], [], None, [], time.monotonic() - started_s, 0, 0]
        progress.rest()
        results.write(pack_frame(result))
        results.flush()


def _warm(sources: list[list[str]]) -> None:
    """Score a text of each source once. A scorer that never returns must not keep this process from
    starting: it is interrupted.
    """
    signal.signal(signal.SIGALRM, _late)
    for dataset, config, verifier in sources:
        signal.setitimer(signal.ITIMER_REAL, WARM_S, WARM_S)
        with suppress(TaskError, TimeoutError):
            _scored(derive_item(TaskRef(dataset=dataset, config=config, seed=1, index=0)), verifier, ["0"], [0], 0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    forget_derived()
    clean_numbers()
    clean_random()


def _late(*_: object) -> None:
    raise TimeoutError


def _judged(job: list[Any], progress: Progress, deadline_s: float, bounds: ProcessBounds, interrupt: _Interrupt) -> list[Any]:
    """The result frame: reason, detail, rewards, marks, derived task, CPU seconds, answers lost,
    answers at which the process died for another reason than time.
    """
    texts = job[6]
    progress.word[0] = DERIVING
    ended = _forked(job, progress, deadline_s, bounds, interrupt)
    cpu_s = ended.cpu_s
    if ended.broken and not interrupt.given:
        cpu_s = max(cpu_s, ended.held_s, TAKEN_OVER_S)
        return ["scoring_timeout", f"its process was taken over: {ended.broken}", [], [], None, [], cpu_s, 1, 1]
    if ended.reply is not None:
        return [*ended.reply, cpu_s, 0, 0]
    if interrupt.given:
        return ["dropped", "given up while it was judged", [], [], None, [], cpu_s, 0, 0]
    step = min(progress.word[0] & (2**STEP_BITS - 1), len(texts))
    if ended.late:
        cpu_s = max(cpu_s, LATE_PART * ended.held_s)
        detail = f"not judged within the group's deadline, at {_named(step)} of {len(texts)}"
        return ["scoring_timeout", detail, [], [], None, [], cpu_s, 1, 0]
    too_slow = ended.signal == signal.SIGPROF
    if not too_slow:
        cpu_s += max(0.0, ended.held_s - ended.cpu_s)
    how = "took too long" if too_slow else f"ended its process (signal {ended.signal})"
    if step == DERIVING or not texts:
        limit = f"at most {DERIVE_CPU_S:g} s of CPU time are given"
        return ["scoring_timeout", f"{job[0]}: deriving the task {how}: {limit}", [], [], None, [], cpu_s, 1, 0]
    marks = [Mark.TIMEOUT if too_slow else Mark.KILLED] * len(texts)
    return [None, f"{_named(step)} of {len(texts)} {how}", [None] * len(texts), marks, None, [], cpu_s, 1, int(not too_slow)]


def _named(step: int) -> str:
    return "its derivation" if step == DERIVING else f"answer {step}"


def _forked(job: list[Any], progress: Progress, deadline_s: float, bounds: ProcessBounds, interrupt: _Interrupt) -> _Ended:
    """Score a group in a separate process."""
    read_end, write_end = os.pipe()
    started_s = time.monotonic()
    parent = os.getpid()
    try:
        process = os.fork()
    except OSError:
        os.close(read_end)
        os.close(write_end)
        raise
    if process == 0:
        score_and_exit(job, progress.word, write_end, bounds, parent)
    interrupt.process = process
    if interrupt.given:
        _kill(process)
    os.close(write_end)
    want_task = bool(job[7])
    try:
        message, late = _read_until(read_end, deadline_s, most_bytes(want_task, is_environment(job[5])))
    except BaseException:
        _wait(process, 0.0)
        interrupt.process = 0
        raise
    finally:
        os.close(read_end)
    status, used_s, killed = _wait(process, 0.0 if late or message is None or interrupt.given else EXIT_S)
    interrupt.process = 0
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    verdict, broken = _verdict(message, want_task, ended_by, killed) if not late else (None, "")
    return _Ended(verdict, used_s, time.monotonic() - started_s, ended_by, late, broken)


def _verdict(message: bytes | None, want_task: bool, ended_by: int, killed: bool) -> tuple[Verdict | None, str]:
    """The process's reply, and what is wrong with it (empty if nothing is)."""
    if message is None:
        return None, "a reply without end"
    if ended_by and not (killed and ended_by == signal.SIGKILL):
        return None, ""
    if not message:
        # Killed here, and not while it was exiting: the kernel keeps the original cause of a
        # process that is already exiting.
        return None, "it closed its pipe and stayed" if ended_by else ""
    try:
        return decode_verdict(message, want_task), ""
    except BrokenReply as error:
        return None, f"no reply of a scorer ({error})"


def _wait(process: int, patience_s: float) -> tuple[int, float, bool]:
    """The process's status and CPU seconds, and whether it was killed here because it did not exit
    within `patience_s`.
    """
    until_s, pause_s = time.monotonic() + patience_s, 0.0001
    while patience_s:
        found, status, usage = os.wait4(process, os.WNOHANG)
        if found:
            return status, usage.ru_utime + usage.ru_stime, False
        if time.monotonic() > until_s:
            break
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.005)
    _kill(process)
    _, status, usage = os.wait4(process, 0)
    return status, usage.ru_utime + usage.ru_stime, True


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _read_until(descriptor: int, deadline_s: float, most: int) -> tuple[bytes | None, bool]:
    """All bytes until the other end is closed, or None for more than `most` bytes; and True if the
    deadline came first.
    """
    poll, received = select.poll(), bytearray()
    poll.register(descriptor, select.POLLIN)
    while len(received) <= most:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not poll.poll(1000 * left_s):
            return bytes(received), True
        chunk = os.read(descriptor, CHUNK_BYTES)
        if not chunk:
            return bytes(received), False
        received += chunk
    return None, False


# The process that scores one foreign group: forked from a clean parent, confined further, and ended
# afterwards.
#
# The derivation and each answer have a limit in CPU time, enforced by the kernel (SIGPROF ends the
# process, whatever code it is in), so that a busy machine does not make an answer too slow.
# Whatever the sender's configuration does to the process, its caches and its memory ends with it.


DERIVE_CPU_S = 1.0
ANSWER_CPU_S = 1.0
"""A whole group of eight ordinary answers takes at most 0.23 s, over all of reasoning-gym's
datasets at their defaults.
"""

MEMORY_BYTES = 384 * 2**20
"""Memory that deriving and scoring a foreign group may use in addition to the imports."""


class ProcessBounds(NamedTuple):
    """Limit of the process's address space, and whether the system allows a filter of system
    calls.
    """

    memory_bytes: int
    filtered: bool


class _Steps(MutableSequence[int]):
    # Replaces the progress word: the parent learns of each step that begins, and the step gets its
    # own CPU time.
    def __init__(self, word: memoryview[int]) -> None:
        self._word = word

    def __setitem__(self, place: Any, step: Any) -> None:
        self._word[0] = step
        signal.setitimer(signal.ITIMER_PROF, ANSWER_CPU_S)

    def __getitem__(self, place: Any) -> Any:
        return self._word[0]

    def __delitem__(self, place: Any) -> None:
        raise TypeError("one word")

    def __len__(self) -> int:
        return 1

    def insert(self, index: int, value: int) -> None:
        raise TypeError("one word")


def score_and_exit(job: list[Any], word: memoryview[int], answer_to: int, bounds: ProcessBounds, parent: int) -> NoReturn:
    """Score a group. A `replies.Verdict` is written to the descriptor `answer_to`. parent: the
    process that forked this one.
    """
    status = 1
    try:
        end_with_parent(signal.SIGKILL, parent)
        # The standard streams are already redirected to nowhere; a dataset that prints needs them.
        os.closerange(3, answer_to)
        os.closerange(answer_to + 1, 1024)
        limit_further(bounds.memory_bytes)
        if bounds.filtered and forbid_system_calls():
            os._exit(status)
        signal.setitimer(signal.ITIMER_PROF, DERIVE_CPU_S)
        reply = _judge_and_report(job, word)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _write(answer_to, msgpack.packb(reply, use_bin_type=True, unicode_errors="surrogatepass"))
        status = 0
    finally:
        os._exit(status)


def _judge_and_report(job: list[Any], word: memoryview[int]) -> list[Any]:
    dataset, config, seed, index, expected, verifier, texts, want_task = job
    try:
        item = derive_item(TaskRef(dataset=dataset, config=config, seed=seed, index=index))
        task = item.task
        if expected is not None and content(task) != expected:
            differs = f"{dataset}: prompt, key, answer or metadata differ from what {seed}/{index} derives to"
            return ["task_mismatch", differs, [], [], None, []]
        rewards, marks, said = _scored(item, verifier, texts, _Steps(word), 1)
        return [None, "", rewards, marks, content(task) if want_task else None, said]
    except TaskError as error:
        return [error.reason, str(error)[:500], [], [], None, []]
    except (MemoryError, RecursionError) as error:
        return ["task_underivable", f"{dataset}: {type(error).__name__} while deriving", [], [], None, []]


def _scored(
    item: Item, verifier: str, texts: Sequence[Any], word: Word, first_step: int
) -> tuple[list[float | None], list[Mark], list[list[str]]]:
    """Rewards and marks of the texts of a task, and what an environment said, if one is played."""
    if not texts:
        return [], [], []
    if is_environment(verifier):
        return play(item, verifier, texts, word, first_step, score_texts)
    return *score_texts(item, verifier, texts, word, first_step), []


def _write(descriptor: int, message: bytes) -> None:
    while message:
        message = message[os.write(descriptor, message) :]


if __name__ == "__main__":
    main()
