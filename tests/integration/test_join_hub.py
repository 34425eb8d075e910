"""Joining and observing a hub with TLS, accounts and keys: who has to do what, and what a spectator
may do.
"""

from __future__ import annotations

import asyncio
import json
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shared.contracts import subjects
from shared.contracts.codec import encode
from shared.contracts.control import EvalReport, NodeRecord
from shared.contracts.streams import ensure_swarm_streams
from shared.contracts.wire import DEFAULT_SWARM_ID, ModelIdentity
from shared.identity.keys import SigningKey, new_seed
from shared.identity.permissions import swarm_observer
from shared.identity.statements import sign_statement
from shared.transport.base import Deadline, Transport, TransportError
from shared.transport.connect import connect
from shared.transport.nats import administration
from shared.transport.nats.transport import connection_of
from swarm_cli.app import app
from swarm_cli.errors import CommandError
from swarm_cli.invitation import Credential, Invitation, Member, read_token, write_token
from swarm_cli.invite_command import members_swarm
from swarm_cli.join.command import prepare
from swarm_cli.join.findings import Finding
from swarm_cli.join.newcomer import JoinFolder
from tests.integration.nats_users import everything_anybody_may_publish, raw, refused_of
from tests.integration.running_verifier import until
from tests.nats_server import NatsServer
from tests.secured_server import SecuredServer, swarm
from tests.unit.test_invitation import invitation
from tests.unit.test_permissions import matches

MODEL = str(Path(__file__).parents[2] / "models" / "base")
ALPHA = SigningKey(new_seed())
"""A name belongs to the first key that signs under it."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    """The swarm's server, which knows alpha."""
    folder = tmp_path_factory.mktemp("hub")
    server = SecuredServer(folder, ["alpha"], plane="swarm")
    server.start()
    server.init("swarm", server.config("alpha", folder))
    yield server
    server.stop()


def list_nodes(hub: SecuredServer, *nodes: str) -> None:
    """Let nodes in, as the hub's operator does."""
    tls = hub.folder / "tls"
    certificate = ("--tls-cert", str(tls / "server.pem"), "--tls-key", str(tls / "server.key"), "--sync-interval", "1m")
    hub._text = swarm("nats", "config", "--nodes", ",".join(nodes), "--plane", "swarm", "--folder", str(hub.keys), *certificate)
    hub.configure()
    for _ in range(2):
        before = hub.log_file.read_text().count("Reloaded server configuration")
        hub.reload()
        asyncio.run(until(lambda before=before: hub.log_file.read_text().count("Reloaded server configuration") > before, 120))


def token_of(hub: SecuredServer, *more: str) -> str:
    return swarm("invite", "--url", hub.url, "--ca", str(hub.ca_file), "--folder", str(hub.keys), *more).strip()


def invited(hub: SecuredServer, *more: str) -> Invitation:
    return read_token(token_of(hub, *more))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh machine: where a node's files go."""
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(tmp_path / "var"))
    return tmp_path / "var" / "joined" / "swarm"


def found(invitation: Invitation, **asked: Any) -> dict[str, Finding]:
    return {each.what: each for each in prepare(invitation, model=MODEL, **asked).look(thoroughly=False)}


async def as_alpha(hub: SecuredServer) -> Transport:
    key = str(hub.keys / "alpha" / "swarm.nk")
    return await connect(hub.url, name="alpha", key_file=key, ca_file=str(hub.ca_file), inbox_prefix="_INBOX_alpha")


async def write_entry(hub: NatsServer, *, group: bool = True) -> None:
    """Return what alpha's verifier says of itself."""
    plane = await as_alpha(hub) if isinstance(hub, SecuredServer) else await connect(hub.url, name="alpha")
    try:
        identity = ModelIdentity(name="toy", tokenizer_hash="0" * 64)
        key, now = ALPHA, time.time()
        record = NodeRecord(
            node="alpha",
            public_key=key.public_key,
            model=identity,
            tasks=["gcd"],
            policy_version=7,
            software="swarm",
            updated_at=now,
        )
        await plane.kv.put(subjects.SWARM_NODES_BUCKET, "alpha", encode(sign_statement(record, key, "swarm")))
        for version, rate in ((0, 0.25), (7, 0.5)):
            figures: dict[str, Any] = {"n": 8, "pass_rate": rate, "mean_reward": rate, "per_task": {}, "seconds": 1.0}
            report = EvalReport(node="alpha", policy_version=version, created_at=now, **figures)
            payload = encode(sign_statement(report, key, "swarm"))
            await plane.publish(subjects.evals("alpha"), payload, stream=subjects.SWARM_EVALS, message_id=f"v{version}")
        if group:
            await plane.publish(subjects.rollouts("alpha"), b"a group", stream=subjects.SWARM_ROLLOUTS, message_id="one")
    finally:
        await plane.close()


@contextmanager
def renewed(hub: NatsServer) -> Iterator[None]:
    """alpha renews its entry all the time, as a node does: by that a newcomer sets its clock."""
    ended = threading.Event()

    async def renew() -> None:
        while not ended.is_set():
            await write_entry(hub, group=False)
            await asyncio.sleep(2.0)

    with ThreadPoolExecutor(1) as thread:
        renewing = thread.submit(asyncio.run, renew())
        try:
            yield
        finally:
            ended.set()
        renewing.result(60)


@pytest.mark.slow
def test_a_newcomer_makes_its_key_sends_the_public_half_and_is_in_when_it_is_listed(hub: SecuredServer, machine: Path) -> None:
    asyncio.run(write_entry(hub))
    invitation = invited(hub)
    assert invitation.credential is None
    refused = found(invitation, name="nova")["connection"]
    assert refused.ok is False and "Send its operator this line" in refused.told
    name, hub_key, signs = refused.told.splitlines()[-1].split()
    assert name == "nova" and not (machine / "hub-ca.pem").exists(), "looking takes no authority over"
    assert all(stat.S_IMODE((machine / file).stat().st_mode) == 0o600 for file in ("node.nk", "swarm.nk"))

    list_nodes(hub, "alpha", f"nova={hub_key.removeprefix('hub=')}")
    with renewed(hub):
        well = found(invitation, name="nova")
    assert [each.line for each in well.values() if each.ok is False] == []
    assert "nodes there: 1" in well["connection"].told
    assert well["clock"].ok is True and well["name"].told == "nova"
    assert signs == f"signs={SigningKey((machine / 'node.nk').read_bytes().strip()).public_key}"

    # The hub holds nova's key to nova's subjects: under another name it may not even look.
    taken = found(invitation, name="alpha")
    assert [each.what for each in taken.values() if each.ok is False] == ["connection"]
    list_nodes(hub, "alpha")


def test_on_an_open_hub_a_name_that_another_key_has_is_refused_with_a_free_one(tmp_path: Path, machine: Path) -> None:
    async def first_node() -> None:
        plane = await connect(server.url, name="first")
        await ensure_swarm_streams(plane)
        await plane.close()
        await write_entry(server)

    server = NatsServer(tmp_path / "open").start()
    try:
        invitation = read_token(swarm("invite", "--url", server.url).strip())
        assert found(invitation, name="alpha")["connection"].told.endswith("no node is there yet")
        asyncio.run(first_node())
        taken = found(invitation, name="alpha")
        assert [each.what for each in taken.values() if each.ok is False] == ["name"]
        free = taken["name"].told.rpartition("--name ")[2]
        well = found(invitation, name=free)
        assert [each.line for each in well.values() if each.ok is False] == [] and well["name"].told == free
        assert sorted(file.name for file in machine.iterdir()) == ["hub.json", "node.nk"]
        seen = json.loads(CliRunner().invoke(app, ["status", "--url", server.url, "--json"], catch_exceptions=False).stdout)
        assert [node["node"] for node in seen["nodes"]] == ["alpha"]
    finally:
        server.stop()


def test_looking_leaves_nothing_at_an_open_hub_and_one_without_room_says_so_when_the_node_makes_the_streams(
    tmp_path: Path, machine: Path
) -> None:
    async def make() -> None:
        plane = await connect(server.url, name="first")
        try:
            await ensure_swarm_streams(plane)
        finally:
            await plane.close()

    server = NatsServer(tmp_path / "small")
    file = server.folder / "nats.conf"
    file.write_text(file.read_text().replace("max_file_store: 1TB", "max_file_store: 3GB"))
    server.start()
    try:
        seen = found(read_token(swarm("invite", "--url", server.url).strip()), name="nova")
        assert not [each for each in seen.values() if each.ok is False]
        assert asyncio.run(streams_of(server)) == []
        with pytest.raises(TransportError, match="insufficient storage"):  # the reason in the node's log, docs/joining.md
            asyncio.run(make())
    finally:
        server.stop()


async def streams_of(server: NatsServer) -> list[str]:
    plane = await connect(server.url, name="looking")
    try:
        listed = await administration.streams(connection_of(plane), Deadline(20.0))
        return [each["config"]["name"] for each in listed.entries]
    finally:
        await plane.close()


@pytest.mark.slow
def test_a_token_with_a_key_is_all_that_a_newcomer_needs_and_replaces_no_key(hub: SecuredServer, machine: Path) -> None:
    invitation = invited(hub, "--node", "gamma")
    list_nodes(hub, "alpha", "gamma")
    well = found(invitation)
    assert [each.line for each in well.values() if each.ok is False] == [] and well["name"].told == "gamma"
    kept = (machine / "swarm.nk").read_bytes()
    assert kept == (hub.keys / "gamma" / "swarm.nk").read_bytes()
    gamma = SigningKey(kept.strip()).public_key
    assert f'"SWARM_GAMMA/nkey:{gamma}"' in hub.violations()[-1], "the server's log names the account and key of a connection"
    with pytest.raises(CommandError, match="the token is for a node called gamma"):
        found(invitation, name="delta")
    with pytest.raises(CommandError, match="holds another key than the token, and keys are never replaced"):
        found(invited(hub, "--node", "delta"))
    assert (machine / "swarm.nk").read_bytes() == kept
    list_nodes(hub, "alpha")


@pytest.mark.slow
def test_a_token_with_the_operators_key_under_a_nodes_name_is_refused_by_what_the_hub_lets_it_do(
    hub: SecuredServer, machine: Path
) -> None:
    seed = (hub.keys / "operator" / "swarm.nk").read_text().strip()
    authority = invited(hub).authority
    said = invitation(url=hub.url, swarm_id="swarm", authority=authority, credential=Credential(user="gamma", seed=seed))
    refused = found(read_token(write_token(said)))["connection"]
    assert refused.ok is False and "may do more than a node" in refused.told
    joined = CliRunner().invoke(app, ["join", "-", "--model", MODEL], input=write_token(said))
    assert isinstance(joined.exception, CommandError) and joined.exception.exit_code == 78
    assert not (machine / "node.toml").exists(), "nothing was started"


@pytest.mark.slow
def test_join_check_says_what_is_wrong_with_a_remedy_ends_with_78_and_starts_nothing(hub: SecuredServer, machine: Path) -> None:
    result = CliRunner().invoke(app, ["join", "--check", "--model", str(machine / "no-model"), token_of(hub)])
    assert isinstance(result.exception, CommandError) and result.exception.exit_code == 78
    assert str(result.exception).startswith("not joined: see connection, model"), "ports may be taken too"
    assert "NO  model" in result.stdout and "no such folder" in result.stdout and "NO  connection" in result.stdout
    assert sorted(file.name for file in machine.iterdir()) == ["hub.json", "node.nk", "swarm.nk"]


def test_a_spectator_sees_who_is_there_and_how_they_do(hub: SecuredServer) -> None:
    """Not how much each shares: a spectator's key may not ask, so it does not."""
    asyncio.run(write_entry(hub))
    before = len(hub.violations())
    shown = CliRunner().invoke(app, ["status", "--token", "-", "--json"], input=token_of(hub, "--observer"), catch_exceptions=False)
    alpha = next(node for node in json.loads(shown.stdout)["nodes"] if node["node"] == "alpha")
    assert (alpha["model"], alpha["tasks"], alpha["policy_version"]) == ("toy", ["gcd"], 7)
    assert alpha["shared"] is None
    newest = {"policy_version": 7, "pass_rate": 0.5, "mean_reward": 0.5, "n": 8}
    assert alpha["newest"] == newest and alpha["gain"] == 0.25
    table = CliRunner().invoke(app, ["status", "--token", token_of(hub, "--observer")], catch_exceptions=False)
    assert "alpha" in table.stdout and "0.500/8" in table.stdout and "+0.250" in table.stdout
    assert "nothing" not in table.stdout and "groups in the hub's window" not in table.stdout
    assert hub.violations()[before:] == []


def test_who_has_no_key_for_looking_is_told_whom_to_ask(hub: SecuredServer) -> None:
    for arguments in (["--token", token_of(hub)], ["--url", hub.url, "--ca", str(hub.ca_file)]):
        refused = CliRunner().invoke(app, ["status", *arguments]).exception
        assert isinstance(refused, CommandError) and "swarm invite --observer" in str(refused)


def test_a_token_for_looking_joins_nothing(hub: SecuredServer, machine: Path) -> None:
    with pytest.raises(CommandError, match="this token only allows looking"):
        prepare(invited(hub, "--observer"))
    assert not machine.exists()


async def test_the_server_lets_a_spectator_read_and_do_nothing_else(hub: SecuredServer) -> None:
    errors: list[str] = []
    client = await raw(hub, hub.keys / "operator" / "observer.nk", "_INBOX_observer", errors)
    try:
        allowed = swarm_observer()
        wanted = [*everything_anybody_may_publish(), *allowed.publish]
        forbidden = {subject for subject in wanted if not any(matches(pattern, subject) for pattern in allowed.publish)}
        assert await refused_of(client, errors, wanted, subscribe=False) == forbidden
        assert all(subject.startswith("$JS.API.DIRECT.GET.") for subject in set(wanted) - forbidden)
        heard = ["_INBOX_observer.x", "_INBOX_alpha.x", ">", "swarm.>", "$JS.EVENT.>", "$KV.>"]
        assert await refused_of(client, errors, heard, subscribe=True) == set(heard[1:])
    finally:
        await client.close()


def test_a_token_names_the_swarm_that_the_nodes_there_sign_for(nats_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """`swarm up` names its swarm after the run: a newcomer of swarm "swarm" was refused by all."""
    server = nats_server()
    assert members_swarm(server.url) == DEFAULT_SWARM_ID
    assert "SWARM_NATS__SWARM_ID=RUN" in capsys.readouterr().err

    async def enter() -> None:
        plane = await connect(server.url, name="alpha")
        await ensure_swarm_streams(plane)
        identity = ModelIdentity(name="toy", tokenizer_hash="0" * 64)
        for node, swarm_id in (("alpha", "run-7"), ("beta", "run-7"), ("mallory", "elsewhere")):
            key = SigningKey(new_seed())
            record = NodeRecord(
                node=node,
                public_key=key.public_key,
                model=identity,
                tasks=["gcd"],
                policy_version=7,
                software="swarm",
                updated_at=time.time(),
            )
            entry = encode(sign_statement(record, key, swarm_id))
            await plane.kv.put(subjects.SWARM_NODES_BUCKET, node, entry)
        await plane.close()

    asyncio.run(enter())
    assert members_swarm(server.url) == "run-7"


def test_a_node_that_has_joined_is_not_started_with_a_later_token_s_new_lines_unasked(nats_server: Any, machine: Path) -> None:
    server = nats_server()
    folder = JoinFolder(machine)
    alpha, mallory = (Member(node=node, public_key=SigningKey(new_seed()).public_key) for node in ("alpha", "mallory"))
    said = invitation(url=server.url, swarm_id=machine.name, roster=[alpha])
    list(prepare(said, model=MODEL).look(thoroughly=False))
    folder.keep_roster([alpha])
    token = write_token(invitation(url=server.url, swarm_id=machine.name, roster=[alpha, mallory]))
    refused = CliRunner().invoke(app, ["join", token, "--model", MODEL]).exception
    assert isinstance(refused, CommandError) and f"mallory {mallory.public_key}" in str(refused) and "--keep-roster" in str(refused)
    assert "mallory" not in folder.roster_file.read_text() and not folder.config_file.exists()
