"""Commands that a shell types, run by forking (see `tests.forked`): a program on the PATH that
starts in hundredths of a second, where each would import for half a second or, with torch, four.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import socket
import sys
import time
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NoReturn

from shared import registry
from tests import forked

CLIENT = Path(__file__).with_name("forked_client.py")
_START_S = 120.0


class Commands:
    """A server that runs `python -m module arguments...` for programs that stand for it."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "commands"
        self._process: ForkServerProcess = forked.start(_serve, str(self._socket))
        deadline = time.monotonic() + _START_S
        while not self._socket.exists():
            assert self._process.is_alive() and time.monotonic() < deadline, "the server of commands did not start"
            time.sleep(0.01)

    def program(self, file: Path, module: str) -> None:
        """Write a program that runs `module`."""
        file.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {CLIENT} {self._socket} {module} "$@"\n')
        file.chmod(0o755)

    def python(self, file: Path, package: str) -> None:
        """Write a `python` that has a package's modules run, and is the real one for all others."""
        forked_ones = f'{sys.executable} -I -S {CLIENT} {self._socket} "$2"'
        file.write_text(f'#!/bin/sh\ncase "$1 $2" in "-m {package}."*) exec {forked_ones};; esac\nexec {sys.executable} "$@"\n')
        file.chmod(0o755)

    def close(self) -> None:
        """End the server; commands that still run go on."""
        self._process.kill()
        self._process.join(30)


def _serve(where: str) -> None:
    # A daemon may not have children, but a command may.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(f"{where}.new")
    listening.listen(16)
    os.rename(f"{where}.new", where)
    while True:
        client, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            _stand_by(client)
        client.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _stand_by(client: socket.socket) -> NoReturn:
    """Run what the client asks for in a process of its own, and tell its number and its end."""
    head, streams, _, _ = socket.recv_fds(client, 4, 3)
    asked = json.loads(client.makefile("rb").read(int.from_bytes(head, "big")))
    pid = os.fork()
    if pid == 0:
        client.close()
        _run(streams, *asked)
    for stream in streams:
        os.close(stream)
    with suppress(OSError):
        client.sendall(f"{pid}\n".encode())
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):
        client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _run(streams: list[int], module: str, arguments: list[str], environment: dict[str, str], folder: str) -> NoReturn:
    code: object = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        sys.stdin = os.fdopen(0)
        os.environ.clear()
        os.environ.update({**environment, **forked.SERVER})
        os.chdir(folder)
        _look_in(environment.get("PYTHONPATH", ""))
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _look_in(python_path: str) -> None:
    """Find packages where a Python that starts with this PYTHONPATH would."""
    added = [folder for folder in python_path.split(os.pathsep) if folder and folder not in sys.path]
    if added:
        sys.path[1:1] = added
        for each in vars(registry).values():
            if isinstance(each, registry.Registry):
                each.look_again()
