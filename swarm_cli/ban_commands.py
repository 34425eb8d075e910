"""`swarm ban` and `swarm unban`: keep a sender out of a running node."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.codec import decode, encode
from shared.contracts.senders import BANS_KEY, MAX_BANS, SENDERS_PREFIX, Ban, BanList, SendersReport
from shared.contracts.wire import MessageError, is_node_name
from shared.identity.keys import is_public_key
from shared.identity.permissions import OPERATOR
from shared.runtime.planes import connect_node_plane
from shared.text import visible
from shared.transport.base import Conflict, Transport
from swarm_cli.chosen_config import ConfigOption, load_chosen
from swarm_cli.console import say
from swarm_cli.errors import CommandError
from swarm_cli.server_diagnosis import naming_silent_server
from swarm_cli.target import check_listening, default_target

T = TypeVar("T")
TIMEOUT_S = 5.0
TRIES = 10
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

ByOption = Annotated[str, typer.Option("--by", help="The node that bans.  [default: node.id]")]
NodeUrlOption = Annotated[str, typer.Option(help="Server of the node's streams.  [default: the running run's, or nats.node_url]")]


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
    node_config = load_chosen(config)
    bucket = subjects.node_bucket(by or node_config.node.id)
    if not sender:
        say("\n".join(asyncio.run(_with(node_config, node_url, lambda plane: _listing(plane, bucket), acts=False))))
        return
    if not (is_node_name(sender) or is_public_key(sender)):
        raise CommandError(f"{sender[:80]!r} is neither a node's name nor a public key (U...)")
    if sender == (by or node_config.node.id):
        raise CommandError(f"{sender} is this node: name another one, or choose the node that bans with --by")
    now_s = time.time()
    until_s = now_s + seconds(duration) if duration else None
    made = Ban(sender=sender, until=until_s, reason=reason[:500], made_at=now_s)
    asyncio.run(_with(node_config, node_url, lambda plane: _change(plane, bucket, lambda bans: _added(bans, made, now_s), anew)))


def unban(
    sender: Annotated[str, typer.Argument(metavar="SENDER", help="The name or key given to `swarm ban`.")],
    by: ByOption = "",
    node_url: NodeUrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Admit a banned sender again."""
    node_config = load_chosen(config)
    bucket = subjects.node_bucket(by or node_config.node.id)
    asyncio.run(_with(node_config, node_url, lambda plane: _change(plane, bucket, lambda bans: _removed(bans, sender))))


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


async def _with(config: NodeConfig, node_url: str, action: Callable[[Transport], Awaitable[T]], *, acts: bool = True) -> T:
    target = default_target(config, node_url)
    with naming_silent_server(config.node.var_dir, target.node_url):
        check_listening(config.node.var_dir, target, acts=acts)
        plane = await connect_node_plane(config, OPERATOR, timeout_s=TIMEOUT_S, url=target.node_url)
        try:
            return await action(plane)
        finally:
            await plane.close()


async def _listing(plane: Transport, bucket: str) -> list[str]:
    bans, _ = await _read(plane, bucket)
    now_s = time.time()
    lines = []
    for each in bans.in_force(now_s).bans:
        term = "permanently" if each.until is None else f"for {each.until - now_s:.0f} s more"
        lines.append(f"banned {each.sender} {term}{': ' if each.reason else ''}{each.reason}")
    for entry in await plane.kv.all(bucket, SENDERS_PREFIX):
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
    # One line each, even if a reason contains a newline.
    return [visible(line) for line in lines] or ["nobody is banned, and no sender is suspected"]


async def _change(plane: Transport, bucket: str, change: Callable[[BanList], BanList], anew: bool = False) -> None:
    for _ in range(TRIES):
        bans, revision = await _read(plane, bucket, anew)
        try:
            await plane.kv.update(bucket, BANS_KEY, encode(change(bans)), last_revision=revision)
        except Conflict:
            continue
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
