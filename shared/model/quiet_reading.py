"""For calls of third-party libraries that read models: suppresses their output and turns all their
errors into one kind.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

from transformers.utils import logging as transformers_logging

from shared.model.import_refused import ImportRefused
from shared.model.loading import no_progress_bars

_MOST_CHARACTERS = 240


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress progress bars and advice meant for people who load models by hand."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        with no_progress_bars(), redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(before)


@contextmanager
def reading(origin: str, part: str) -> Iterator[None]:
    """Read the `part` of the model from `origin`; any error of the libraries becomes
    ImportRefused.
    """
    try:
        with quietly():
            yield
    except ImportRefused:
        raise
    except MemoryError:
        raise ImportRefused(f"{origin}: not enough memory to read its {part}: use a larger machine") from None
    # The file comes from somebody else and may contain anything. Its readers pass on the errors of
    # all their layers, including plain Exception.
    except Exception as error:  # noqa: BLE001
        raise ImportRefused(
            f"the {part} of {origin} cannot be read ({library_cause(error)}): check that the file is complete and of a causal "
            "language "
            "model, or give its Hugging Face folder"
        ) from None


def library_cause(error: Exception) -> str:
    """A library's error in one line, with its kind; arithmetic errors are put into words."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    # Some announce the cause in one line and state it in the next.
    said = f"{type(error).__name__}: {' '.join(lines[: 2 if lines[0].endswith(':') else 1])[:_MOST_CHARACTERS]}"
    return f"a number in it is 0 or too large; {said}" if isinstance(error, ArithmeticError) else said
