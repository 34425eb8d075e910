"""The one error for a model that cannot be used, and the block in which third-party libraries read
a model: it suppresses their output and turns all their errors into that one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging

from shared.runtime.exits import FatalError

_MOST_CHARACTERS = 240


class ModelLoadError(FatalError):
    """A model or tokenizer cannot be used, and a restart would not help; the message names the
    cause and the remedy.
    """


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress progress bars, reports and advice meant for people who load models by hand."""
    before = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
        if had_bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def reading(origin: str, part: str) -> Iterator[None]:
    """Read the `part` of the model that `origin` names; any error of the libraries becomes
    ModelLoadError.
    """
    try:
        with quietly():
            yield
    except ModelLoadError:
        raise
    except MemoryError:
        raise ModelLoadError(f"{origin}: not enough memory to read its {part}: use a larger machine") from None
    # The file comes from somebody else and may contain anything. Its readers pass on the errors of
    # all their layers, including plain Exception.
    except Exception as error:  # noqa: BLE001
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise ModelLoadError(
            f"the {part} of {origin} cannot be read{offline} ({library_cause(error)}): check that the files are complete and of a "
            "causal language model, and for a hub name its spelling and the connection"
        ) from None


def library_cause(error: Exception) -> str:
    """A library's error in one line, with its kind; arithmetic errors are put into words."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    # Some announce the cause in one line and state it in the next.
    said = f"{type(error).__name__}: {' '.join(lines[: 2 if lines[0].endswith(':') else 1])[:_MOST_CHARACTERS]}"
    return f"a number in it is 0 or too large; {said}" if isinstance(error, ArithmeticError) else said
