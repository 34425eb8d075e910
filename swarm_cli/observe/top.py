"""`swarm top`: the nodes of a swarm on one screen, as it changes: three lines a node, and one where
the screen is too low for that. What is wrong comes first.
"""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import time
import tty
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, TypeVar

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from shared.cancelling import cancel_and_wait
from shared.config.verifier_section import ViewConfig
from shared.text import visible
from shared.transport.base import NotConnected
from swarm_cli.chosen_config import ConfigOption, NodeUrlOption, SwarmUrlOption, load_chosen
from swarm_cli.console import count, note, terminal
from swarm_cli.observe.evaluation_log import EvaluationLog, configured_swarm, roster_of
from swarm_cli.observe.node_lines import elsewhere_table, node_lines
from swarm_cli.observe.node_state import NodeState
from swarm_cli.observe.remedies import advice, folder_here, server_trouble
from swarm_cli.observe.snapshot import NOBODY, START, NoSuchNode, SwarmState, take_snapshot
from swarm_cli.observe.status import refuse_nothing_seen, show, swarm_trouble
from swarm_cli.observe.step_rate import StepRates
from swarm_cli.runs import RunGone
from swarm_cli.target import LookRunOption, Target, check_listening, looking_at

CONNECT_S = 3.0
T = TypeVar("T")
QUIT_KEYS = (b"q", b"Q", b"\x04", b"\x1b")
_FIRST = {"bad": 0, "warn": 1, "good": 2, "rest": 3}


def top(
    nodes: Annotated[list[str] | None, typer.Argument(metavar="NODE", help="Nodes to show.  [default: all found]")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and end. Implied if the output is not a terminal.")] = False,
    every_s: Annotated[float, typer.Option(min=0.2, help="Seconds between looks.")] = 2.0,
    run: LookRunOption = "",
    node_url: NodeUrlOption = "",
    swarm_url: SwarmUrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Show live which nodes learn, which share, and what waits for what; q ends it. It also ends
    with the run.
    """
    node_config = load_chosen(config, ViewConfig)
    with looking_at(node_config, run, node_url, swarm_url) as target:
        if target.ended is None:
            check_listening(node_config.node.var_dir, target)
        view = Top(node_config, nodes or [], target)
        console = terminal(fit=True)
        if target.ended is not None or once or not (console.is_terminal and sys.stdin.isatty()):
            asyncio.run(view.once(terminal()))
        else:
            asyncio.run(view.live(console, every_s))


def screen(
    swarm: SwarmState,
    *,
    height: int,
    headline: str,
    width: int = 80,
    notice: str = "",
    closing: str = "",
    age_s: float = 0.0,
) -> RenderableType:
    """The whole screen. height: in lines. notice: what is wrong with the view itself. closing: a
    last sentence; of a screen `width` columns wide, both take as many lines as they need. age_s:
    how old the values are, if the server has not answered since.
    """
    clock = time.strftime("%H:%M:%S", time.localtime(swarm.at))
    parts: list[RenderableType] = [
        Text.assemble(
            (" swarm top ", "reverse bold"), f"  {count(len(swarm.nodes), 'node')}  {clock}  ", (visible(headline), "dim")
        )
    ]
    if notice:
        parts.append(Text(visible(notice), style="bold red"))
    here = sorted(swarm.here, key=lambda node: (_FIRST[node.health], node.node))
    elsewhere = [node for node in swarm.nodes if node.elsewhere]
    told = sum(-(-len(text) // width) for text in (visible(notice), visible(closing)))
    rest = 2 + told + (len(elsewhere) + 1 if elsewhere else 0)
    lines = _lines(here, max(1, height - rest), fresh=age_s <= 0)
    for line in (parts[0], *lines):
        if isinstance(line, Text):
            line.no_wrap, line.overflow = True, "ellipsis"
    parts += lines
    if elsewhere:
        parts.append(elsewhere_table(elsewhere, swarm.known))
    parts += [] if swarm.alone else [_swarm_line(swarm)]
    if closing:
        parts.append(Text(visible(closing), style="bold"))
    return Group(*parts)


def _lines(nodes: Sequence[NodeState], most: int, *, fresh: bool) -> list[Text]:
    """Three lines a node; one where three do not fit, and of too many nodes the last are only
    counted.
    """
    each = [node_lines(node, fresh=fresh) for node in nodes]
    if sum(map(len, each)) <= most:
        return [line for lines in each for line in lines]
    short = [lines[0].append("  ").append(lines[-1]) if len(lines) > 1 else lines[0] for lines in each]
    left = len(short) - most + 1
    return (
        short
        if left <= 1
        else [*short[: most - 1], Text(f"{left:,} more nodes, no worse than these: `swarm top NODE`", style="yellow")]
    )


def _swarm_line(swarm: SwarmState) -> Text:
    if swarm.swarm_reachable is None:
        return Text("no swarm plane: these nodes train alone", style="dim")
    if words := swarm_trouble(swarm):
        return Text(words, style="dim" if swarm.swarm_denied else "bold yellow")
    fills = "  ".join(f"{fill.stream.lower()} {fill.state.messages:,}" for fill in swarm.swarm_streams)
    text = Text(f"shared streams  {fills}", style="dim")
    if swarm.left_out:
        text.append(f"  {swarm.left_out:,} more nodes: `swarm top NODE`", style="yellow")
    if swarm.unreadable:
        text.append(f"  {swarm.unreadable:,} unreadable entries", style="yellow")
    return text


class Top:
    """One view: what it looks at, and what it remembers between looks."""

    def __init__(self, config: ViewConfig, nodes: Sequence[str], target: Target) -> None:
        self._config = config
        self._nodes = nodes
        self._target = target
        self._reports = EvaluationLog(roster=roster_of(config), swarm=configured_swarm(config))
        self._rates = StepRates()
        self._heard_at: float | None = None
        self._seen = SwarmState(time.time(), ())
        self._server = ""

    async def once(self, console: Console) -> None:
        """Print one look, as `swarm status` does; of a run that has ended its records."""
        if self._target.ended is not None:
            note(self._target.ended.sentence(self._target.run, time.time()))
        seen = await self.look()
        show(seen, console, folder_here(self._config.node.var_dir, self._target), self._server)
        refuse_nothing_seen(seen, named=bool(self._nodes), told=bool(self._server))

    async def live(self, console: Console, every_s: float) -> None:
        """Look every `every_s` until a key ends it. If the server does not answer any more, keep
        trying.

        Raises:
            NotConnected: it does not answer at the first look.
            CommandError: the run has ended, and its server with it.
        """
        quit_pressed = asyncio.Event()
        with _keys(quit_pressed), Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            while not quit_pressed.is_set():
                notice, age_s = "", 0.0
                try:
                    await _unless(quit_pressed, self.look())
                    notice = self._server or ("" if self._seen.nodes else f"{NOBODY} yet: {START} (--node-url)")
                except NoSuchNode as error:
                    if error.there and self._heard_at is None:
                        raise
                    notice = str(error)
                except RunGone as gone:
                    raise gone.ending("swarm top") from None
                except NotConnected as error:
                    if self._heard_at is None:
                        raise
                    age_s = time.time() - self._heard_at
                    notice = f"the server has not answered for {age_s:.0f} s ({error}); below is what was seen last. Trying again"
                words = {"headline": f"{self._headline}  q ends", "notice": notice, "closing": self._closing}
                live.update(screen(self._seen, height=console.height, width=console.width, age_s=age_s, **words), refresh=True)
                await _unless(quit_pressed, asyncio.sleep(every_s))

    async def look(self) -> SwarmState:
        """One look.

        Raises:
            NotConnected: the node plane does not answer.
            AccessDenied: it does not admit this user.
        """
        seen = await take_snapshot(self._config, self._target, self._nodes, timeout_s=CONNECT_S, evaluations=self._reports)
        self._heard_at = time.time()
        self._server = await asyncio.to_thread(server_trouble, seen.here, self._config.node.var_dir, self._target)
        self._seen = replace(seen, nodes=tuple(map(self._rates.rated, seen.nodes)))
        return self._seen

    @property
    def _headline(self) -> str:
        return f"run {self._target.run}  {self._target.node_url}" if self._target.run else self._target.node_url

    @property
    def _closing(self) -> str:
        """The remedy for processes that do not answer, if they are this machine's."""
        if self._server:
            return ""
        said = advice(self._seen.here, folder_here(self._config.node.var_dir, self._target), 1)
        return f"{said[0]}; {len(said) - 1} more: swarm status" if len(said) > 1 else "".join(said)


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
