"""A worker process, started only by `child`.

`python -m shared.tasks.sandbox.worker PROGRESS_FD MEMORY_BYTES ANSWER_CPU_S ROWS [VERIFIER...] --
[SOURCE...]`, with ROWS in the format of `inheritance`. With `outside` in the place of MEMORY_BYTES
it gives up nothing, for rewards that need the network, files or a GPU.
"""

from __future__ import annotations

import decimal
import gc
import io
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np

from shared.contracts.messages import TaskRef
from shared.environment_files import is_environment
from shared.importing import without_collection
from shared.reward_files import hold
from shared.runtime.process_limits import CpuAllowance, end_with_parent, lift_data_limit
from shared.tasks.derive import TaskError, dataset_names, derive_item, preload_sources
from shared.tasks.environments import play
from shared.tasks.file_rows import register_inherited_rows
from shared.tasks.prompt import content
from shared.tasks.reward_calls import leave_sandbox
from shared.tasks.sandbox.confinement import confine, forbid_system_calls
from shared.tasks.sandbox.protocol import (
    MAX_DETAIL_CHARS,
    MAX_FRAME_BYTES,
    READY,
    STEP_BITS,
    Progress,
    frame_length,
    pack_frame,
    unpack_body,
)
from shared.tasks.scoring import preload, requests_of, score_texts

FLUSH_S = 0.005
_RAISED = 4
_UNSAID: tuple[Any, ...] = (None, None, None, "", {}, [])
"""A `Rewarded` without what comes last: its index `_RAISED` tells it from a `Failed`."""
GC_THRESHOLD = 20_000


def main() -> None:
    """Serve batches until the parent closes the pipe."""
    progress = Progress(int(sys.argv[1]))
    progress.rest()
    outside, mapped_bytes = sys.argv[2] == "outside", register_inherited_rows(sys.argv[4])
    if outside:
        end_with_parent(signal.SIGKILL)
        lift_data_limit()
        leave_sandbox()
        missing, allowance = {}, None
    else:
        # The rows of files are in memory that all processes share, in addition to what a worker may
        # use.
        missing, allowance = confine(int(sys.argv[2]) + mapped_bytes), CpuAllowance(float(sys.argv[3]))
    requests, results = take_standard_streams()
    _, reward_files, folder = read_frame(requests) or ([], [], os.curdir)
    if outside:
        os.chdir(folder)
    printed = Printed()
    sys.stdout = printed
    import_everything(*named_imports(sys.argv[5:]), reward_files)
    sys.stderr = printed
    missing |= {} if outside else forbid_system_calls()
    results.write(pack_frame([READY, missing]))
    results.flush()
    _serve(requests, results, progress, allowance, printed)


class Printed(io.TextIOWrapper):
    """The beginning of what scorers print, for their author. Their process has no terminal."""

    def __init__(self) -> None:
        super().__init__(os.fdopen(os.dup(1), "wb"))
        self._text = ""

    def write(self, text: str) -> int:
        """Keep the text while there is room."""
        self._text += str(text)[: MAX_DETAIL_CHARS - len(self._text)]
        return len(text)

    def take(self) -> str:
        """Return what was printed since the last call."""
        text, self._text = self._text, ""
        return text


def named_imports(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The verifiers and sources that a worker's arguments name: `VERIFIER... -- SOURCE...`."""
    end = arguments.index("--")
    return arguments[:end], arguments[end + 1 :]


def import_everything(verifiers: Sequence[str], sources: Sequence[str], reward_files: Sequence[Any]) -> None:
    """Import reasoning-gym, the verifiers and rewards, and this node's own installed task sources
    now, so that no job has to wait for it, and after the limits are set, so that the imports count
    against them.
    """
    hold(reward_files)
    # A library would try to write a font cache, would not be allowed to, and would print a warning.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    with without_collection():
        dataset_names()
        preload_sources(sources)
        preload(verifiers)
    _silence_errors()
    # Jobs leave few cycles behind; searching for these would cost more than scoring a cheap answer.
    gc.set_threshold(GC_THRESHOLD)


def _serve(requests: BinaryIO, results: BinaryIO, progress: Progress, allowance: CpuAllowance | None, printed: Printed) -> None:
    number = 0
    while (jobs := read_frame(requests)) is not None:
        finished: list[list[Any]] = []
        flushed_s = time.monotonic()
        clean_random()
        for job in jobs:
            clean_numbers()
            base = number << STEP_BITS
            progress.word[0] = base
            now_s = time.monotonic()
            # Limits the finished work that a later hang would lose and that would have to be
            # repeated.
            if now_s - flushed_s > FLUSH_S and finished:
                _send(results, finished)
                finished = []
                flushed_s = now_s
            if allowance is not None:
                allowance.extend(1 + len(job[6]), now_s)
            result = _result(job, base, progress.word)
            if len(result) > _RAISED and result[0] is not None and (text := printed.take()):
                result = [*result, *_UNSAID[len(result) :], text]
            finished.append(result)
            number += 1
        progress.rest()
        _send(results, finished)


def _result(job: list[Any], base: int, word: memoryview[int]) -> list[Any]:
    # `Rewarded`, `Asking` or `Failed`. Steps count from `base`: they tell which answer hung.
    dataset, config, seed, index, expected, verifier, texts, want_task, *given = job
    try:
        item = derive_item(TaskRef(dataset=dataset, config=config, seed=seed, index=index))
        task = item.task
        if expected is not None and content(task) != expected:
            return ["task_mismatch", f"{dataset}: prompt, key, answer or metadata differ from what {seed}/{index} derives to"]
        problems: list[str] = []
        parts: dict[str, list[float | None]] = {}
        told = content(task) if want_task else None
        if is_environment(verifier) and texts:
            rewards, marks, said = play(item, verifier, texts, word, base + 1, score_texts, problems, parts)
            return [rewards, marks, told, "".join(problems)[:MAX_DETAIL_CHARS], parts, said]
        if texts and not given and (asked := requests_of(item, verifier, texts, word, base + 1, problems)) is not None:
            return [None, asked, told, "".join(problems)[:MAX_DETAIL_CHARS]]
        replies = given[0] if given else None
        rewards, marks = score_texts(item, verifier, texts, word, base + 1, problems, parts, replies) if texts else ([], [])
        return [rewards, marks, told, "".join(problems)[:MAX_DETAIL_CHARS], parts]
    except TaskError as error:
        return [error.reason, str(error)[:500]]
    except (MemoryError, RecursionError) as error:
        return ["task_underivable", f"{dataset}: {type(error).__name__} while deriving"]


def _send(stream: BinaryIO, finished: list[list[Any]]) -> None:
    stream.write(pack_frame(finished))
    stream.flush()


def take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Take the pipes to the parent and redirect the standard streams, so that nothing else uses the
    pipes.
    """
    # A dataset that prints must not write into the middle of a frame.
    requests = os.fdopen(os.dup(0), "rb")
    results = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)
    return requests, results


def _silence_errors() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 2)
    os.close(nothing)


def read_frame(stream: BinaryIO) -> Any:
    """The next frame; None when the parent is gone."""
    header = stream.read(4)
    if len(header) < 4:
        return None
    length = frame_length(header)
    if length > MAX_FRAME_BYTES:
        return None
    body = stream.read(length)
    return unpack_body(body) if len(body) == length else None


# Resets the process state that datasets and scorers change, so that an answer's reward does not
# depend on earlier ones.
#
# A scorer may set the precision of decimals, and code that `codeio` runs may change anything;
# `derive_item` itself resets what deriving sets. For local groups a reset is enough, and costs half
# a microsecond per group. Foreign groups choose their configuration, so each gets its own process
# (`shared.tasks.sandbox.forker`), which starts without any leftover state.


RECURSION_LIMIT = 1000
INTEGER_DIGITS = 4300
"""Python's default. Converting longer integers takes quadratic time."""


def clean_numbers() -> None:
    """Reset precision, rounding and flags of decimals, and the limits on recursion and on the
    length of integers in text. Called before each group.
    """
    # Set a copy, so that nobody changes the template.
    decimal.setcontext(decimal.DefaultContext)
    sys.setrecursionlimit(RECURSION_LIMIT)
    sys.set_int_max_str_digits(INTEGER_DIGITS)


def clean_random() -> None:
    """Seed the global generators, including sympy's. Datasets do not draw from them unseeded, but a
    user's own verifier may.
    """
    random.seed(0)
    np.random.seed(0)
    sympys = sys.modules.get("sympy.core.random")
    if sympys is not None:
        sympys.seed(0)


if __name__ == "__main__":
    main()
