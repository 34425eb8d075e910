"""`swarm top`: the nodes of a swarm on one screen, as it changes."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import time
import tty
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.live import Live

from shared.cancelling import cancel_and_wait
from shared.config import NodeConfig
from shared.transport.base import NotConnected
from swarm_cli.chosen_config import ConfigOption, NodeUrlOption, SwarmUrlOption, load_chosen
from swarm_cli.console import note, terminal
from swarm_cli.errors import CommandError
from swarm_cli.observe.evaluation_log import EvaluationLog, configured_swarm, roster_of
from swarm_cli.observe.node_state import NodeView
from swarm_cli.observe.remedies import advice, folder_here, server_trouble
from swarm_cli.observe.run_files import Evaluation, read_evaluations
from swarm_cli.observe.snapshot import NO_STATUS, NOBODY, START, NoSuchNode, SwarmSnapshot, ended_run, take_snapshot
from swarm_cli.observe.status import show
from swarm_cli.observe.top_model import TopHistory, TopModel, outdated
from swarm_cli.observe.top_view import screen
from swarm_cli.runs import afterwards
from swarm_cli.server_diagnosis import silent_server
from swarm_cli.target import Following, LookRunOption, check_listening, ended_here, looking_at, run_here

CONNECT_S = 3.0
LOOK_S = 15.0
"""If a look takes longer, the server is taken to be gone."""
T = TypeVar("T")
QUIT_KEYS = (b"q", b"Q", b"\x04", b"\x1b")


def top(
    nodes: Annotated[list[str] | None, typer.Argument(metavar="NODE", help="Nodes to show.  [default: all found]")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and end. Implied if the output is not a terminal.")] = False,
    every_s: Annotated[float, typer.Option(min=0.2, help="Seconds between looks.")] = 2.0,
    run: LookRunOption = "",
    node_url: NodeUrlOption = "",
    swarm_url: SwarmUrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Show live which nodes learn, which share, and what waits for what; q ends it. When the run
    ends and another one starts, the view switches to it, unless a run or a server was named.
    """
    node_config = load_chosen(config)
    with looking_at(node_config, run, node_url, swarm_url) as target:
        if target.ended is not None:  # nothing of it changes any more
            note(target.ended.sentence(target.run, time.time()))
            show(ended_run(node_config.node.var_dir / "runs" / target.run, target.ended, nodes), terminal())
            return
        fixed = bool(run or node_url or swarm_url)
        view = Top(node_config, nodes or [], Following(node_config, target, fixed=fixed))
        console = terminal(fit=True)
        if once or not (console.is_terminal and sys.stdin.isatty()):
            asyncio.run(view.once(console))
        else:
            asyncio.run(view.live(console, every_s))


class Top:
    """One view: what it looks at, and what it remembers between looks."""

    def __init__(self, config: NodeConfig, nodes: Sequence[str], following: Following) -> None:
        self._config = config
        self._nodes = nodes
        self._following = following
        self._forget()

    def _forget(self) -> None:
        """Forget everything, because another run is looked at now."""
        self._reports = EvaluationLog(roster=roster_of(self._config), swarm=configured_swarm(self._config))
        self._history = TopHistory()
        self._heard_at: float | None = None
        self._views: Sequence[NodeView] = ()
        self._server = ""

    async def once(self, console: Console) -> None:
        """Print one look."""
        check_listening(self._config.node.var_dir, self._following.target)
        model = await self.look()
        notice = self._server and f" {self._server}"
        words = {"headline": self._headline, "notice": notice, "closing": self._closing}
        console.print(screen(model, width=console.width, height=None, calm=False, **words))
        if not any(node.heard or (self._nodes and node.elsewhere) for node in model.nodes):
            raise CommandError(f"{NO_STATUS if model.nodes else NOBODY}: {START}")

    async def live(self, console: Console, every_s: float) -> None:
        """Look every `every_s` until a key ends it. If the server does not answer, keep trying."""
        quit_pressed = asyncio.Event()
        model = TopModel(time.time(), (), (), None)
        with _keys(quit_pressed), Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            while not quit_pressed.is_set():
                notice = ""
                if self._following.moved():
                    self._forget()
                    model = TopModel(time.time(), (), (), None)
                try:
                    model = await _unless(quit_pressed, self.look()) or model
                    found = f" {self._server}" if self._server else ""
                    notice = found or ("" if model.nodes else f" {NOBODY} yet: {START} (--node-url)")
                except NoSuchNode as error:
                    if error.there and self._heard_at is None:
                        raise
                    notice = f" {error}"
                except NotConnected as error:
                    notice = await _unless(quit_pressed, asyncio.to_thread(self._away, error)) or ""
                    if self._heard_at is not None:
                        model = outdated(model, time.time() - self._heard_at)
                words = {"headline": f"{self._headline}  q ends", "notice": notice, "closing": self._closing}
                calm = (end := self._following.end) is not None and end[1].in_order
                shown = screen(model, width=console.width, height=console.height, calm=calm, **words)
                live.update(shown, refresh=True)
                await _unless(quit_pressed, asyncio.sleep(every_s))

    async def look(self) -> TopModel:
        """One look.

        Raises:
            NotConnected: the node plane does not answer.
            AccessDenied: it does not admit this user.
        """
        target = self._following.target
        self._views, self._server = (), ""
        try:
            async with asyncio.timeout(LOOK_S):
                snapshot = await take_snapshot(
                    self._config,
                    target.node_url,
                    target.swarm_url,
                    self._nodes,
                    timeout_s=CONNECT_S,
                    evaluations=self._reports,
                    run=run_here(self._config.node.var_dir, target),
                    swarm_id=target.swarm_id,
                )
        except TimeoutError:
            raise NotConnected(f"{target.node_url} took longer than {LOOK_S:.0f} s to answer") from None
        self._heard_at = time.time()
        self._views = snapshot.here
        self._server = await asyncio.to_thread(server_trouble, snapshot.here, snapshot.at, self._config.node.var_dir, target)
        reports = self._reports.reports(snapshot.swarm)
        return self._history.model(snapshot, reports, self._in_files(snapshot), self._reports.unsigned(snapshot.swarm))

    def _in_files(self, snapshot: SwarmSnapshot) -> Mapping[str, Sequence[Evaluation]]:
        runs, run = self._config.node.var_dir / "runs", self._following.target.run or self._config.node.run
        return {node.node: read_evaluations(runs / (node.view.run or run) / node.node) for node in snapshot.nodes}

    @property
    def _headline(self) -> str:
        target = self._following.target
        return f"run {target.run}  {target.node_url}" if target.run else target.node_url

    @property
    def _closing(self) -> str:
        """What to do about processes that do not answer, if they are this machine's."""
        if not self._views or self._server:
            return ""
        said = advice(self._views, time.time(), folder_here(self._config.node.var_dir, self._following.target), 1)
        return f"{said[0]}; {len(said) - 1} more: swarm status" if len(said) > 1 else "".join(said)

    def _away(self, error: Exception) -> str:
        """Why no server answers, as far as it is known here."""
        instead, node_url = self._following.instead, self._following.target.node_url
        var_dir = self._config.node.var_dir
        if silent := silent_server(var_dir, node_url):
            seen = "" if self._heard_at is None else "; below is what was seen last"
            return f" {silent}{seen}. Trying again"
        if self._heard_at is None:
            gone = ended_here(var_dir, self._following.target)
            ended = f"{gone[1].sentence(gone[0].name, time.time())}; {afterwards(gone[0])}" if gone else ""
            why = instead or ended or error
            return f" no server answers at {node_url} yet (--node-url names another); trying again ({why})"
        if (end := self._following.end) is not None:
            return f" {end[1].sentence(end[0], time.time())}; below is what was seen last. {instead or 'Waiting for the next run'}"
        silent_s = time.time() - self._heard_at
        return f" the server has not answered for {silent_s:.0f} s; below is what was seen last. Trying again ({instead or error})"


async def _unless(event: asyncio.Event, work: Awaitable[T]) -> T | None:
    """The result of `work`; None if `event` is set first."""
    task, stop = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await cancel_and_wait(task, stop)


@contextmanager
def _keys(quit_pressed: asyncio.Event) -> Iterator[None]:
    """Read single keys from the terminal, and restore its mode afterwards."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    loop = asyncio.get_running_loop()

    def pressed() -> None:
        keys = os.read(terminal, 64)  # an arrow key is several bytes at once, the first of them escape
        if keys[:1] in QUIT_KEYS and len(keys) == 1 or not keys:
            quit_pressed.set()

    tty.setcbreak(terminal)
    loop.add_reader(terminal, pressed)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
