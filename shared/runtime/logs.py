"""Configures structlog for the log lines of this project and of libraries: console format on a
terminal, JSON otherwise, and always a file per process. Tracebacks never show local
variables.

The terminal gets `log.level` and above. The file in the run's folder (`<role>.log`, JSON) gets info
and above, so a quiet terminal loses nothing. Completions are never logged at info.

A line may quote another node's text. On a terminal everything is escaped (`shared.text`), including
libraries' lines and tracebacks. JSON itself escapes what is not ASCII, and DEL is escaped too, so a
log file is also safe to view.
"""

from __future__ import annotations

import io
import logging
import logging.handlers
import os
import sys
import traceback
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO, TypeAlias

import structlog
from structlog.typing import FilteringBoundLogger

from shared.runtime.exits import FILE_VARIABLE
from shared.text import visible, visible_json, visible_lines

Log: TypeAlias = FilteringBoundLogger
"""The logger that is passed to each part, bound to node and role: `log.warning("event", key=value,
...)`.
"""

_MAX_LOG_BYTES = 50 * 2**20


def configure_logging(
    *, level: str, log_format: Literal["auto", "console", "json"], file: Path | None = None, stream: TextIO | None = None
) -> None:
    """Route structlog and the standard library's logging to `stream` (standard output unless given)
    and, if given, to `file`.
    """
    stream = stream or sys.stdout
    console = log_format == "console" or (log_format == "auto" and stream.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    json_formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            # Without local variables: a seed, a server's key or an answer may be in one.
            structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(serializer=visible_json),
        ],
    )
    console_formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            _escape_all,
            # Plain tracebacks: rich ones print every local variable.
            _sentence
            if FILE_VARIABLE in os.environ and not stream.isatty()
            else structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=_plain_traceback),
        ],
    )
    screen = logging.StreamHandler(stream)
    screen.setFormatter(console_formatter if console else json_formatter)
    screen.setLevel(level.upper())
    handlers: list[logging.Handler] = [screen]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        log_file = _LogFile(file, maxBytes=_MAX_LOG_BYTES, backupCount=1, delay=True)
        log_file.setFormatter(json_formatter)
        log_file.setLevel(min(logging.INFO, logging.getLevelName(level.upper())))
        handlers.append(log_file)
    root = logging.getLogger()
    root.handlers = handlers
    root.setLevel(min(handler.level for handler in handlers))
    for noisy in ("httpx", "httpcore", "urllib3", "filelock", "asyncio", "nats"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("asyncio").addFilter(_is_worth_a_line)


class _LogFile(logging.handlers.RotatingFileHandler):
    """Says on standard error, once until it can write again, that lines are lost, for example on a
    full disk. A plain handler prints a traceback for each of them.
    """

    _failed = _told = False

    def emit(self, record: logging.LogRecord) -> None:
        self._failed = False
        super().emit(record)
        self._told = self._failed and self._told

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the base class calls it so)
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._failed = True
        if not self._told:
            self._told = True
            with suppress(OSError):
                print(f"lines for {self.baseFilename} are lost: {error.strerror or error}", file=sys.stderr, flush=True)


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """False for asyncio's harmless warning at the end of a connection that nats-py upgraded to
    TLS.
    """
    return not str(record.msg).startswith("returning true from eof_received()")


_LINES = frozenset({"exception", "stack"})
_OWN = frozenset({"exc_info"})
"""Keys that the renderer formats itself, with `_plain_traceback`."""


def _escape_all(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape a line's names and values for a terminal; numbers and the traceback's source stay
    unchanged.
    """
    return {key if key.isidentifier() else visible(key): _escaped(key, value) for key, value in event.items()}


def _escaped(key: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float) or key in _OWN:
        return value
    if key in _LINES:
        return visible_lines(str(value))
    if isinstance(value, list | tuple):
        return [_escaped("", each) for each in value]
    if isinstance(value, dict):
        return {_escaped("", name): _escaped("", each) for name, each in value.items()}
    return visible(value if isinstance(value, str) else repr(value))


_SAID_FIRST = ("reason", "cause", "problem", "consequence", "remedy")
_SAID_BEFORE = ("timestamp", "logger", "node", "role", "level", "event")
"""`swarm up` writes the time and the process's name before each line."""


def _sentence(_: Any, __: str, event: MutableMapping[str, Any]) -> str:
    """A line as people read it among the progress of `swarm up`: what happened, why, what follows,
    what to do, and then the rest, such as `warning: groups_skipped: too long (step 3; counts a 1)`.
    """
    words = [f"{event.get('level', 'info')}: {event.get('event', '')}", *(str(event[key]) for key in _SAID_FIRST if event.get(key))]
    said = (*_SAID_FIRST, *_SAID_BEFORE, *_OWN, *_LINES)
    left = {key: value for key, value in event.items() if key not in said and value != ""}
    rest = "; ".join(f"{key.replace('_', ' ')} {_listed(value)}" for key, value in left.items())
    text = f"{': '.join(words[:2])}{''.join(f'; {each}' for each in words[2:])}{f' ({rest})' if rest else ''}"
    lines = io.StringIO()
    if exc_info := event.get("exc_info"):
        if isinstance(exc_info, BaseException):
            exc_info = type(exc_info), exc_info, exc_info.__traceback__
        _plain_traceback(lines, exc_info if isinstance(exc_info, tuple) else sys.exc_info())
    return text + lines.getvalue() + "".join(f"\n{event[key]}" for key in _LINES if event.get(key))


def _listed(value: Any) -> str:
    """Without the brackets and quotation marks of Python."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_listed(each)}" for name, each in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_listed, value)) or "none"
    return str(value)


def _plain_traceback(
    sio: TextIO, exc_info: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
) -> None:
    sio.write("\n" + visible_lines("".join(traceback.format_exception(*exc_info)).rstrip("\n")))
