"""How a run on this machine ended, and when: what `swarm up` and `swarm join` write into the run's
folder when all their processes have ended, and what other commands say about it.
"""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from shared.plain_files import read_plain
from shared.runtime.errors import EXIT_CONFIG
from shared.runtime.supervise import CRASH_WINDOW_S, MAX_CRASHES
from shared.transport.base import NotConnected
from swarm_cli.errors import CommandError
from swarm_cli.own_run import NOTE
from swarm_cli.replace_file import replace_file
from swarm_cli.running import goes_on, holder, read_note

END = "end.json"
EXIT_ENDED = 3
"""Exit code of a command that shows a run which ended in order."""
EXIT_BROKE_OFF = 4
"""The same for a run that failed or was killed."""
STOPPED_BY_SIGNAL = (130, 143)
"""Exit codes of a run that SIGINT or SIGTERM ended."""
_LATEST = 253_402_000_000
"""Late in the year 9999; the system's calendar ends there."""
_MOST_BYTES = 65_536

How = Literal["complete", "stopped", "failed", "killed"]


class RunEnd(msgspec.Struct, frozen=True):
    """at: Unix time. code: exit code of the run. process: the process that ended the run. A killed
    run leaves no record of its end, so its `at` is when a process last wrote a file.
    """

    how: How
    at: Annotated[float, msgspec.Meta(ge=0, le=_LATEST)]
    code: Annotated[int, msgspec.Meta(ge=-255, le=255)] | None = None
    process: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,100}\Z")] | None = None

    @property
    def in_order(self) -> bool:
        """Whether every process could save its state before it ended."""
        return self.how in ("complete", "stopped")

    @property
    def exit_code(self) -> int:
        """Exit code of a command that shows the run."""
        return EXIT_ENDED if self.in_order else EXIT_BROKE_OFF

    @property
    def cause(self) -> str:
        """Why it ended, in words."""
        if self.how == "complete":
            return "every node has taken its steps"
        if self.how == "stopped":
            return "it was stopped (Ctrl-C or `swarm down`)"
        if self.how == "killed":
            return (
                "it left no record of its end, so its `swarm up` was killed or the machine went down; "
                "the time is that of its last log line"
            )
        why = "cannot go on" if self.code == EXIT_CONFIG else f"ended with code {self.code}"
        return f"{self.process or 'a process'} {killed_often(self.code) or why}"

    def sentence(self, run: str, now: float | None = None) -> str:
        """Such as `run first ended in order at 2026-11-25 04:12:33, 5 minutes ago: ...`; without
        `5 minutes ago` if `now` is None.
        """
        what = {"failed": "failed", "killed": "was killed"}.get(self.how, "ended in order")
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(max(self.at, 0), _LATEST)))
        ago = "" if now is None else f", {_ago(now - self.at)} ago"
        return f"run {run} {what} at {at}{ago}: {self.cause}"


class RunGone(NotConnected):
    """No server answers because the run in `folder` has ended, and its server with it."""

    def __init__(self, folder: Path, end: RunEnd) -> None:
        super().__init__(end.sentence(folder.name, time.time()))
        self.folder = folder


def afterwards(folder: Path, command: str = "") -> str:
    """How the run in `folder`, which has ended, is started again and, if `command` can do that,
    looked at.
    """
    look = f"`{command} --run {folder.name}` shows it as it was when it ended; " if command else ""
    return f"{look}{goes_on(folder)} starts it again"


def killed_often(code: int | None) -> str:
    """That a process was given up because it was killed again and again, if its exit code says so;
    else empty.
    """
    if code is None or code - 128 not in set(signal.Signals):
        return ""
    return f"was killed by {signal.Signals(code - 128).name} {MAX_CRASHES} times in {CRASH_WINDOW_S:.0f} s"


def write_end(folder: Path, code: int, process: str | None) -> None:
    """Note that the run in `folder` ended now. code, process: as in `RunEnd`. If the note cannot be
    written (a full disk), the run looks as if it was killed; an error here would hide the run's
    own.
    """
    how: How = "complete" if code == 0 else "stopped" if code in STOPPED_BY_SIGNAL else "failed"
    end = RunEnd(how, time.time(), code, process if how == "failed" else None)
    with suppress(CommandError):
        replace_file(folder / END, msgspec.json.encode(end).decode() + "\n")


def forget_end(folder: Path) -> None:
    """Delete the note of the end, because the run in `folder` goes on. If it then ends without a
    new note, it was killed.
    """
    (folder / END).unlink(missing_ok=True)


def read_end(folder: Path) -> RunEnd | None:
    """How the run in `folder` ended; None if it is running or has never run."""
    if not (folder / NOTE).is_file() or holder(folder) is not None:
        return None
    with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(read_plain(folder / END, _MOST_BYTES), type=RunEnd)
    return RunEnd("killed", _last_written(folder))


def newest_ended(var_dir: Path, node_url: str = "") -> tuple[Path, RunEnd] | None:
    """Of the runs in `var_dir` that have ended, the one that ended last, and its end. node_url:
    consider only runs whose nodes used this server; None while one of them is running there.
    """
    ended: list[tuple[Path, RunEnd]] = []
    for file in (var_dir / "runs").glob(f"*/{NOTE}"):
        note = read_note(file.parent)
        if note is None or (node_url and note.node_url != node_url):
            continue
        end = read_end(file.parent)
        if end is not None:
            ended.append((file.parent, end))
        elif node_url:
            return None
    return max(ended, key=lambda each: each[1].at, default=None)


def _last_written(folder: Path) -> float:
    """Every process has a log in the run's folder or in its node's."""
    logs = [*folder.glob("*.log"), *folder.glob("*/*.log"), *folder.glob("*/*.jsonl"), folder / NOTE]
    return max((file.stat().st_mtime for file in logs if file.is_file()), default=0.0)


def _ago(seconds: float) -> str:
    for unit, name in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}s"
    whole = f"{max(0.0, seconds):.0f}"
    return f"{whole} second{'' if whole == '1' else 's'}"
