"""Where the output of a swarm's processes goes: to the terminal as long as there is one, and to
`up.log` in the run's folder.

A terminal can be closed, a pipe's reader can end, and one that pauses (`less`) lets nobody write.
None of it may hold up or end whoever looks after the processes, so a thread writes, from a queue
that drops lines when it is full.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path

from swarm_cli.local.rules import VIEW

SYSTEM = "swarm"
"""The name before lines of `swarm up` itself."""
_QUEUED_LINES = 10_000
_LOG_BYTES = 8 * 2**20
_COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)


class Output:
    """Lines with a process's name before them. `write` never blocks and never fails.

    descriptor: of the terminal, pipe or file.
    log_file: gets everything too; None: nothing is kept.
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

    @property
    def gone(self) -> bool:
        """Whether nobody reads any more."""
        return self._gone

    def expect(self, name: str) -> None:
        """Leave room for this name in every line."""
        self._width = max(self._width, len(name))

    def detach(self) -> None:
        """The terminal is gone: write to `up.log` alone from now on."""
        self._gone = True

    def write(self, name: str, line: str) -> None:
        """One line of the process `name`, without its line break."""
        at = time.strftime("%H:%M:%S")
        if self._log:
            self._log.info("%s %s | %s", at, name, line)
        if self._gone:
            return
        # The view's table has the time in it, and needs the width.
        text = line if name == VIEW else f"{self._coloured(name, f'{at} {name:<{self._width}} |')} {line}"
        try:
            self._queue.put_nowait(text.encode(errors="backslashreplace") + b"\n")
        except queue.Full:
            self._dropped += 1

    def close(self, patience_s: float = 2.0) -> None:
        """Wait until what was written has gone out, though not for a reader that has paused."""
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
                handler.close()

    def _coloured(self, name: str, text: str) -> str:
        if self._colours is None:
            return text
        colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        return f"\x1b[{colour}m{text}\x1b[0m"

    def _write_all(self) -> None:
        """The thread: write what is queued, until there is nobody to read it."""
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
    """A logger of its own for this file; None where it cannot be written, which ends no swarm."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = RotatingFileHandler(file, maxBytes=_LOG_BYTES, backupCount=1, encoding="utf-8", errors="backslashreplace")
    except OSError:
        return None
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk, later on
    log = logging.Logger(f"swarm up {file}")
    log.addHandler(handler)
    return log
