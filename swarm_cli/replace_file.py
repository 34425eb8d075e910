"""A file that is there whole or as it was before, for what a server reads."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from shared.policy_store.files import draft_in, keep_draft
from swarm_cli.errors import CommandError


def replace_file(path: Path, text: str) -> None:
    """Write `text` beside `path`, onto the disk, then give it that name. A file that was there
    passes on its mode and, where this process may, its owner; a link stays one.

    Raises:
        CommandError: it cannot be written; what was there is untouched.
    """
    target = Path(os.path.realpath(path))
    try:
        with draft_in(target.parent) as (stream, draft):
            if target.exists():
                before = target.stat()
                with suppress(PermissionError):
                    os.fchown(stream.fileno(), before.st_uid, before.st_gid)
                os.fchmod(stream.fileno(), before.st_mode & 0o777)
            left = memoryview(text.encode())
            while left:
                left = left[stream.write(left) :]
            keep_draft(stream, draft, target)
    except OSError as error:
        raise CommandError(f"{path} cannot be written ({error.strerror or error}); what was there is untouched") from None
