"""`swarm invite`: an invitation to a swarm, from the configuration of a node that is in it."""

from __future__ import annotations

import asyncio
import shlex
import ssl
import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from shared.config.verifier_config import VerifierConfig
from shared.contracts.wire import DEFAULT_SWARM_ID, SWARM_SCHEMA_VERSION
from shared.identity import keys
from shared.identity.roster import RosterError, read_roster
from shared.registry import VERIFIERS
from shared.roles import OBSERVER, OPERATOR
from shared.text import error_text, visible
from shared.transport.nats.credentials import authority_context
from shared.version import VERSION
from swarm_cli.chosen_config import LOOPBACK, ConfigOption, load_chosen
from swarm_cli.console import note
from swarm_cli.errors import CommandError, checked_node
from swarm_cli.invitation import Accepted, Credential, Invitation, Member, OfferedTask, TokenError, write_token
from swarm_cli.runs import RunNote, read_note, runs_of_this_user
from swarm_cli.target import only_run

LOOK_S = 3.0
_CHOOSE = "swarm invite --url"
_SHOWN = 5


def invite(
    url: Annotated[
        str, typer.Option(help="The swarm's server as others reach it.  [default: nats.swarm_url, or that of the run here]")
    ] = "",
    roster: Annotated[Path | None, typer.Option(help="Roster that newcomers admit others by; they start with these lines.")] = None,
    ca: Annotated[Path | None, typer.Option(help="PEM file of the authority behind the server's certificate.")] = None,
    node: Annotated[str, typer.Option(help="Put this node's swarm key into the token: a secret, for one newcomer.")] = "",
    observer: Annotated[
        bool, typer.Option("--observer", help="Put the spectators' key into it, for `swarm status --token`.")
    ] = False,
    folder: Annotated[Path, typer.Option(help="Folder of key files that `swarm nats keys` made.")] = Path("keys"),
    config: ConfigOption = None,
) -> None:
    """Print a token with which `swarm join` joins this swarm, or `swarm status --token` looks at
    it.

    Without --node and --observer it holds no secret. The hub may be started after its tokens are
    made; `swarm join --check` says whether it answers.
    """
    if node and observer:
        raise CommandError("--node makes a token for a newcomer, --observer one for spectators: give one of the two")
    chosen = load_chosen(config, VerifierConfig)
    here = None if url else _swarm_here(chosen)
    address = url or (here.swarm_url if here else _configured_swarm(chosen))
    swarm_id = chosen.nats.swarm_id
    if swarm_id == DEFAULT_SWARM_ID and here and here.swarm_id:
        swarm_id = here.swarm_id
    elif swarm_id == DEFAULT_SWARM_ID and address.startswith("nats://"):
        # A secured server shows nothing without a key: there the configuration must name the swarm.
        swarm_id = members_swarm(address)
    try:
        token = write_token(
            Invitation(
                url=address,
                swarm_id=swarm_id,
                swarm_schema=SWARM_SCHEMA_VERSION,
                software=f"swarm {VERSION}",
                tasks_version=version("reasoning-gym"),
                accepts=accepted(chosen),
                roster=_members(roster) if roster else [],
                authority=_authority(ca) if ca else b"",
                credential=_credential(node, observer, folder),
            )
        )
    except TokenError as error:
        raise CommandError(f"no token can be made: {error}") from None
    typer.echo(token)
    for line in _remarks(chosen, node, observer, address):
        note(line)


def _swarm_here(config: VerifierConfig) -> RunNote | None:
    """The note of the run that is running in this folder; None if none is, or the configuration
    names a server.
    """
    if "swarm_url" in config.nats.model_fields_set:
        return None
    found = only_run(config.node.var_dir, lambda note: f"{_CHOOSE} {shlex.quote(note.swarm_url)}")
    return found[1] if found else None


def _configured_swarm(config: VerifierConfig) -> str:
    """The swarm's server that the configuration names. The usual address is no answer: who is there
    need not be of this user's swarm.

    Raises:
        CommandError: it names none.
    """
    if "swarm_url" in config.nats.model_fields_set:
        return config.nats.swarm_url or ""
    noted = [(folder, left) for folder in runs_of_this_user() if (left := read_note(folder)) and left.swarm_url != "none"]
    lines = [f"  {_CHOOSE} {shlex.quote(left.swarm_url)}   run {visible(str(folder), 400)}" for folder, left in noted[:_SHOWN]]
    raise CommandError(
        "no run is running in this folder, and the configuration names no nats.swarm_url: name the swarm's server with --url"
        + "".join(f"\n{line}" for line in lines)
    )


def members_swarm(url: str) -> str:
    """The id of the swarm that the server's nodes are in. `swarm up` names a swarm after its run,
    which a command in another terminal does not know, and a newcomer that signs for the wrong swarm
    is refused by all nodes. The default id if no node is there yet or the server lets nobody look.

    The node that has signed scores for longest decides, because anyone who reaches an open hub can
    make up a majority. If no node has signed scores yet, the majority of the directory decides.
    """
    from shared.transport.base import TransportError

    try:
        swarms = asyncio.run(_swarms_seen(url))
    except (TransportError, ValueError):
        swarms = []
    if not swarms:
        note(
            f"no node could be seen at {visible(url)}, so the token names the swarm {DEFAULT_SWARM_ID!r}, the default: if its "
            "nodes use another nats.swarm_id, set it here too (`swarm up` uses the run's name: SWARM_NATS__SWARM_ID=RUN swarm "
            "invite ...)"
        )
        return DEFAULT_SWARM_ID
    if len(swarms) > 1:
        note(
            f"nodes of {len(swarms)} swarms use {visible(url)}, and the token names {swarms[0]}: if yours is another "
            f"({', '.join(swarms[1:4])}), set nats.swarm_id here too (SWARM_NATS__SWARM_ID=... swarm invite ...)"
        )
    return swarms[0]


async def _swarms_seen(url: str) -> list[str]:
    """The swarms that entries of the directory are signed for, the members' swarm first."""
    from shared.identity.statements import SignatureStatus
    from shared.transport.connect import connect
    from swarm_cli.observe.evaluation_log import EvaluationLog, read_directory, usual_swarm

    hub = await connect(url, name="invite", timeout_s=LOOK_S, hub=True)
    try:
        scores = EvaluationLog()
        await scores.follow(hub)
        entries = (await read_directory(hub, scores.established())).entries()
    finally:
        await hub.close()
    first = scores.senior_swarm(entries) or usual_swarm(entries, time.time())
    others = {entry.swarm for entry in entries if entry.standing is SignatureStatus.SIGNED and entry.swarm is not None}
    return [first, *sorted(others - {first})] if first is not None else []


def accepted(config: VerifierConfig) -> Accepted:
    """Return what a node with this configuration accepts from others. Tasks from files are left
    out, because only someone with the same file can derive them.
    """
    border = config.verifier
    return Accepted(
        rule=border.accepted_tasks,
        tasks=[
            OfferedTask(dataset=task.dataset, config=task.canonical_config, weight=task.weight, verifier=task.verifier)  # type: ignore[arg-type]
            for task in config.tasks
            if task.source != "file" and task.verifier in VERIFIERS.built_in
        ],
        max_bytes=border.max_foreign_bytes,
        max_completions=config.max_foreign_completions,
        max_tokens=config.max_foreign_tokens,
        max_answer_chars=config.max_answer_chars,
        max_age_s=config.max_foreign_age_s,
        max_clock_skew_s=border.max_clock_skew_s,
    )


def _members(file: Path) -> list[Member]:
    try:
        return [Member(node=entry.name, public_key=entry.public_key) for entry in read_roster(file).values()]
    except RosterError as error:
        raise CommandError(str(error)) from None


def _authority(file: Path) -> bytes:
    """The certificates in a PEM file, without anything else that it may hold, such as a key."""
    try:
        context = authority_context(str(file))
    except OSError as error:
        raise CommandError(f"--ca {file} cannot be read ({error_text(error)}): give the server authority's PEM file") from None
    found = context.get_ca_certs(binary_form=True)
    if not found:
        raise CommandError(f"--ca {file} holds no certificate of an authority: give the PEM file of the server's authority")
    return "".join(map(ssl.DER_cert_to_PEM_cert, found)).encode()


def _credential(node: str, observer: bool, folder: Path) -> Credential | None:
    if not node and not observer:
        return None
    if node in (OPERATOR, OBSERVER):
        raise CommandError(f"{node} is not a node: give the newcomer's name with --node")
    path = folder / OPERATOR / f"{OBSERVER}.nk" if observer else folder / checked_node(node) / "swarm.nk"
    try:
        keys.load_or_create(path)
        return Credential(user=OBSERVER if observer else node, seed=path.read_text().strip())
    except keys.KeyFileError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"key file {path} cannot be read ({error_text(error)}): let this user read it") from None


def _remarks(config: VerifierConfig, node: str, observer: bool, address: str) -> list[str]:
    """Tell the person at the terminal what to do with the token."""
    lines = ["look at the swarm with:  swarm status --token TOKEN" if observer else "the newcomer runs:  swarm join TOKEN"]
    if any(urlsplit(server.strip()).hostname in LOOPBACK for server in address.split(",")):
        lines.append(
            f"{visible(address)} can be reached from this machine only. Newcomers elsewhere need --url with an address that they "
            "can reach and a server that listens there, which the one of `swarm up` does not"
        )
    if node:
        lines.append(
            f"the token holds {node}'s key: send it to that person only. The server must list the key: run `swarm nats config` "
            f"with --nodes ...,{node}, then reload the server twice (in a cluster `swarm k8s secrets`: docs/kubernetes-change.md)"
        )
    if observer:
        lines.append(
            "the token allows looking and nothing else. The server must list the key: run `swarm nats config`, then reload it"
        )
    left_out = [
        task.dataset or task.path for task in config.tasks if task.source == "file" or task.verifier not in VERIFIERS.built_in
    ]
    if left_out:
        lines.append(f"not in the token: {', '.join(left_out)}: send files and verifiers of your own to the newcomer separately")
    return lines
