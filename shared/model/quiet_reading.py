"""Reading with other people's libraries: quietly, and with one kind of error."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from shared.model.import_refused import ImportRefused
from shared.model.loading import no_progress_bars

_READ_ERRORS = (OSError, ValueError, KeyError, IndexError, TypeError, RuntimeError, NotImplementedError, SafetensorError)


@contextmanager
def quietly() -> Iterator[None]:
    """Without the bars and the advice for people who load models by hand."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        with no_progress_bars(), redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(before)


@contextmanager
def reading(origin: str, part: str) -> Iterator[None]:
    """Read the `part` of the model from `origin`; what libraries answer to what they cannot read becomes ImportRefused."""
    try:
        with quietly():
            yield
    except ImportRefused:
        raise
    except MemoryError:
        raise ImportRefused(f"{origin}: memory is exhausted while its {part} is read: use a larger machine") from None
    except _READ_ERRORS as error:
        cause = (str(error).strip().splitlines() or [""])[0][:240]
        raise ImportRefused(
            f"the {part} of {origin} cannot be read ({type(error).__name__}: {cause}): check that the file is a causal "
            "language model's and whole, or give its Hugging Face folder"
        ) from None
