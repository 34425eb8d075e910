"""Locks a run for the process that runs it, and sends requests to that process from elsewhere on
the machine: `swarm down` and `swarm restart`.

There are two files in the run's folder. The `swarm up` that runs the run holds `up.lock` with
flock. The kernel releases it however that process ends, so neither a leftover file nor a reused
process number looks like a running swarm. `up.sock` takes one request, a line of JSON, and gives
one answer.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from shared.plain_files import NO_FILE, open_plain
from shared.roles import ROLES
from shared.suggestions import did_you_mean
from shared.text import error_text, visible
from swarm_cli.console import note
from swarm_cli.errors import CommandError
from swarm_cli.local.process import NOW
from swarm_cli.local.procfile import node_of
from swarm_cli.local.supervisor import Supervisor
from swarm_cli.runs import EXIT_KILLED, LOCK, VAR_DIR_VARIABLE, goes_on, holder, pid_in, restart_options
from swarm_cli.target import running_run

SOCKET = "up.sock"
_QUESTION_S = 10.0
_QUESTION_BYTES = 2**16

Answerer = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]
"""Answers a request; raises ValueError if the request is not valid."""


# A run's folder may be somebody else's. Through links, pipes or devices in it the run's processes
# would write elsewhere.


def reject_escaping_links(folder: Path) -> None:
    """Raises CommandError if anything in `folder` is a link that leads out of it, a pipe or device,
    or a file that has a name elsewhere as well. Sockets and links within the folder stay, because a
    run makes those. `folder` itself may be a link: its owner has put it elsewhere.
    """
    inside = Path(os.path.realpath(folder))
    several: dict[tuple[int, int], list[Path]] = {}
    for place, folders, files in os.walk(inside):
        for path in (Path(place) / name for name in folders + files):
            try:
                found = path.lstat()
            except OSError:  # gone meanwhile
                continue
            kind = found.st_mode
            if stat.S_ISREG(kind) and found.st_nlink > 1:
                several.setdefault((found.st_dev, found.st_ino), []).append(path)
            if stat.S_ISLNK(kind) and not _within(path, inside) and not _is_wandb_s(path, inside):
                what = f"is a link to {visible(os.readlink(path), 200)}, out of the run's folder"
            elif stat.S_ISFIFO(kind) or stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
                what = "is a pipe or device"
            else:
                continue
            raise _escape_error(folder / path.relative_to(inside), what)
    for names in several.values():
        with suppress(OSError):  # gone meanwhile
            if names[0].lstat().st_nlink > len(names) and not all(_is_newest_policy(name, inside) for name in names):
                what = "is a file that has a name outside the run's folder as well (a hard link)"
                raise _escape_error(folder / names[0].relative_to(inside), what)


def _escape_error(path: Path, what: str) -> CommandError:
    return CommandError(
        f"{visible(str(path))} {what}, which no run makes: what the run writes there would go elsewhere; if you trust the run, "
        "remove that or put a copy in its place, or choose another name with --run"
    )


def _is_newest_policy(file: Path, folder: Path) -> bool:
    """A node's newest policy may be the same file in a volume elsewhere; under this name it is only
    ever removed or replaced. Under any other name in the folder it would be written to.
    """
    return file.relative_to(folder).parts[1:] == ("published", "newest.safetensors")


def _within(link: Path, folder: Path) -> bool:
    return Path(os.path.realpath(link)).is_relative_to(folder)


def _is_wandb_s(link: Path, folder: Path) -> bool:
    """Weights & Biases leaves a link to its process's log, and writes to no earlier run's."""
    parts = link.relative_to(folder).parts
    return len(parts) == 5 and parts[1] == "wandb" and parts[3:] == ("logs", "debug-core.log")


@contextmanager
def holding_run(folder: Path) -> Iterator[None]:
    """Be the only process that runs the run in `folder`, for the length of the block.

    Raises:
        CommandError: another process runs it, the folder cannot be written, or something in it
            leads out of it.
    """
    try:
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(
            f"the run's folder {folder} cannot be made ({error.strerror}): set node.var_dir to a folder that can be written"
        ) from None
    reject_escaping_links(folder)
    with _locked(folder) as file:
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        except CommandError:
            if new:
                _remove_if_unused(folder)
            raise
        # The file stays, because another process may have it open already and be waiting for the
        # lock.


def refuse_running(folder: Path) -> None:
    """Raise the CommandError of `holding_run` if another process runs the run in `folder`, and
    write nothing.
    """
    if (pid := holder(folder)) is not None:
        raise _is_running(folder, pid)


@contextmanager
def _locked(folder: Path) -> Iterator[TextIO]:
    """Hold the run's lock. Raises CommandError if another process holds it, or it is no file.

    A process that was refused may remove the folder, and the lock with it, while this one waits.
    This one then holds a deleted file instead of the run's lock, and tries again.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with _opened(folder / LOCK) as file:
            if not _taken(file):
                raise _is_running(folder, pid_in(file))
            try:
                removed = not os.path.samestat((folder / LOCK).lstat(), os.fstat(file.fileno()))
            except FileNotFoundError:
                removed = True
            if not removed:
                yield file
                return


def _opened(lock: Path) -> TextIO:
    try:
        return open(lock, "a+", opener=_for_owner_only)
    except OSError as error:
        if error.errno not in NO_FILE or error.errno == errno.ENOENT:
            raise
        raise CommandError(f"{lock} is no file, so it cannot be the run's lock: remove it if you trust the run") from None


def _remove_if_unused(folder: Path) -> None:
    """Remove the folder of a run that was refused before it left anything there."""
    if [file.name for file in folder.iterdir()] == [LOCK]:
        with suppress(OSError):  # another process has started using it
            (folder / LOCK).unlink()
            folder.rmdir()


def _for_owner_only(path: str, flags: int) -> int:
    """Make the file readable by its owner only: anyone who can read a file can lock it
    with flock.
    """
    descriptor = open_plain(path, flags, 0o600)
    with suppress(PermissionError):  # another user's
        os.fchmod(descriptor, 0o600)
    return descriptor


def _taken(file: TextIO) -> bool:
    """Try to take the lock. Retries, because `holder` takes it for a moment to test it."""
    for _ in range(20):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.02)
    return False


def ask(folder: Path, question: Mapping[str, Any], deadline_s: float = _QUESTION_S) -> dict[str, Any]:
    """The answer of the process that runs the run in `folder`.

    Raises:
        CommandError: it refused, or did not answer within `deadline_s`.
    """
    pid = holder(folder)
    try:
        with socket.socket(socket.AF_UNIX) as line, _short_name(folder) as name:
            line.settimeout(deadline_s)
            line.connect(name)
            line.sendall(json.dumps(question).encode() + b"\n")
            with line.makefile("rb") as file:
                answer = json.loads(file.readline() or b"{}")
    except (OSError, ValueError) as error:
        if not pid:
            raise CommandError(
                f"run {folder.name} does not answer ({error_text(error)}); unknown which process holds {folder / LOCK}: "
                f"`fuser {folder / LOCK}` names it"
            ) from None
        raise CommandError(
            f"run {folder.name} is running as process {pid} but does not answer ({error_text(error)}): "
            f"`kill -9 {pid}` ends it, and its services then end by themselves"
        ) from None
    if "error" in answer:
        raise CommandError(str(answer["error"]))
    return dict(answer)


def wait_until_over(folder: Path, deadline_s: float) -> bool:
    """Wait until the run in `folder` has ended, for at most `deadline_s`. Returns whether
    it has.
    """
    give_up_at = time.monotonic() + deadline_s
    while holder(folder) is not None:
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.1)
    return True


@asynccontextmanager
async def answering(folder: Path, answer: Answerer) -> AsyncIterator[None]:
    """Answer requests to the run in `folder`, from its owner only, for the length of the block. On
    a file system without sockets there are no requests, and the run goes on without them.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, ValueError):
            async with asyncio.timeout(_QUESTION_S):
                line = await reader.readline()
            try:
                said = await answer(_question(line))
            except (ValueError, TypeError, CommandError) as error:
                said = {"error": str(error)}
            writer.write(json.dumps(said).encode() + b"\n")
            await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_unix_server(serve, sock=_listening(folder), limit=_QUESTION_BYTES)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        server.close()
        (folder / SOCKET).unlink(missing_ok=True)


def _question(line: bytes) -> Mapping[str, Any]:
    """Raises ValueError if the line is not a request."""
    try:
        question = json.loads(line)
    except (ValueError, RecursionError):
        question = None
    if not isinstance(question, dict):
        raise ValueError('a request is one line with a JSON object, such as {"do": "down"}')
    return question


def _listening(folder: Path) -> socket.socket:
    with suppress(FileNotFoundError):
        (folder / SOCKET).unlink()  # left by a killed process: this one holds the run's lock now
    listening = socket.socket(socket.AF_UNIX)
    with _short_name(folder) as name:
        listening.bind(name)
    (folder / SOCKET).chmod(0o600)
    listening.setblocking(False)
    return listening


@contextmanager
def _short_name(folder: Path) -> Iterator[str]:
    """A path to the socket that fits into Linux's limit of 108 characters, however long the
    folder's path is.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


def _is_running(folder: Path, pid: int) -> CommandError:
    return CommandError(
        f"run {folder.name} is running already{f' (process {pid})' if pid else ''}: `swarm down {folder.name}` ends it, "
        "`swarm up --run NAME` starts another"
    )


# The requests, in the process that runs the run.

_WRONG_CALL = 2
"""The exit code of a command that was called wrongly."""


class ControlHandler:
    """Handles the requests for one run."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    async def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out one request. Raises CommandError, with the remedy."""
        match question.get("do"):
            case "down":
                now = bool(question.get("now"))
                self._supervisor.end(EXIT_KILLED if now else 0)
                if now:
                    self._supervisor.hurry(NOW)
                return {"processes": self._supervisor.states}
            case "states":
                return {"processes": self._supervisor.states, "grace_s": self._supervisor.grace_s}
            case "restart":
                names = named(str(question.get("service", "")), self._supervisor.states)
                grace_s = question.get("grace_s")
                grace_s = None if grace_s is None else max(0.0, float(grace_s))
                return {"said": [await self._supervisor.restart(name, grace_s) for name in names]}
        raise CommandError("this `swarm up` runs another version of the software: end it and start it again")


def named(service: str, states: Mapping[str, str]) -> list[str]:
    """The processes that `service` names: one by its name, or every node's process of that role.

    Raises:
        CommandError: there is no such process or role, or none is named.
    """
    if service in states:
        return [service]
    choice = f"name one of {', '.join(states)}, or a role ({', '.join(ROLES)}) for every node's"
    if not service:
        raise CommandError(f"no service is named: {choice}", _WRONG_CALL)
    with_role = [name for name in states if node_of(name) and name.rpartition("-")[2] == service] if service in ROLES else []
    if not with_role:
        meant = did_you_mean(service.replace("_", "-"), [*states, *ROLES])
        raise CommandError(f"no process here is called {service[:80]!r}: {f'{meant} Or ' if meant else ''}{choice}")
    return with_role


# The commands.

Run = Annotated[str, typer.Option(help="Name of the run.  [default: the running one]", show_default=False)]
VarDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder that holds runs/.  [default: var; a named run is found in any]", envvar=VAR_DIR_VARIABLE, show_default=False
    ),
]
_PATIENCE_S = 900.0
"""Longer than any --grace-s that people give."""
_TOLD_EVERY_S = 10.0


def down(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Name of the run.  [default: the running one]", show_default=False)
    ] = "",
    now: Annotated[bool, typer.Option("--now", help="Kill every process, without letting it write its state.")] = False,
    var_dir: VarDir = None,
) -> None:
    """End a run that `swarm up` started on this machine, and wait until it has ended."""
    folder = running_run(run, var_dir)
    processes, began = ask(folder, {"do": "down", "now": now})["processes"], time.monotonic()
    while (waited_s := time.monotonic() - began) < _PATIENCE_S:
        running = ", ".join(f"{name} ({state})" for name, state in processes.items() if state.startswith("process "))
        saving = "" if now else "save its state and " if running.count("(process ") == 1 else "save their state and "
        since = f", for {waited_s:.0f} s" if waited_s > 1 else ""
        note(f"waiting for {running or 'swarm up'} to {saving if running else ''}end{since}")
        if wait_until_over(folder, _TOLD_EVERY_S):
            break
        with suppress(CommandError):  # it ends just now
            processes = ask(folder, {"do": "states"})["processes"]
    else:
        raise CommandError(f"run {folder.name} did not end within {_PATIENCE_S:g} s: `swarm down {folder.name} --now` kills it")
    note(f"run {folder.name} has ended; to continue it: {goes_on(folder)}")


def restart(
    service: Annotated[
        str,
        typer.Argument(
            metavar="SERVICE", help="Such as alpha-trainer or nats; or a role (trainer), for every node's.", show_default=False
        ),
    ] = "",
    run: Run = "",
    now: Annotated[bool, typer.Option("--now", help="Kill it at once, without letting it write its state.")] = False,
    var_dir: VarDir = None,
) -> None:
    """End a service of a running swarm and start it again, even if it was given up, is stopped or
    hangs.
    """
    folder = running_run(run, var_dir)
    told = ask(folder, {"do": "states"})
    allowed_s = 0.0 if now else float(told["grace_s"])
    running = {
        name: state for name in named(service, told["processes"]) if (state := told["processes"][name]).startswith("process ")
    }
    if running and allowed_s:
        each = " each, one after the other" if len(running) > 1 else ""
        note(
            f"waiting for {', '.join(f'{name} ({state})' for name, state in running.items())} to save its state and end, "
            f"at most {allowed_s:g} s{each}; `swarm restart {service} --now{restart_options(folder)}` in another terminal kills it"
        )
    deadline_s = _PATIENCE_S + allowed_s * len(running)
    answer = ask(folder, {"do": "restart", "service": service, "grace_s": allowed_s}, deadline_s)
    for line in answer.get("said", []):
        note(line)
