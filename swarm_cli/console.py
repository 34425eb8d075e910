"""Where a command's words go: results to standard output, everything else to standard error."""

from __future__ import annotations

import logging
import sys

import structlog


def log_to_standard_error() -> None:
    """Keep the log lines of what a command uses out of its result, and quiet: the command itself says what went wrong."""
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
    )
    logging.basicConfig(stream=sys.stderr, level=logging.ERROR)


def note(text: str) -> None:
    """A line for the person at the terminal."""
    print(text, file=sys.stderr, flush=True)
