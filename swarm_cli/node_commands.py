"""`swarm ban`, `swarm unban` and `swarm dlq`: an operator's commands for a running node."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, TypeVar

import typer
from rich.table import Table

from shared.config.verifier_section import ViewConfig
from shared.contracts import subjects
from shared.contracts.codec import decode, encode
from shared.contracts.limits import NODE_LIMITS
from shared.contracts.senders import MAX_BANS, Ban, BanList, SendersReport
from shared.contracts.subjects import BANS_KEY, SENDERS_PREFIX, node_dead_letters_stream
from shared.contracts.wire import MessageError, is_node_name
from shared.dead_letters import DeadLetter, read_letters
from shared.identity.keys import is_public_key
from shared.roles import OPERATOR
from shared.text import visible, visible_json
from shared.transport.base import Conflict, StreamState, TooLarge, Transport
from swarm_cli.chosen_config import ConfigOption, NodeUrlOption, for_node, load_chosen
from swarm_cli.console import cell, indented, say, show_table
from swarm_cli.errors import CommandError
from swarm_cli.observe.node_state import duration
from swarm_cli.target import default_target, on_node_plane

TRIES = 10
MAX_REPORTS = 64
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

ByOption = Annotated[str, typer.Option("--by", help="The node that bans.  [default: node.id]")]


def ban(
    sender: Annotated[
        str, typer.Argument(metavar="SENDER", help="A node's name or public key. If omitted, print bans and the worst senders.")
    ] = "",
    duration: Annotated[str, typer.Option("--for", help="For example 90s, 30m, 1h or 7d.  [default: permanently]")] = "",
    reason: Annotated[str, typer.Option(help="Reason, for the logs.")] = "",
    anew: Annotated[bool, typer.Option("--anew", help="If the list cannot be read, start a new one without its bans.")] = False,
    by: ByOption = "",
    node_url: NodeUrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Shut a sender out, by its name and by the key that owns the name. Running verifiers apply a
    ban within seconds.
    """
    node_config = load_chosen(config, ViewConfig)
    bucket = subjects.node_bucket(by or node_config.node.id)
    if not sender:
        say("\n".join(_on_plane(node_config, node_url, lambda plane: _listing(plane, bucket), acts=False)))
        return
    if not (is_node_name(sender) or is_public_key(sender)):
        raise CommandError(f"{sender[:80]!r} is neither a node's name nor a public key (U...)")
    if sender == (by or node_config.node.id):
        raise CommandError(f"{sender} is this node: name another one, or choose the node that bans with --by")
    now_s = time.time()
    until_s = now_s + seconds(duration) if duration else None
    made = Ban(sender=sender, until=until_s, reason=reason[:500], made_at=now_s)
    _on_plane(node_config, node_url, lambda plane: _change(plane, bucket, lambda bans: _added(bans, made, now_s), anew))


def unban(
    sender: Annotated[str, typer.Argument(metavar="SENDER", help="The name or key given to `swarm ban`.")],
    by: ByOption = "",
    node_url: NodeUrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Admit a banned sender again."""
    node_config = load_chosen(config, ViewConfig)
    bucket = subjects.node_bucket(by or node_config.node.id)
    _on_plane(node_config, node_url, lambda plane: _change(plane, bucket, lambda bans: _removed(bans, sender)))


def seconds(duration: str) -> float:
    """Seconds of `90s`, `30m`, `1h`, `7d`. Raises CommandError for anything else."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)([smhd])", duration)
    if match is None or float(match[1]) == 0:
        raise CommandError(f"--for {duration!r} is not a duration: write it like 90s, 30m, 1h or 7d")
    return float(match[1]) * _UNITS_S[match[2]]


def _added(bans: BanList, made: Ban, now_s: float) -> BanList:
    changed = bans.in_force(now_s).with_ban(made)
    if len(changed.bans) > MAX_BANS:
        raise CommandError(
            f"{MAX_BANS} senders are banned already: use a roster of admitted nodes instead (verifier.trust, `swarm roster`)"
        )
    return changed


def _removed(bans: BanList, sender: str) -> BanList:
    changed = bans.without(sender)
    if len(changed.bans) == len(bans.bans):
        raise CommandError(f"{sender[:80]!r} is not banned: `swarm ban` without a name shows who is")
    return changed


async def _listing(plane: Transport, bucket: str) -> list[str]:
    bans, _ = await _read(plane, bucket)
    now_s = time.time()
    lines = []
    for each in bans.in_force(now_s).bans:
        term = "permanently" if each.until is None else f"for {each.until - now_s:.0f} s more"
        lines.append(f"banned {each.sender} {term}{': ' if each.reason else ''}{each.reason}")
    reports, others = await plane.kv.newest(bucket, MAX_REPORTS, SENDERS_PREFIX)
    for entry in reports:
        try:
            report = decode(entry.value, SendersReport)
        except MessageError:
            continue
        for sender in report.worst:
            refused = ", ".join(f"{reason} {count}" for reason, count in sender.refused.items())
            term = f", quarantined for {sender.quarantined_s:.0f} s" if sender.quarantined_s else ""
            lines.append(
                f"suspicion {sender.suspicion:.2f} {sender.name} {sender.public_key}: {refused}; accepted {sender.accepted}{term} "
                f"({max(0.0, now_s - report.updated_at):.0f} s ago)"
            )
    if others:
        lines.append(f"the reports of more verifiers than {len(reports)} are not shown, the newest first")
    # One line each, even if a reason contains a newline.
    return [visible(line) for line in lines] or ["nobody is banned, and no sender is suspected"]


async def _change(plane: Transport, bucket: str, change: Callable[[BanList], BanList], anew: bool = False) -> None:
    for _ in range(TRIES):
        bans, revision = await _read(plane, bucket, anew)
        try:
            await plane.kv.update(bucket, BANS_KEY, encode(change(bans)), last_revision=revision)
        except Conflict:
            continue
        except TooLarge:
            raise CommandError(
                "the list of bans would be larger than the bucket takes (1 MiB): give shorter reasons, or use a roster of admitted "
                "nodes instead (verifier.trust, `swarm roster`)"
            ) from None
        return
    raise CommandError("other processes kept changing the bans: try again")


async def _read(plane: Transport, bucket: str, anew: bool = False) -> tuple[BanList, int]:
    """The list and its revision. anew: treat a list that cannot be read as empty."""
    entry = await plane.kv.get(bucket, BANS_KEY)
    if entry is None:
        return BanList(), 0
    try:
        return decode(entry.value, BanList), entry.revision
    except MessageError as error:
        if anew:
            return BanList(), entry.revision
        raise CommandError(
            f"the bans in {bucket} cannot be read ({error}); verifiers started since then accept no foreign groups: "
            "use the version that wrote the bans, or start a new list with `swarm ban NAME --anew`"
        ) from None


dlq_app = typer.Typer(name="dlq", help="Show a node's dead letters.", no_args_is_help=True)

NodeOption = Annotated[str, typer.Option("--node", help="The node with the dead letters.  [default: the configuration's node]")]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]

CAUSE_CHARACTERS = 240
"""Longer than any cause that is stored."""
_PARTICULARS = re.compile(r"'[^']*'|\"[^\"]*\"|\d[\d.,]*")
T = TypeVar("T")


@dlq_app.command("list")
def list_letters(
    node: NodeOption = "",
    every: Annotated[bool, typer.Option("--all", help="A line for each letter.")] = False,
    as_json: JsonOption = False,
    node_url: NodeUrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Print the dead letters by cause: how many, the first and the last, and one of them; with
    --all each of them, oldest first.
    """
    node_config = for_node(load_chosen(config, ViewConfig), node)
    name = node_config.node.id

    async def read(plane: Transport) -> tuple[list[DeadLetter], StreamState]:
        letters = await read_letters(plane, name, contents=every or as_json)
        return letters, await plane.stream_state(node_dead_letters_stream(name))

    letters, kept = _on_plane(node_config, node_url, read, acts=False)
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
        say(f"{kept.first_seq - 1:,} older letters are gone: a week old, or dropped from the stream{full}")
    if letters and not every:
        say("--all shows each letter, `swarm dlq show SEQ` one with its texts")


@dlq_app.command()
def show(
    seq: Annotated[int, typer.Argument(metavar="SEQ", min=1, help="Number of the letter, see `swarm dlq list`.")],
    node: NodeOption = "",
    node_url: NodeUrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Print one dead letter: cause, task, and the completions' texts."""
    node_config = for_node(load_chosen(config, ViewConfig), node)
    letters = _on_plane(node_config, node_url, lambda plane: read_letters(plane, node_config.node.id, seq), acts=False)
    if not letters:
        raise CommandError(f"no dead letter {seq}: `swarm dlq list` shows the existing ones")
    (letter,) = letters
    for name, value in letter.as_object().items():
        say(visible(f"{name}: {value}"))
    if letter.group is not None:
        say(f"question: {indented(letter.group.task.text)}")
        for number, completion in enumerate(letter.group.completions):
            say(f"--- completion {number} ({completion.finish_reason}, {completion.token_count} tokens)")
            say("  " + indented(completion.text))


def _on_plane(config: ViewConfig, url: str, work: Callable[[Transport], Awaitable[T]], *, acts: bool = True) -> T:
    return on_node_plane(config, default_target(config, url), OPERATOR, work, acts=acts)


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
