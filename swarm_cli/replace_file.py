"""Atomic replacement of a file that a server reads."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from shared.atomic_files import draft_in, keep_draft, write_all
from swarm_cli.errors import CommandError


def replace_file(path: Path, text: str, *, private: bool = False) -> None:
    """Write `text` to a temporary file next to `path`, sync it, and rename it to `path`. The mode
    and, if permitted, the owner of an existing file are kept; a symbolic link stays a link. With
    `private`, only the owner may read the file, even if others could before. A device or a pipe,
    such as /dev/null, is written to: a file in its place would break every program that uses it.

    Raises:
        CommandError: it cannot be written; an existing file is unchanged.
    """
    target, content = Path(os.path.realpath(path)), memoryview(text.encode())
    try:
        if target.exists() and not target.is_file() and not target.is_dir():
            with target.open("wb", buffering=0) as there:
                write_all(content, there.write)
            return
        # Nobody else may read the draft of a file that they may not read themselves.
        with draft_in(target.parent, 0o600 if private or target.exists() else 0o666) as (stream, draft):
            if target.exists():
                before = target.stat()
                with suppress(PermissionError):
                    os.fchown(stream.fileno(), before.st_uid, before.st_gid)
                os.fchmod(stream.fileno(), before.st_mode & 0o777)
            if private:
                os.fchmod(stream.fileno(), 0o600)
            write_all(content, stream.write)
            keep_draft(stream, draft, target)
    except OSError as error:
        raise CommandError(f"{path} cannot be written ({error.strerror or error}); an existing file is unchanged") from None
