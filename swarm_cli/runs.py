"""The runs of this machine: which are running and where, how each ended, and the command that
starts it again.

A running `swarm up` or `swarm join` holds `up.lock` in its run's folder and leaves a note beside
it (`swarm_cli.local` takes the lock). The kernel's list of open files therefore knows every run's
folder, and nothing is written down that could be out of date.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, TextIO

import msgspec

from shared.atomic_files import replace_text
from shared.contracts.wire import NodeId
from shared.plain_files import open_plain, read_plain
from shared.run_records import saved_step
from shared.runtime.exits import CRASH_WINDOW_S, EXIT_CONFIG, EXIT_UNSAVED, MAX_CRASHES
from shared.text import visible
from shared.transport.base import NotConnected
from swarm_cli.errors import CommandError
from swarm_cli.installation import DEMO_CONFIG

NOTE = "up.json"
_MARK = "up.own"
_MARK_BYTES = 200


def is_own(folder: Path) -> bool:
    """Check whether this user, or root, wrote the note in `folder`, and in this folder. A run whose
    files were copied, or put back from a backup, is not: whoever has it may have written its note.
    """
    try:
        owner, mark = _marks(folder)
        return owner in (os.geteuid(), 0) and read_plain(folder / _MARK, _MARK_BYTES).decode().strip() == mark
    except (OSError, UnicodeDecodeError):
        return False


def _marks(folder: Path) -> tuple[int, str]:
    """The note's owner, and what no other file is like: device, number and time of change."""
    descriptor = open_plain(folder / NOTE)
    try:
        note = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return note.st_uid, f"{note.st_dev}:{note.st_ino}:{note.st_ctime_ns}"


MAX_NODES = 64
_PORT = msgspec.Meta(ge=1, le=65_535)


class StartOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Options of `swarm up` that say which nodes run where, and until when; None or empty if not
    given.
    """

    nodes: Annotated[int, msgspec.Meta(ge=1, le=MAX_NODES)] | None = None
    names: Annotated[tuple[NodeId, ...], msgspec.Meta(max_length=MAX_NODES)] = ()
    config: str = ""
    nats_port: Annotated[int, _PORT] | None = None
    nats_url: str = ""
    base_port: Annotated[int, _PORT] | None = None
    steps: Annotated[int, msgspec.Meta(ge=0, le=2**53)] | None = None
    roles: str = ""

    def words(self) -> Iterator[str]:
        """The options as words for a shell, such as `--nodes 3`."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            option = "--name" if name == "names" else "--" + name.replace("_", "-")
            for each in value if isinstance(value, tuple) else [value] if value else []:
                yield f"{option} {shlex.quote(str(each))}"

    def command(self, run: str) -> str:
        """The `swarm up` command of a run with these options."""
        return " ".join(["swarm up --run", shlex.quote(run), *self.words()])


def in_a_run(config: str, folder: Path) -> bool:
    """Check whether `config` lies in a run's folder beside or in `folder`, before or after links
    are followed. Whoever made that run may have written it, and a configuration says where keys are
    sent.
    """
    places = [(Path(os.path.abspath(config)), Path(os.path.abspath(folder.parent)))]
    places += [(Path(config).resolve(), place.resolve()) for place in (folder.parent, folder)]
    return any(file.is_relative_to(place) for file, place in places)


LOCK = "up.lock"
_NOTE_BYTES = 65_536


class RunNote(msgspec.Struct, frozen=True):
    """A run's servers and options. node_url, swarm_url: servers of the nodes' streams and of the
    swarm's; swarm_url "none": no swarm. options: with which `swarm up` was last started; "join": it
    is a run of `swarm join`, whose token is not kept. swarm_id: the swarm that its nodes are in; ""
    if it is not known. started_in: the folder from which relative paths of the configuration count.
    """

    node_url: str
    swarm_url: str
    options: StartOptions | Literal["join"]
    swarm_id: str = ""
    started_in: str = ""
    ends_after: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0


def running_runs(var_dir: Path) -> list[Path]:
    """Folders of the runs that are running on this machine, sorted by name."""
    return sorted(file.parent for file in (var_dir / "runs").glob(f"*/{LOCK}") if holder(file.parent) is not None)


def holder(folder: Path) -> int | None:
    """The id of the process that runs the run in `folder`: 0 if it is not known, None if there is
    no such process. Only a file of this user's, or of root's, with one name is a run's lock: in a
    folder that somebody else made it could be a link to a lock of any process.
    """
    try:
        with open(open_plain(folder / LOCK)) as file:
            found = os.fstat(file.fileno())
            if found.st_uid not in (os.geteuid(), 0) or found.st_nlink > 1:
                return None
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return pid_in(file)
    except OSError:
        pass
    return None


def running_since(folder: Path) -> float | None:
    """The Unix time at which the process that runs the run in `folder` began; None if there is no
    such process.
    """
    try:
        return (folder / LOCK).stat().st_mtime if holder(folder) is not None else None
    except OSError:  # it has ended meanwhile
        return None


def write_note(folder: Path, note: RunNote) -> None:
    """Replace the run's note, as this user's own. Raises CommandError if it cannot be written."""
    try:
        replace_text(folder / NOTE, msgspec.json.encode(note).decode() + "\n", synced=True)
        replace_text(folder / _MARK, _marks(folder)[1] + "\n", synced=True)
    except OSError as error:
        raise CommandError(f"{folder / NOTE} cannot be written ({error.strerror or error})") from None


def read_note(folder: Path) -> RunNote | None:
    """The run's note; None if there is none, another version wrote it, or one of its texts cannot
    be printed: they stand in commands, and the note may be somebody else's.
    """
    try:
        note = msgspec.json.decode(read_plain(folder / NOTE, _NOTE_BYTES), type=RunNote)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    options = note.options if isinstance(note.options, StartOptions) else StartOptions()
    words = [note.node_url, note.swarm_url, note.swarm_id, options.nats_url]
    printable = all(visible(text) == text for text in [*words, options.config, note.started_in])
    somewhere = not options.config or Path(options.config).is_absolute()
    return note if printable and somewhere and not any(" " in word for word in words) else None


def started_with(folder: Path) -> Path | None:
    """The configuration that `swarm up` last started the run in `folder` with; None if it is not
    known, or a copied note or another run's folder names it: it may be a stranger's.
    """
    note = read_note(folder)
    if note is None or not isinstance(note.options, StartOptions) or not is_own(folder):
        return None
    config = note.options.config
    return None if config and in_a_run(config, folder) else Path(config or DEMO_CONFIG)


def goes_on(folder: Path, *, complete: bool = False) -> str:
    """The command that continues the run in `folder`, as far as it is known, wherever this process
    is. A copied note's options are not shown: they may be a stranger's. complete: it has taken its
    steps, although its end is not on record yet. Once they are taken, the command asks for twice as
    many: with the same number, also that of its configuration, the run would end at once.
    """
    note = read_note(folder)
    if note is not None and note.options == "join":
        return "the same `swarm join`"
    if note is not None and isinstance(note.options, StartOptions) and is_own(folder):
        config = note.options.config
        if not (config and in_a_run(config, folder)):
            options, until = note.options, note.ends_after or note.options.steps or 0
            if until and (complete or steps_taken(folder, until)):
                options = msgspec.structs.replace(options, steps=2 * max(until, *_saved_steps(folder)))
            return _to(note.started_in) + options.command(folder.name)
    return f"swarm up --run {folder.name}, with the options that it was started with"


def steps_taken(folder: Path, steps: int) -> bool:
    """Check whether the run in `folder`, which has ended, took `steps` steps: by the record of its
    end, or by its nodes' checkpoints if it was stopped while the last policy was evaluated.
    """
    end, saved = read_end(folder), _saved_steps(folder)
    return end is not None and (end.how == "complete" or min(saved) >= steps)


def _saved_steps(folder: Path) -> list[int]:
    """The step of each node's newest checkpoint; [0] without nodes."""
    return [saved_step(log.parent) for log in folder.glob("*/trainer.log")] or [0]


def _to(started_in: str) -> str:
    return f"cd {shlex.quote(started_in)} && " if started_in and Path(started_in) != Path.cwd() else ""


def pid_in(file: TextIO) -> int:
    """The id of the process that wrote its number into the lock, if it still has the lock open;
    else 0. The number alone is no proof: another process may have it by now.
    """
    file.seek(0)
    text = file.read(20).strip()
    if not (text.isascii() and text.isdigit()):
        return 0
    lock = os.fstat(file.fileno())
    with suppress(OSError):  # no such process, or another user's
        for opened in Path(f"/proc/{text}/fd").iterdir():
            with suppress(OSError):
                if os.path.samestat(opened.stat(), lock):
                    return int(text)
    return 0


_PROCESSES = Path("/proc")
VAR_DIR_VARIABLE = "SWARM_NODE__VAR_DIR"
DEFAULT_VAR_DIR = Path("var")
SERVER_LOG = "nats.log"
"""In the folder of a run whose server `swarm up` started."""


def runs_of_this_user() -> list[Path]:
    """Folders of the runs that are running on this machine and whose servers this process can
    reach, sorted; empty where the kernel does not list open files as Linux does.
    """
    locks = {lock for process in _own_processes() for lock in _open_locks(process)}
    return sorted(lock.parent for lock in locks if holder(lock.parent) is not None)


def run_on_server(var_dir: Path, node_url: str) -> Path | None:
    """Folder of the run of this machine whose own server is at `node_url`; None if no run that is
    running has one there, or several say so.
    """
    running = {folder.absolute() for folder in (*running_runs(var_dir), *runs_of_this_user())}
    there = [folder for folder in running if (note := read_note(folder)) and note.node_url == node_url]
    return there[0] if len(there) == 1 and (there[0] / SERVER_LOG).is_file() else None


def run_of_procfile(var_dir: Path) -> Path | None:
    """Folder of a run in `var_dir` that `honcho start` runs, which has no note: its server, which
    lists its ports in a file with its process id, is alive. None if there is none.
    """
    for listed in (var_dir / "runs").glob("*/nats-server_*.ports"):
        process = listed.stem.rpartition("_")[2]
        if process.isdecimal() and (_PROCESSES / process).exists() and not (listed.parent / NOTE).exists():
            return listed.parent
    return None


def _own_processes() -> Iterator[Path]:
    """This user's processes in this network: in another one 127.0.0.1 is another machine."""
    with suppress(OSError):
        network = Path("/proc/self/ns/net").stat()
        for process in _PROCESSES.glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or may not be looked at
                if process.stat().st_uid == os.geteuid() and os.path.samestat((process / "ns/net").stat(), network):
                    yield process


def _open_locks(process: Path) -> Iterator[Path]:
    """Locks that the process has open under their present name, as this process sees it: one in a
    container may have another file of that name.
    """
    with suppress(OSError):  # it has ended, or may not be looked at
        for opened in (process / "fd").iterdir():
            with suppress(OSError):
                lock = Path(os.readlink(opened))
                if lock.name == LOCK and lock.parent.parent.name == "runs" and os.path.samestat(opened.stat(), lock.stat()):
                    yield lock


def starts_again(service: str, options: str) -> str:
    """Name the command that starts a service again. options: as `restart_options` returns."""
    return f"`swarm restart {service}{options}` starts it again (with `--now` if it hangs)"


def restart_options(folder: Path) -> str:
    """The options, with a leading space, with which `swarm restart` finds the run in `folder`:
    none for the only one here, `--run` for one of several and for one in another folder, and
    `--var-dir` if that is not found by its name.
    """
    var_dir, set_here = folder.parent.parent.resolve(), os.environ.get(VAR_DIR_VARIABLE)
    name = f" --run {shlex.quote(visible(folder.name, 80))}"
    beside = any(each.name != folder.name for each in running_runs(var_dir))
    if var_dir == Path(set_here or DEFAULT_VAR_DIR).resolve():
        return name if beside else ""
    if not set_here and sum(each.name == folder.name for each in runs_of_this_user()) == 1:
        return name
    return f"{name if beside else ''} --var-dir {shlex.quote(visible(str(var_dir), 400))}"


END = "end.json"
EXIT_ENDED = 3
"""Exit code of a command that shows a run which ended in order."""
EXIT_BROKE_OFF = 4
"""The same for a run that failed or was killed."""
EXIT_KILLED = 137
"""Exit code of a run that `swarm down --now` ended, so that no process could save its state."""
_LATEST = 253_402_000_000
"""Late in the year 9999; the system's calendar ends there."""
_MOST_BYTES = 65_536

How = Literal["complete", "stopped", "failed", "killed"]


class RunEnd(msgspec.Struct, frozen=True):
    """at: Unix time. code: exit code of the run. process: the process that ended the run. A killed
    run leaves no record of its end, so its `at` is when a process last wrote a file.
    """

    how: How
    at: Annotated[float, msgspec.Meta(ge=0, le=_LATEST)]
    code: Annotated[int, msgspec.Meta(ge=-255, le=255)] | None = None
    process: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,100}\Z")] | None = None

    @property
    def in_order(self) -> bool:
        """True if every process could save its state before it ended."""
        return self.how in ("complete", "stopped")

    @property
    def exit_code(self) -> int:
        """Exit code of a command that shows the run."""
        return EXIT_ENDED if self.in_order else EXIT_BROKE_OFF

    @property
    def cause(self) -> str:
        """Why it ended, in words."""
        if self.how == "complete":
            return "every node has taken its steps"
        if self.how == "stopped":
            return "it was stopped (Ctrl-C or `swarm down`)"
        if self.how == "killed" and self.code == EXIT_KILLED:
            return "`swarm down --now` ended it, and nothing was saved since the last checkpoints"
        if self.how == "killed":
            return (
                "it left no record of its end, so its `swarm up` was killed or the machine went down; "
                "the time is that of its last log line"
            )
        if self.code == EXIT_UNSAVED:
            return f"{self.process or 'a trainer'} could not save its last policy; its log says why"
        why = "cannot go on" if self.code == EXIT_CONFIG else f"ended with code {self.code}"
        return f"{self.process or 'a process'} {killed_often(self.code) or why}"

    def sentence(self, run: str, now: float | None = None) -> str:
        """Such as `run first ended in order at 2026-11-25 04:12:33, 5 minutes ago: ...`; without
        `5 minutes ago` if `now` is None.
        """
        what = {"failed": "failed", "killed": "was killed"}.get(self.how, "ended in order")
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(max(self.at, 0), _LATEST)))
        ago = "" if now is None else f", {_ago(now - self.at)} ago"
        return f"run {run} {what} at {at}{ago}: {self.cause}"


class RunGone(NotConnected):
    """No server answers because the run in `folder` has ended, and its server with it."""

    def __init__(self, folder: Path, end: RunEnd) -> None:
        super().__init__(end.sentence(folder.name, time.time()))
        self.folder, self.end = folder, end

    def ending(self, command: str) -> CommandError:
        """The error that ends a view of the run, with the commands that show it and start it
        again.
        """
        return CommandError(f"{self}\n{afterwards(self.folder, command)}", self.end.exit_code)


def afterwards(folder: Path, command: str) -> str:
    """Name the commands that start the run in `folder`, which has ended, again and, if `command`
    can do that, look at it.
    """
    look = f"`{command} --run {folder.name}` shows it as it was when it ended; " if command else ""
    return f"{look}{goes_on(folder)} starts it again"


def killed_often(code: int | None) -> str:
    """Say that a process was given up because it was killed again and again, if its exit code says
    so; else empty.
    """
    if code is None or code - 128 not in set(signal.Signals):
        return ""
    return f"was killed by {signal.Signals(code - 128).name} {MAX_CRASHES} times in {CRASH_WINDOW_S:.0f} s"


def write_end(folder: Path, code: int, process: str | None) -> None:
    """Note that the run in `folder` ended now. code, process: as in `RunEnd`; None: somebody
    stopped it. If the note cannot be written (a full disk), the run looks as if it was killed; an
    error here would hide the run's own.
    """
    how: How = "complete" if code == 0 else "failed"
    if process is None:
        how = "killed" if code == EXIT_KILLED else "stopped"
    end = RunEnd(how, time.time(), code, process if how == "failed" else None)
    with suppress(OSError):
        replace_text(folder / END, msgspec.json.encode(end).decode() + "\n", synced=True)


def forget_end(folder: Path) -> None:
    """Delete the note of the end, because the run in `folder` goes on. If it then ends without a
    new note, it was killed.
    """
    (folder / END).unlink(missing_ok=True)


def read_end(folder: Path) -> RunEnd | None:
    """The end of the run in `folder`; None if it is running or has never run."""
    if not (folder / NOTE).is_file() or holder(folder) is not None:
        return None
    with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(read_plain(folder / END, _MOST_BYTES), type=RunEnd)
    return RunEnd("killed", _last_written(folder))


def newest_ended(var_dir: Path, node_url: str = "") -> tuple[Path, RunEnd] | None:
    """Of the runs in `var_dir` that have ended, the one that ended last, and its end. node_url:
    consider only runs whose nodes used this server; None while one of them is running there.
    """
    ended: list[tuple[Path, RunEnd]] = []
    for file in (var_dir / "runs").glob(f"*/{NOTE}"):
        note = read_note(file.parent)
        if note is None or (node_url and note.node_url != node_url):
            continue
        end = read_end(file.parent)
        if end is not None:
            ended.append((file.parent, end))
        elif node_url:
            return None
    return max(ended, key=lambda each: each[1].at, default=None)


def _last_written(folder: Path) -> float:
    """Every process has a log in the run's folder or in its node's."""
    logs = [*folder.glob("*.log"), *folder.glob("*/*.log"), *folder.glob("*/*.jsonl"), folder / NOTE]
    return max((file.stat().st_mtime for file in logs if file.is_file()), default=0.0)


def _ago(seconds: float) -> str:
    for unit, name in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}s"
    whole = f"{max(0.0, seconds):.0f}"
    return f"{whole} second{'' if whole == '1' else 's'}"
