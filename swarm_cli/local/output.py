"""Writes the output of a swarm's processes to the terminal, while there is one, and to `up.log` in
the run's folder.

A terminal can be closed, a pipe's reader can end, and a reader that pauses (`less`) blocks the
writer. None of this may delay or end the supervisor of the processes, so a thread does the writing,
from a queue that drops lines when it is full.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

from swarm_cli.local.procfile import VIEW

SYSTEM = "swarm"
"""The name before the lines of `swarm up` itself."""
_QUEUED_LINES = 10_000
_LOG_BYTES = 8 * 2**20
_COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)


class Output:
    """Lines with a process's name before them. `write` never blocks and never fails.

    descriptor: file descriptor of the terminal, pipe or file.
    log_file: receives every line too; None: no log.
    """

    def __init__(self, descriptor: int = 1, log_file: Path | None = None) -> None:
        self._descriptor = descriptor
        self._colours: dict[str, int] | None = {} if os.isatty(descriptor) else None
        self._gone = False
        self._dropped = 0
        self._width = 0
        self._queue: queue.Queue[bytes | None] = queue.Queue(_QUEUED_LINES)
        self._log = _log(log_file) if log_file else None
        self._writer = threading.Thread(target=self._write_all, name="output", daemon=True)
        self._writer.start()

    def expect(self, name: str) -> None:
        """Make the column of names wide enough for this one."""
        self._width = max(self._width, len(name))

    def detach(self) -> None:
        """The terminal was closed: from now on write only to `up.log`."""
        self._gone = True

    def write(self, name: str, line: str) -> None:
        """One line of the process `name`, without its line break."""
        at = time.strftime("%H:%M:%S")
        if self._log:
            self._log.info("%s %s | %s", at, name, line)
        if self._gone:
            return
        # The progress has its own time column and needs the width.
        text = line if name == VIEW else f"{self._coloured(name, f'{at} {name:<{self._width}} |')} {line}"
        try:
            self._queue.put_nowait(text.encode(errors="backslashreplace") + b"\n")
        except queue.Full:
            self._dropped += 1

    def close(self, patience_s: float = 2.0) -> None:
        """Wait until all lines are written, but at most `patience_s`: a reader may have paused."""
        deadline = time.monotonic() + patience_s
        while not self._gone and time.monotonic() < deadline:
            try:
                self._queue.put(None, timeout=0.1)
                break
            except queue.Full:
                continue
        self._writer.join(max(0.0, deadline - time.monotonic()))
        if self._log:
            for handler in self._log.handlers:
                with suppress(OSError):  # a full disk, to which the last lines cannot be written
                    handler.close()

    def _coloured(self, name: str, text: str) -> str:
        if self._colours is None:
            return text
        colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        return f"\x1b[{colour}m{text}\x1b[0m"

    def _write_all(self) -> None:
        """The thread's body: write the queued lines until the reader is gone."""
        while (text := self._queue.get()) is not None:
            if self._dropped and not self._gone:
                dropped, self._dropped = self._dropped, 0
                text = f"... {dropped} lines were not shown: nobody read them in time\n".encode() + text
            try:
                while text and not self._gone:
                    text = text[os.write(self._descriptor, text) :]
            except OSError:  # EPIPE: the reader ended; EIO: the terminal was closed
                self._gone = True


def _log(file: Path) -> logging.Logger | None:
    """A separate logger for this file; None if it cannot be written, which must not end
    the swarm.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = RotatingFileHandler(file, maxBytes=_LOG_BYTES, backupCount=1, encoding="utf-8", errors="backslashreplace")
    except OSError:
        return None
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk, later on
    log = logging.Logger(f"swarm up {file}")
    log.addHandler(handler)
    return log
