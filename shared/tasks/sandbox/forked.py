"""The process that scores one foreign group: forked from a clean parent, confined further, and
ended afterwards.

The derivation and each answer have a limit in CPU time, enforced by the kernel (SIGPROF ends the
process, whatever code it is in), so that a busy machine does not make an answer too slow. Whatever
the sender's configuration does to the process, its caches and its memory ends with it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import MutableSequence
from typing import Any, NamedTuple, NoReturn

import msgpack

from shared.contracts.messages import TaskRef
from shared.runtime.parent_death import end_with_parent
from shared.tasks.derive import TaskError, derive_item
from shared.tasks.sandbox.confine import forbid_system_calls
from shared.tasks.sandbox.limits import limit_further
from shared.tasks.scoring import score_texts

DERIVE_CPU_S = 1.0
ANSWER_CPU_S = 1.0
"""A whole group of eight ordinary answers takes at most 0.23 s, over all of reasoning-gym's
datasets at their defaults.
"""

MEMORY_BYTES = 384 * 2**20
"""Memory that deriving and scoring a foreign group may use in addition to the imports."""


class Bounds(NamedTuple):
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
        """Not supported: the length is fixed."""
        raise TypeError("one word")


def score_and_exit(job: list[Any], word: memoryview[int], answer_to: int, bounds: Bounds, parent: int) -> NoReturn:
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
        reply = _judged(job, word)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _write(answer_to, msgpack.packb(reply, use_bin_type=True, unicode_errors="surrogatepass"))
        status = 0
    finally:
        os._exit(status)


def _judged(job: list[Any], word: memoryview[int]) -> list[Any]:
    dataset, config, seed, index, expected, verifier, texts, want_task = job
    try:
        item = derive_item(TaskRef(dataset=dataset, config=config, seed=seed, index=index))
        task = item.task
        if expected is not None and (task.question, task.answer, task.metadata) != tuple(expected):
            differs = f"{dataset}: question, answer or metadata differ from what {seed}/{index} derives to"
            return ["task_mismatch", differs, [], [], None]
        rewards, marks = score_texts(item, verifier, texts, _Steps(word), 1) if texts else ([], [])
        return [None, "", rewards, marks, [task.question, task.answer, task.metadata] if want_task else None]
    except TaskError as error:
        return [error.reason, str(error)[:500], [], [], None]
    except (MemoryError, RecursionError) as error:
        return ["task_underivable", f"{dataset}: {type(error).__name__} while deriving", [], [], None]


def _write(descriptor: int, message: bytes) -> None:
    while message:
        message = message[os.write(descriptor, message) :]
