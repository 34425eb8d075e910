"""`swarm dlq list`, `swarm dlq show` and `swarm dlq requeue`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer
from rich.table import Table

from shared.config import NodeConfig
from shared.dead_letters import DeadLetter, read_letters, requeue
from shared.identity.permissions import OPERATOR
from shared.runtime.planes import connect_node_plane
from shared.text import visible, visible_json
from shared.transport.base import Transport
from swarm_cli.chosen_config import ConfigOption, for_node, load_chosen
from swarm_cli.console import cell, indented, say, terminal
from swarm_cli.errors import CommandError
from swarm_cli.looking.target import check_listening, default_target
from swarm_cli.silent_server import naming_silent_server

dlq_app = typer.Typer(name="dlq", help="Show a node's dead letters and requeue them.", no_args_is_help=True)

NodeOption = Annotated[str, typer.Option("--node", help="The node with the dead letters.  [default: the configuration's node]")]
UrlOption = Annotated[
    str, typer.Option("--node-url", help="Server of the node's streams.  [default: the running run's, or nats.node_url]")
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]

CONNECT_TIMEOUT_S = 5.0
CAUSE_CHARACTERS = 240
"""Longer than any cause that is stored."""
T = TypeVar("T")


@dlq_app.command("list")
def list_letters(node: NodeOption = "", as_json: JsonOption = False, node_url: UrlOption = "", config: ConfigOption = None) -> None:
    """Print all dead letters, oldest first."""
    node_config = for_node(load_chosen(config), node)
    letters = _with_plane(node_config, node_url, lambda plane: read_letters(plane, node_config.node.id))
    if as_json:
        typer.echo(visible_json([letter.as_object() for letter in letters], indent=2))
        return
    table = Table("seq", "age", "KiB", "dataset", "draw", "group", "cause", title=f"dead letters of {node_config.node.id}")
    for letter in letters:
        table.add_row(*(cell(text, CAUSE_CHARACTERS) for text in _cells(letter)))
    terminal().print(table)


@dlq_app.command()
def show(
    seq: Annotated[int, typer.Argument(metavar="SEQ", min=1, help="Number of the letter, see `swarm dlq list`.")],
    node: NodeOption = "",
    node_url: UrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Print one dead letter: cause, task, and the completions' texts."""
    node_config = for_node(load_chosen(config), node)
    (letter,) = _found(_with_plane(node_config, node_url, lambda plane: read_letters(plane, node_config.node.id, [seq])), [seq])
    for name, value in letter.as_object().items():
        say(visible(f"{name}: {value}"))
    if letter.group is not None:
        say(f"question: {indented(letter.group.task.question)}")
        for number, completion in enumerate(letter.group.completions):
            say(f"--- completion {number} ({completion.finish_reason}, {completion.token_count} tokens)")
            say("  " + indented(completion.text))


@dlq_app.command("requeue")
def requeue_letters(
    seqs: Annotated[list[int] | None, typer.Argument(metavar="SEQ", help="Numbers of letters.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All readable letters.")] = False,
    node: NodeOption = "",
    node_url: UrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Put dead letters back into the queue, so that they are scored and shared. This node trains
    only on those that were unreadable when they were given up: the generator has already replaced
    the others, and a group counts once."""
    if bool(seqs) == every:
        raise CommandError("name the letters to requeue: numbers from `swarm dlq list`, or --all")
    node_config = for_node(load_chosen(config), node)

    async def put_back(plane: Transport) -> list[DeadLetter]:
        letters = await read_letters(plane, node_config.node.id, seqs or [])
        if seqs:
            _found(letters, seqs)
            unreadable = [letter for letter in letters if letter.group is None]
            if unreadable:
                raise CommandError(f"letter {unreadable[0].seq} cannot be scored ({unreadable[0].problem}): nothing was requeued")
        readable = [letter for letter in letters if letter.group is not None]
        for letter in readable:
            await requeue(plane, node_config.node.id, letter)
        return readable

    done = _with_plane(node_config, node_url, put_back, acts=True)
    typer.echo(f"requeued {len(done)}: {', '.join(str(letter.seq) for letter in done)}" if done else "requeued 0")


def _with_plane(config: NodeConfig, url: str, work: Callable[[Transport], Awaitable[T]], *, acts: bool = False) -> T:
    target = default_target(config, url)

    async def run() -> T:
        plane = await connect_node_plane(config, OPERATOR, timeout_s=CONNECT_TIMEOUT_S, url=target.node_url)
        try:
            return await work(plane)
        finally:
            await plane.close()

    with naming_silent_server(config.node.var_dir, target.node_url):
        check_listening(config.node.var_dir, target, acts=acts)
        return asyncio.run(run())


def _found(letters: list[DeadLetter], seqs: list[int]) -> list[DeadLetter]:
    missing = sorted(set(seqs) - {letter.seq for letter in letters})
    if missing:
        raise CommandError(f"no dead letter {', '.join(map(str, missing))}: `swarm dlq list` shows the existing ones")
    return letters


def _cells(letter: DeadLetter) -> list[str]:
    age_s = time.time() - letter.buried_at
    age = f"{age_s:.0f} s" if age_s < 600 else f"{age_s / 3600:.1f} h"
    dataset = letter.group.task.ref.dataset if letter.group else "(unreadable)"
    draw = str(letter.group.draw) if letter.group else "–"
    return [str(letter.seq), age, f"{letter.size_bytes / 1024:.1f}", dataset, draw, letter.group_id[:12], letter.cause]
