"""The exit codes of a process that cannot continue, or cannot save its state; and a small file
about each process of a run that is started again: when it died, and when it starts next. Its
supervisor writes the file, commands and page read it.
"""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shared.atomic_files import replace_text
from shared.plain_files import read_plain
from shared.text import visible

EXIT_CONFIG = 78
"""Exit code (`EX_CONFIG` of sysexits.h) for a failure that a restart would only repeat; the
supervisor does not restart the process.
"""


EXIT_UNSAVED = 74
"""Exit code (`EX_IOERR`) of a process that was asked to end and could not save its last state. A
restart goes on from what was saved before.
"""


class FatalError(Exception):
    """The process cannot continue and a restart would not help. The message names the cause and the
    remedy; no traceback is shown.
    """


BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0)
CRASH_WINDOW_S = 120.0
MAX_CRASHES = 8
"""A process that crashes is started again after the next of these pauses; given up after so many
crashes within the window.
"""

FILE_VARIABLE = "SUPERVISE_DEATHS"
"""Names the file for `shared.runtime.supervise`. Not a setting: it differs between the processes of
a node.
"""
KEPT = 16
WHY_CHARACTERS = 600
_MOST_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Deaths:
    """Unix times of the newest deaths, oldest first. code: exit code of the newest, negative for a
    signal. next_at: when it starts again; None: it was given up. why: what it said itself, if it
    cannot go on (code 78).
    """

    times: tuple[float, ...]
    code: int
    next_at: float | None
    why: str = ""


def deaths_file(folder: Path, process: str) -> Path:
    """The file of a process such as `alpha-trainer` or `nats` in its run's folder."""
    node, _, role = process.rpartition("-")
    return folder / node / f"{role}.deaths.json"


def note_death(file: Path, code: int, delay_s: float | None, why: str = "") -> None:
    """Note that the process died now and starts again after `delay_s` (None: never). On a full disk
    nothing is noted: that must not keep it from starting.
    """
    now, before = time.time(), read_deaths(file)
    times = [*(before.times if before else ()), now][-KEPT:]
    said = {"times": times, "code": code, "next_at": None if delay_s is None else now + delay_s, "why": why[:WHY_CHARACTERS]}
    with suppress(OSError):
        replace_text(file, json.dumps(said) + "\n")


def forget_deaths(file: Path) -> None:
    """Delete the file, because somebody restarted the process."""
    with suppress(OSError):
        file.unlink(missing_ok=True)


def read_deaths(file: Path) -> Deaths | None:
    """The deaths of a process; None if there were none or the file is none that `note_death`
    writes.
    """
    try:
        said = json.loads(read_plain(file, _MOST_BYTES))
        times, code, next_at = [float(each) for each in said["times"]][-KEPT:], int(said["code"]), said["next_at"]
        next_at = None if next_at is None else float(next_at)
        why = visible(str(said.get("why", "")), WHY_CHARACTERS)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    if not times or not all(map(math.isfinite, [*times, next_at or 0.0])):
        return None
    return Deaths(tuple(times), code, next_at, why)
