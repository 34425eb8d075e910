"""The key of an OpenAI-compatible server, which is neither a setting nor in any log."""

from __future__ import annotations

import os
from pathlib import Path

from shared.config.sections import GeneratorSection
from shared.runtime.errors import FatalError


def server_key(generator: GeneratorSection) -> str | None:
    """The key, from its file or variable; None: no key is configured. Raises `FatalError` if it
    cannot be read.
    """
    if generator.openai_key_file:
        file = generator.openai_key_file
        try:
            key = Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise FatalError(f"generator.openai_key_file {file} cannot be read: {error}") from None
        if not key:
            raise FatalError(f"generator.openai_key_file {file} is empty: write the server's key into it, or unset the setting")
        return key
    if generator.openai_key_variable:
        name = generator.openai_key_variable
        if not (key := os.environ.get(name, "").strip()):
            raise FatalError(f"generator.openai_key_variable is {name}, which is not set: export it, or use openai_key_file")
        return key
    return None
