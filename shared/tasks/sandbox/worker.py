"""A worker process: `python -m shared.tasks.sandbox.worker PROGRESS_FD MEMORY_BYTES ANSWER_CPU_S`, started by `child` only."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any, BinaryIO

from shared.tasks.sandbox.limits import allow_cpu, restrict
from shared.tasks.sandbox.protocol import (
    DERIVING,
    MAX_FRAME_BYTES,
    READY,
    Progress,
    frame_length,
    pack_frame,
    task_digest,
    unpack_body,
)

FLUSH_S = 0.005


def main() -> None:
    """Serve batches until the parent closes the pipe."""
    progress = Progress(int(sys.argv[1]))
    restrict(int(sys.argv[2]))
    answer_cpu_s = float(sys.argv[3])
    requests, results = _take_standard_streams()
    # reasoning-gym is imported now, so that no job pays for it, and after the limits, so that it lives within them.
    # A library of its libraries would write a font cache, may not, and would say so.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from shared.tasks.derive import dataset_names

    dataset_names()
    _silence_errors()
    results.write(pack_frame(READY))
    results.flush()
    batch_number = 0
    while (jobs := _read_frame(requests)) is not None:
        batch_number += 1
        flushed_s = time.monotonic()
        for position, job in enumerate(jobs):
            progress.write(batch_number, position, DERIVING)
            allow_cpu(answer_cpu_s * (1 + len(job[5])))
            results.write(pack_frame([position, *_result(job, batch_number, position, progress)]))
            # What a later hang takes with it is at most this much work, which is done again.
            if time.monotonic() - flushed_s > FLUSH_S:
                results.flush()
                flushed_s = time.monotonic()
        results.flush()


def _result(job: list[Any], batch_number: int, position: int, progress: Progress) -> list[Any]:
    from shared.messages import TaskRef
    from shared.tasks.derive import TaskError, derive_task
    from shared.tasks.scoring import score_answer

    dataset, config, seed, index, expected, texts, want_task = job
    try:
        task = derive_task(TaskRef(dataset=dataset, config=config, seed=seed, index=index))
        if expected is not None and task_digest(task) != expected:
            return ["task_mismatch", f"{dataset}: question, answer or metadata differ from what {seed}/{index} derives to"]
        rewards = []
        for place, text in enumerate(texts):
            progress.write(batch_number, position, place)
            rewards.append(0.0 if text is None else score_answer(task, text))
        return [rewards, [task.question, task.answer, task.metadata] if want_task else None]
    except TaskError as error:
        return [error.reason, str(error)[:500]]
    except (MemoryError, RecursionError) as error:
        return ["task_underivable", f"{dataset}: {type(error).__name__} while deriving"]


def _take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
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


def _read_frame(stream: BinaryIO) -> Any:
    header = stream.read(4)
    if len(header) < 4:
        return None
    length = frame_length(header)
    if length > MAX_FRAME_BYTES:
        return None
    body = stream.read(length)
    return unpack_body(body) if len(body) == length else None


if __name__ == "__main__":
    main()
