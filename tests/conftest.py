"""Fixtures and hooks that all tests share: real NATS servers, and coroutine functions as tests."""

from __future__ import annotations

import functools
import gc
import inspect
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import typer.testing

from tests import forked
from tests.deadlines import ASYNC_TEST_TIMEOUT_S, MISSING, allow_for_long_deadlines, run_coroutine_test
from tests.long_forms import FULL
from tests.nats_server import NatsServer, close_planes, end_servers
from tests.schedule import dearest_first, piece
from tests.scorer_processes import scorers_of_this_process

# The same examples in every run, so that a failure comes from the change;
# HYPOTHESIS_PROFILE=explore draws new ones. No deadline, because on a busy machine an example may
# take any time.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


WHOLE_SUITE = 4
"""With as many workers as this, one server forks for all of them, and is started before them."""

# Making the program from its functions takes a tenth of a second, and a thousand tests call it.
typer.testing._get_command = functools.cache(typer.testing._get_command)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Register pytest-timeout's settings if it is not installed, to avoid a warning for each."""
    if not pluginmanager.hasplugin("timeout"):
        for name in ("timeout", "timeout_method", "session_timeout"):
            parser.addini(name, "without effect: pytest-timeout is not installed")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        config.issue_config_time_warning(pytest.PytestConfigWarning(MISSING), stacklevel=2)
    # A suite started with nohup, or in the background of a script, ignores these, and so would each
    # process that a test starts and then ends with them.
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, usual)
    if not hasattr(config, "workerinput") and (config.getoption("numprocesses", None) or 0) >= WHOLE_SUITE:
        forked.serve_workers()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Do without garbage collection while all files are imported: a third of the time went into
    looking at objects that stay to the end. Later collections pass over them too.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    allow_for_long_deadlines(items, float(config.getini("timeout")))
    if not FULL:
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="has a short form, and runs itself when asked for: make test-full"))
    if hasattr(config, "workerinput"):
        items[:] = dearest_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `--dist loadfile`: start files in the order of `tests.schedule`."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class DearestFirst(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return piece(nodeid)

    config.option.loadscopereorder = False
    return DearestFirst(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run each `async def` test in its own event loop, with a deadline (see `tests.deadlines`). A
    fixture that gives a coroutine, such as `own_plane()`, gives the test what it returns.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    marker = pyfuncitem.get_closest_marker("deadline")
    timeout_s = ASYNC_TEST_TIMEOUT_S if marker is None else float(marker.args[0])

    async def test() -> None:
        try:
            given = {name: await value if inspect.iscoroutine(value) else value for name, value in arguments.items()}
            await pyfuncitem.obj(**given)
        finally:
            await close_planes()

    run_coroutine_test(test, timeout_s)
    return True


@pytest.fixture(autouse=True)
def no_scorer_outlives_its_test() -> Iterator[None]:
    """Fail the test that leaves a scorer process behind, and not a later test that counts
    processes.
    """
    before = scorers_of_this_process()
    yield
    left = scorers_of_this_process() - before
    assert not left, f"scorer processes were left: {sorted(left)}"


@pytest.fixture(autouse=True)
def servers_end_with_their_test() -> Iterator[None]:
    yield
    end_servers()


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plots in an experiment's report: half a second that tests of its words need not spend."""
    monkeypatch.setattr("lab.plots.draw_plots", lambda name, runs, out: [])


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One server for the whole run. Each test uses its own stream and node names."""
    server = NatsServer(tmp_path_factory.mktemp("nats")).start()
    yield server.url
    server.stop()


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[Callable[..., NatsServer]]:
    """Starts servers that a test may kill: `nats_server(config="max_payload: 8MB")` runs until the
    test ends.
    """
    servers: list[NatsServer] = []

    def make(**settings: Any) -> NatsServer:
        server = NatsServer(tmp_path / f"nats-{len(servers)}", **settings).start()
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.kill()
