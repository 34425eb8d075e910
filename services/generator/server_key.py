"""The key of an OpenAI-compatible server, which is neither a setting nor in any log."""

from __future__ import annotations

import os
import re

from shared.config.sections import GeneratorSection
from shared.plain_files import read_named
from shared.runtime.exits import FatalError
from shared.text import error_text

MAX_BYTES = 2**14
"""Of a key file. The longest keys are tokens of some thousand characters."""
_OTHER_KEY = re.compile(r"-----BEGIN |\bS[ACNOUX][A-Z2-7]{56}\b")
"""PEM and NATS credentials, or an nkey seed of any type."""


def server_key(generator: GeneratorSection) -> str | None:
    """The key, from its file or variable; None: no key is configured. Raises `FatalError` if it
    cannot be read.
    """
    if generator.openai_key_file:
        file = generator.openai_key_file
        try:
            key = read_named(file, MAX_BYTES).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise FatalError(f"generator.openai_key_file {file} cannot be read: {error_text(error)}") from None
        if problem := key_problem(file, key):
            raise FatalError(f"generator.openai_key_file: {problem}")
        return key
    if generator.openai_key_variable:
        name = generator.openai_key_variable
        if not (key := os.environ.get(name, "").strip()):
            raise FatalError(f"generator.openai_key_variable is {name}, which is not set: export it, or use openai_key_file")
        return key
    return None


def key_problem(file: str, content: str) -> str | None:
    """Why the content of a key file must not be sent to a server: it has no key, or one for
    something else, which a configuration made by somebody else could ask for.
    """
    if _OTHER_KEY.search(content):
        return (
            f"{file} holds a NATS key or a PEM, which must not be sent to generator.openai_url: give a file with that server's "
            "own key"
        )
    if not content or "\n" in content:
        return f"{file} must hold the server's key on one line and nothing else"
    return None
