"""structlog for our own lines and for those of libraries: console on a terminal, JSON otherwise, and always a file per process.

The terminal gets `log.level` and above; the file in the run's folder (`<role>.log`, JSON) gets everything from info on, so that a
quiet terminal loses nothing. Completions are never logged at info.
"""

from __future__ import annotations

import logging
import logging.handlers
import sys
from pathlib import Path
from typing import Any, Literal

import structlog

_MAX_LOG_BYTES = 50 * 2**20


def configure_logging(*, level: str, log_format: Literal["auto", "console", "json"], file: Path | None = None) -> None:
    """Route structlog and the standard library's logging to standard output and, if given, to `file`."""
    console = log_format == "console" or (log_format == "auto" and sys.stdout.isatty())
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
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(),
        ],
    )
    console_formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            # Plain tracebacks: rich ones print every local variable, tensors and completions included.
            structlog.dev.ConsoleRenderer(colors=sys.stdout.isatty(), exception_formatter=structlog.dev.plain_traceback),
        ],
    )
    screen = logging.StreamHandler(sys.stdout)
    screen.setFormatter(console_formatter if console else json_formatter)
    screen.setLevel(level.upper())
    handlers: list[logging.Handler] = [screen]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        log_file = logging.handlers.RotatingFileHandler(file, maxBytes=_MAX_LOG_BYTES, backupCount=1, delay=True)
        log_file.setFormatter(json_formatter)
        log_file.setLevel(min(logging.INFO, logging.getLevelName(level.upper())))
        handlers.append(log_file)
    root = logging.getLogger()
    root.handlers = handlers
    root.setLevel(min(handler.level for handler in handlers))
    for noisy in ("httpx", "httpcore", "urllib3", "filelock", "asyncio", "nats"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
