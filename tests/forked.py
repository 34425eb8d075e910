"""Starts processes in milliseconds, by forking a server that has imported torch, transformers and
the services. These imports cost each process four to six seconds of a core, and most tests of
services are not about them. Tests of `swarm up` start processes as users do.
"""

from __future__ import annotations

import copyreg
import ctypes
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from msgspec import UNSET, UnsetType

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["tests.preloaded"])
CLONE_NEWNET = 0x40000000
SERVER = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
"""Environment variables that have no effect once a process is forked."""
ADDRESS = "TESTS_FORKSERVER"
"""Environment variable with the address of a server that all workers of a suite share."""
_server: Any = multiprocessing.forkserver._forkserver


def _unset() -> UnsetType:
    return UNSET


# It names no module, for which pickle asks every module that is imported; of transformers that
# imports what needs packages that are not installed.
copyreg.pickle(UnsetType, lambda _: (_unset, ()))  # type: ignore[arg-type,return-value]


class Forked:
    """`python -m module arguments...` in its own process, with the part of `subprocess.Popen` that
    tests of services use.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        cwd: Path,
        log: Path,
        errors: Path | None = None,
        network: str = "",
    ) -> None:
        """environment: the complete environment. log, errors: files to which standard output and
        standard error are appended; `errors` is `log` by default. network: namespace to run in, as
        `ip netns exec` does.
        """
        wrong = [name for name, value in SERVER.items() if environment.get(name, value) != value]
        assert not wrong, f"a forked process cannot have its own {wrong}: start a real one"
        self._process = start(
            _run_module, module, list(arguments), dict(environment), str(cwd), str(log), str(errors or log), network
        )

    @property
    def pid(self) -> int:
        """The process id, also after the process has ended."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """As in `subprocess.Popen`, but always up to date."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code, or None while it runs; the negative number of the signal that ended it."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """The exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; does nothing if the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def run(
    module: str, arguments: Sequence[str], *, environment: Mapping[str, str], cwd: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run` of `python -m module arguments...` with captured output.

    Raises:
        subprocess.TimeoutExpired: it still ran after `timeout` seconds, and was killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = Forked(module, arguments, environment={**environment, **SERVER}, cwd=cwd, log=out, errors=err)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess([module, *arguments], code, out.read_text(), err.read_text())


def serve_workers() -> None:
    """Start the server now, for the workers that this process is about to start."""
    _ensure_running()
    os.environ[ADDRESS] = _server._forkserver_address


def start(target: Any, *arguments: Any) -> ForkServerProcess:
    """Run `target(*arguments)` in a process forked from the server, which the first call starts
    unless the workers share one.
    """
    shared = os.environ.get(ADDRESS)
    if shared is None:
        _ensure_running()
    elif _server._forkserver_address is None:
        # It ends with the process that started it, for which this one's end of its pipe is unused.
        _server._forkserver_address, _server._forkserver_alive_fd = shared, os.open(os.devnull, os.O_RDONLY)
        _server.ensure_running = multiprocessing.resource_tracker.ensure_running
    child = forks.Process(target=target, args=arguments, daemon=True)
    child.start()
    return child


def _ensure_running() -> None:
    before = {name: os.environ.get(name) for name in SERVER}
    os.environ.update(SERVER)
    try:
        _server.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _run_module(
    module: str, arguments: list[str], environment: dict[str, str], cwd: str, log: str, errors: str, network: str
) -> None:
    """Do what `python -m` does, in a process that has already imported the modules."""
    # A daemon process may not have children, but a service may. The flag is needed only so that the
    # test's process ends this one.
    this: BaseProcess = multiprocessing.current_process()
    this._config["daemon"] = False  # type: ignore[attr-defined]
    for stream, file in ((1, log), (2, errors)):
        output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, stream)
        os.close(output)
    if network:
        _enter(network)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    if constants := environment.get("TESTS_CONSTANTS"):
        from tests.constants import apply_variable

        apply_variable(constants)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _enter(network: str) -> None:
    namespace = os.open(f"/run/netns/{network}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter the network {network}")
    os.close(namespace)
