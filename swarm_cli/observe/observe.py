"""`swarm observe`: look at a swarm from outside, with a token or an address. It only reads."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from shared.contracts import subjects
from shared.identity.permissions import OBSERVER, OPERATOR
from shared.text import visible, visible_json
from shared.transport.base import AccessDenied, NotConnected, Transport, TransportError
from shared.transport.connect import connect
from swarm_cli.chosen_config import load_chosen
from swarm_cli.console import terminal
from swarm_cli.errors import CommandError
from swarm_cli.invitation import TOKEN_VARIABLE, Invitation, TokenError, checked_urls, given_invitation, given_text
from swarm_cli.observe.evaluation_log import EvaluationLog
from swarm_cli.observe.snapshot import NODES_SHOWN, read_directory, usual_swarm
from swarm_cli.observe.standings import Standings, as_object, standings, table
from swarm_cli.runs import running_swarm

CONNECT_S = 10.0
LOOK_S = 30.0
"""If a look takes longer, the server is taken to be gone."""


@dataclass(frozen=True, slots=True)
class Hub:
    """Where to look, and as which user. Files are empty if the server asks for none. `swarm`: which
    swarm to look at; None if only an address was given. `roster`: keys by name if the token lists
    members; None: first keys are trusted.
    """

    url: str
    user: str = OBSERVER
    key_file: str = ""
    ca_file: str = ""
    swarm: str | None = None
    roster: Mapping[str, str] | None = None

    def log(self) -> EvaluationLog:
        """An empty log for reports to this hub's swarm."""
        return EvaluationLog(roster=self.roster, swarm=self.swarm)

    async def connect(self) -> Transport:
        """Connect as this user. Raises the errors of `shared.transport.connect`."""
        return await connect(
            self.url,
            name="observer",
            timeout_s=CONNECT_S,
            key_file=self.key_file or None,
            ca_file=self.ca_file or None,
            inbox_prefix=f"_INBOX_{self.user}",
            may_ask=not self.key_file or self.user == OPERATOR,
            hub=True,
        )


def observe(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TOKEN",
            help="The server's address or a token; - reads standard input.  [default: JOIN_TOKEN, or the running run's address]",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and end. Implied if the output is not a terminal.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and end.")] = False,
    every_s: Annotated[float, typer.Option(min=1.0, help="Seconds between looks.")] = 5.0,
    key: Annotated[Path | None, typer.Option(help="Key file of the user `observer`, for a secured server without a token.")] = None,
    ca: Annotated[Path | None, typer.Option(help="PEM file of the authority that signed the server's certificate.")] = None,
    operator: Annotated[
        bool,
        typer.Option("--operator", help="--key is the operator's, who alone may ask a secured server how much each node shares."),
    ] = False,
) -> None:
    """Show a swarm's nodes, their held-out scores, and how much they share. Only reads; Ctrl-C ends
    it.
    """
    if operator and not key:
        raise CommandError("--operator needs the operator's key: --key keys/operator/swarm.nk")
    with _hub(_target(target), key, ca) as found:
        hub = replace(found, user=OPERATOR) if operator else found
        try:
            _show(hub, terminal(), once=once, as_json=as_json, every_s=every_s)
        except AccessDenied as error:
            remedy = "ask the swarm's operator for a token from `swarm invite --observer`, or give --key and --ca"
            raise CommandError(f"{hub.url} does not admit this spectator: {remedy}\n({error})") from None
        except NotConnected as error:
            raise CommandError(f"{error.cause}: check the address, and whether something on the way blocks its port") from None


def _target(given: str | None) -> str:
    """The given token or address, or the address of the running run's swarm. Raises
    CommandError.
    """
    if given or os.environ.get(TOKEN_VARIABLE, "").strip():
        return given_text(given)
    found = running_swarm(load_chosen(None).node.var_dir)
    if found is None:
        raise CommandError(
            "no run is running here, and neither an address nor a token was given: `swarm observe nats://HOST:4222` "
            f"(tls://HOST:4222 if the hub is secured), `swarm observe TOKEN`, or set {TOKEN_VARIABLE}"
        )
    if found.swarm_url == "none":
        raise CommandError("the run that is running here is not in a swarm: look at it with `swarm top`")
    return found.swarm_url


def _show(hub: Hub, console: Console, *, once: bool, as_json: bool, every_s: float) -> None:
    if as_json:
        typer.echo(visible_json(as_object(asyncio.run(_once(hub)), hub.url), indent=2))
    elif once or not console.is_terminal:
        console.print(table(asyncio.run(_once(hub)), hub.url))
    else:
        asyncio.run(_live(hub, console, every_s))


@contextmanager
def _hub(text: str, key: Path | None, ca: Path | None) -> Iterator[Hub]:
    """The hub of an address or a token. For the length of the block, a token's key and certificate
    are in files that only their owner can read.
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
    """The token's hub and roster; without a roster a name belongs to the first key that
    signs it.
    """
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
    """One look at `swarm`; if None, at the swarm of the node that has signed for longest, or else
    at the one that most nodes of the directory are in. Updates `scores`. For each name, only what
    its first key signed for that swarm counts.

    Raises:
        NotConnected: the server does not answer in time.
    """
    try:
        async with asyncio.timeout(LOOK_S):
            # Read scores first: they say which names are established, and if the directory has more
            # entries than are read, those names' entries are requested.
            await scores.follow(transport, swarm)
            listed = await read_directory(transport, scores.established())
            if swarm is None:
                entries = listed.entries()
                swarm = scores.senior_swarm(entries) or usual_swarm(entries, time.time())
                await scores.follow(transport, swarm)
            try:
                counts: Mapping[str, int] | None = await transport.counts(subjects.SWARM_ROLLOUTS, subjects.ALL_ROLLOUTS)
            except NotConnected:
                raise
            except AccessDenied:
                counts = None
            except TransportError:
                counts = {}  # the stream does not exist yet
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
    """Look every `every_s`. If the server does not answer, keep trying."""
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
