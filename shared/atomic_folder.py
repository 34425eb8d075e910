"""Folders that are written completely or not at all, also when a signal ends the work: SIGTERM then
undoes it the way Ctrl-C does.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared import atomic_files


def refuse_filled(folder: Path, purpose: str) -> None:
    """Check, before any work is done, that `atomic_folder` can create `folder`; `purpose` says
    what the folder is for.

    Raises:
        FileExistsError: `folder` exists and is not an empty folder, is a link or the current
            folder, or one of its parents is a file.
        OSError: the name is invalid, or the folder cannot be inspected.
    """
    if "\0" in str(folder):
        raise OSError(errno.EINVAL, "no name may hold the character NUL", str(folder))
    if folder.is_symlink():
        raise FileExistsError(f"{folder} is a link, which is not replaced: choose another folder for {purpose}")
    on_the_way = next((parent for parent in folder.absolute().parents if parent.exists()), folder)
    if not on_the_way.is_dir():
        raise FileExistsError(f"{on_the_way} is a file, so {folder} cannot be created: choose another folder for {purpose}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not empty: choose another folder for {purpose}")
    if folder.exists() and folder.samefile(Path()):
        raise FileExistsError(f"{folder} is the current folder, which is not replaced: choose another folder for {purpose}")
    if folder.name == "..":
        raise FileExistsError(f"{folder} has no name that it could be renamed to: choose another folder for {purpose}")


@contextmanager
def atomic_folder(folder: Path, *, replacing: bool = False, private: bool = False) -> Iterator[Path]:
    """A folder to fill that is renamed to `folder` when the block succeeds, and deleted otherwise.
    `replacing`: also replace a folder that is not empty. Until then it lies next to `folder` under
    a name that begins with a dot. Its files are flushed to disk before the rename. `private`:
    only its owner may look into it, at any time.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Named before and created inside the block, so that a signal right after its creation removes
    # it too. The random name is nobody else's.
    staging = folder.parent / f".{folder.name}-{secrets.token_hex(8)}"
    try:
        staging.mkdir(mode=0o700)
        yield staging
        stop_if_asked()
        _finish(staging, private=private)
        if replacing and folder.exists():
            shutil.rmtree(folder)
        elif folder.exists():
            folder.rmdir()
        os.replace(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _finish(folder: Path, *, private: bool) -> None:
    # The library that writes weights makes them readable by their owner only; services may run as
    # another user.
    folder.chmod(0o700 if private else 0o755)
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o600 if private else 0o644)
            atomic_files.sync_path(file)


EXIT_TERMINATED = 128 + signal.SIGTERM


class _Asked:
    """The exception that a signal raised in the block, or None."""

    exception: BaseException | None = None


_asked = _Asked()


@contextmanager
def unwinding_on_signals() -> Iterator[None]:
    """In the block SIGTERM raises SystemExit with `EXIT_TERMINATED`, and SIGINT KeyboardInterrupt,
    so that `finally` clauses undo unfinished work.

    A second signal does not interrupt these clauses. Python drops an exception raised within a
    destructor, a weak reference's callback or an attribute that compiled code looks up; if it
    dropped the first one, a second signal raises again, and so does `stop_if_asked`. Outside the
    main thread, which alone receives signals, the block runs unchanged.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _asked.exception = None
    before = {number: signal.signal(number, _unwind) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
        stop_if_asked()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _asked.exception = None


def stop_if_asked() -> None:
    """Raise a signal's exception that Python dropped in the block of `unwinding_on_signals`."""
    if _asked.exception is not None and threading.current_thread() is threading.main_thread():
        raise _asked.exception


def _unwind(number: int, _: object) -> None:
    if _asked.exception is not None and _being_handled(_asked.exception):
        return
    _asked.exception = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(EXIT_TERMINATED)
    raise _asked.exception


def _being_handled(exception: BaseException) -> bool:
    """Check whether the interrupted code is handling `exception`, or another exception raised
    during that handling.
    """
    handled, seen = sys.exc_info()[1], 0
    while handled is not None and seen < 100:
        if handled is exception:
            return True
        handled, seen = handled.__context__, seen + 1
    return False
