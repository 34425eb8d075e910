"""`swarm dlq list`, `swarm dlq show` and `swarm dlq requeue`."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, TypeVar

import typer
from rich.table import Table

from shared.config import NodeConfig
from shared.contracts.limits import NODE_LIMITS
from shared.contracts.subjects import node_dead_letters_stream
from shared.dead_letters import DeadLetter, read_letters, requeue
from shared.identity.permissions import OPERATOR
from shared.runtime.planes import connect_node_plane
from shared.text import visible, visible_json
from shared.transport.base import StreamState, Transport
from swarm_cli.chosen_config import ConfigOption, for_node, load_chosen
from swarm_cli.console import cell, indented, say, show_table
from swarm_cli.errors import CommandError
from swarm_cli.observe.node_state import duration
from swarm_cli.server_diagnosis import naming_silent_server
from swarm_cli.target import check_listening, default_target

dlq_app = typer.Typer(name="dlq", help="Show a node's dead letters and requeue them.", no_args_is_help=True)

NodeOption = Annotated[str, typer.Option("--node", help="The node with the dead letters.  [default: the configuration's node]")]
UrlOption = Annotated[
    str, typer.Option("--node-url", help="Server of the node's streams.  [default: the running run's, or nats.node_url]")
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]

CONNECT_TIMEOUT_S = 5.0
CAUSE_CHARACTERS = 240
"""Longer than any cause that is stored."""
_PARTICULARS = re.compile(r"'[^']*'|\"[^\"]*\"|\d[\d.,]*")
T = TypeVar("T")


@dlq_app.command("list")
def list_letters(
    node: NodeOption = "",
    every: Annotated[bool, typer.Option("--all", help="A line for each letter.")] = False,
    as_json: JsonOption = False,
    node_url: UrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Print the dead letters by cause: how many, the first and the last, and one of them; with
    --all each of them, oldest first.
    """
    node_config = for_node(load_chosen(config), node)
    name = node_config.node.id

    async def read(plane: Transport) -> tuple[list[DeadLetter], StreamState]:
        letters = await read_letters(plane, name, contents=every or as_json)
        return letters, await plane.stream_state(node_dead_letters_stream(name))

    letters, kept = _with_plane(node_config, node_url, read)
    if as_json:
        typer.echo(visible_json([letter.as_object() for letter in letters], indent=2))
        return
    each_letter = ("seq", "age", "KiB", "dataset", "draw", "group", "cause")
    columns = each_letter if every else ("letters", "first", "last", "e.g. seq", "cause")
    table = Table(*columns, title=f"dead letters of {name}")
    for row in map(_cells, letters) if every else _by_cause(letters):
        table.add_row(*(cell(text, CAUSE_CHARACTERS) for text in row))
    show_table(table)
    if kept.first_seq > 1 and letters:
        most = NODE_LIMITS.dead_letters_max_msgs
        full = f", which is full with {most:,}" if len(letters) >= most else ""
        say(f"{kept.first_seq - 1:,} older letters are gone: requeued, a week old, or dropped from the stream{full}")
    if letters and not every:
        say("--all shows each letter, `swarm dlq show SEQ` one with its texts")


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


def _by_cause(letters: Sequence[DeadLetter]) -> list[list[str]]:
    """The cells of each cause, the most frequent first. Causes that differ only in numbers and
    quoted parts are one: the newest letter's words stand for all.
    """
    causes: dict[str, list[DeadLetter]] = {}
    for letter in letters:
        causes.setdefault(_PARTICULARS.sub("…", letter.cause), []).append(letter)
    of_cause = sorted(causes.values(), key=len, reverse=True)
    return [[f"{len(each):,}", _age(each[0]), _age(each[-1]), str(each[-1].seq), each[-1].cause] for each in of_cause]


def _age(letter: DeadLetter) -> str:
    return f"{duration(time.time() - letter.buried_at)} ago"


def _cells(letter: DeadLetter) -> list[str]:
    dataset = letter.group.task.ref.dataset if letter.group else "(unreadable)"
    draw = str(letter.group.draw) if letter.group else "–"
    return [str(letter.seq), _age(letter), f"{letter.size_bytes / 1024:.1f}", dataset, draw, letter.group_id[:12], letter.cause]
