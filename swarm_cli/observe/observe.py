"""`swarm observe`: look at a swarm from outside, with a token or an address. It shares nothing,
trains nothing and writes nothing.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from shared.contracts import subjects
from shared.identity.permissions import OBSERVER
from shared.text import visible, visible_json
from shared.transport.base import AccessDenied, NotConnected, Transport, TransportError
from shared.transport.connect import connect
from swarm_cli.chosen_config import load_chosen
from swarm_cli.console import terminal
from swarm_cli.errors import CommandError
from swarm_cli.invitation.given_token import TOKEN_VARIABLE, given_invitation, given_text
from swarm_cli.invitation.token import Invitation, TokenError, checked_urls
from swarm_cli.observe.directory import read_directory, usual_swarm
from swarm_cli.observe.evaluation_log import EvaluationLog
from swarm_cli.observe.snapshot import NODES_SHOWN
from swarm_cli.observe.standings import Standings, as_object, standings, table
from swarm_cli.running import running_swarm

CONNECT_S = 10.0
LOOK_S = 30.0
"""A look that takes longer found a server that went away under it."""


@dataclass(frozen=True, slots=True)
class Hub:
    """Where to look, and as whom. Files are empty where the server asks for none. `swarm`: which
    swarm to look at, None where an address alone was given. `roster`: keys by name where the token
    lists its members; None: first keys are trusted.
    """

    url: str
    user: str = OBSERVER
    key_file: str = ""
    ca_file: str = ""
    swarm: str | None = None
    roster: Mapping[str, str] | None = None

    def log(self) -> EvaluationLog:
        """An empty log that takes what this hub's swarm may say."""
        return EvaluationLog(roster=self.roster, swarm=self.swarm)

    async def connect(self) -> Transport:
        """Raises what connecting raises."""
        return await connect(
            self.url,
            name="observer",
            timeout_s=CONNECT_S,
            key_file=self.key_file or None,
            ca_file=self.ca_file or None,
            inbox_prefix=f"_INBOX_{self.user}",
        )


def observe(
    target: Annotated[
        str | None,
        typer.Argument(help="The server's address or a token; - reads standard input.  [default: JOIN_TOKEN or the running run's]"),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print it once and end; so does output that is no terminal.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, once.")] = False,
    every_s: Annotated[float, typer.Option(min=1.0, help="Seconds between looks.")] = 5.0,
    key: Annotated[Path | None, typer.Option(help="Key file of the user `observer`, for a secured server without a token.")] = None,
    ca: Annotated[Path | None, typer.Option(help="PEM file of the authority behind the server's certificate.")] = None,
) -> None:
    """Show who is in a swarm, their held-out scores, and who shares. Reads only; Ctrl-C ends it."""
    with _hub(_target(target), key, ca) as hub:
        try:
            _show(hub, terminal(), once=once, as_json=as_json, every_s=every_s)
        except AccessDenied as error:
            remedy = "ask the swarm's operator for a token of `swarm invite --observer`, or give --key and --ca"
            raise CommandError(f"{hub.url} does not let a spectator in: {remedy}\n({error})") from None
        except NotConnected as error:
            said = str(error).split(": start one with")[0]
            raise CommandError(f"{said}: check the address, and whether something on the way blocks its port") from None


def _target(given: str | None) -> str:
    """What was given, or the address of the running run's swarm. Raises CommandError."""
    if given or os.environ.get(TOKEN_VARIABLE, "").strip():
        return given_text(given)
    url = running_swarm(load_chosen(None).node.var_dir)
    if url == "none":
        raise CommandError("the run that is running here is in no swarm: `swarm top` looks at it")
    if url is None:
        raise CommandError(
            "no run is running here, and neither an address nor a token was given: `swarm observe nats://HOST:4222` "
            f"(tls://HOST:4222 where the hub is secured), `swarm observe TOKEN`, or the token in {TOKEN_VARIABLE}"
        )
    return url


def _show(hub: Hub, console: Console, *, once: bool, as_json: bool, every_s: float) -> None:
    if as_json:
        typer.echo(visible_json(as_object(asyncio.run(_once(hub)), hub.url), indent=2))
    elif once or not console.is_terminal:
        console.print(table(asyncio.run(_once(hub)), hub.url))
    else:
        asyncio.run(_live(hub, console, every_s))


@contextmanager
def _hub(text: str, key: Path | None, ca: Path | None) -> Iterator[Hub]:
    """The hub behind an address or a token. A token's key and certificate are files for as long as
    the block lasts, readable for their owner only.
    """
    if "://" in text.partition(".")[0]:
        try:
            yield Hub(checked_urls(text), key_file=str(key or ""), ca_file=str(ca or ""))
        except TokenError as error:
            raise CommandError(str(error)) from None
        return
    invitation = given_invitation(text)
    with TemporaryDirectory(prefix="swarm-observe-") as folder:
        yield _invited_hub(invitation, Path(folder), key, ca)


def _invited_hub(invitation: Invitation, folder: Path, key: Path | None, ca: Path | None) -> Hub:
    """The token's hub and roster: without the latter a name belongs to whoever signs first."""
    user, key_file, ca_file = OBSERVER, str(key or ""), str(ca or "")
    if invitation.credential is not None and not key:
        user, key_file = invitation.credential.user, str(folder / "key.nk")
        Path(key_file).touch(mode=0o600)
        Path(key_file).write_text(invitation.credential.seed)
    if invitation.authority and not ca:
        ca_file = str(folder / "ca.pem")
        Path(ca_file).write_bytes(invitation.authority)
    roster = {member.node: member.public_key for member in invitation.roster} or None
    return Hub(invitation.url, user, key_file, ca_file, invitation.swarm_id, roster)


async def _once(hub: Hub) -> Standings:
    transport = await hub.connect()
    try:
        return await look(transport, hub.log(), hub.swarm)
    finally:
        await transport.close()


async def look(transport: Transport, scores: EvaluationLog, swarm: str | None = None) -> Standings:
    """One look at `swarm`, or else at that of the node that has signed for longest, or else at the
    one that most nodes of the directory are in; `scores` is brought up to date. Of a name only what
    its first key signed for that swarm counts.

    Raises:
        NotConnected: the server does not answer in time.
    """
    try:
        async with asyncio.timeout(LOOK_S):
            # First who is known: where there are more entries than are read, theirs are asked for.
            await scores.follow(transport, swarm)
            listed = await read_directory(transport, scores.established())
            if swarm is None:
                entries = listed.entries()
                swarm = scores.senior_swarm(entries) or usual_swarm(entries, time.time())
                await scores.follow(transport, swarm)
            try:
                counts = await transport.counts(subjects.SWARM_ROLLOUTS, subjects.ALL_ROLLOUTS)
            except NotConnected:
                raise
            except TransportError:
                counts = {}  # nobody has made the stream yet
    except TimeoutError:
        raise NotConnected(f"the server took longer than {LOOK_S:.0f} s to answer") from None
    swarm = swarm or scores.usual_swarm()
    return standings(
        time.time(),
        [scores.checked(entry) for entry in listed.entries(swarm)],
        scores.reports(swarm),
        counts,
        unsigned=scores.unsigned(swarm),
        known=scores.established(),
        most=NODES_SHOWN,
        left_out=listed.left_out,
        unreadable=listed.unreadable,
    )


async def _live(hub: Hub, console: Console, every_s: float) -> None:
    """Look again and again. A server that goes away is waited for."""
    transport, scores = await hub.connect(), hub.log()
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                try:
                    live.update(table(await look(transport, scores, hub.swarm), hub.url), refresh=True)
                except NotConnected as error:
                    live.update(Text(f"{visible(str(error))}: trying again"), refresh=True)
                await asyncio.sleep(every_s)
    finally:
        await transport.close()
