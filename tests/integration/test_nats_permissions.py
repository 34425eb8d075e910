"""Keys, TLS and permissions against the real server: each role does its work without a refusal, and
who has another key, certificate or address is told so.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from services.sampler.reports import NodeProcesses
from services.verifier.border import Border, Candidate, Refusal, Refused
from services.verifier.border_rules import BorderRules
from services.verifier.copies import ReplayMemory
from services.verifier.sharing import sign
from services.verifier.trust import KnownKeys
from shared.config import load_config
from shared.contracts import subjects
from shared.contracts.codec import decode, encode
from shared.contracts.control import LeaseRecord, NameOwner, PolicyPointer
from shared.contracts.messages import SignedRollouts
from shared.contracts.streams import MissingStreams, prepare_node_streams, prepare_swarm_streams
from shared.identity.keys import SigningKey, new_seed
from shared.lease.name import NameTaken, check_name, take_name
from shared.policy_store import PolicyStoreError
from shared.policy_store.jetstream import JetStreamStore
from shared.roles import ROLES
from shared.runtime import EXIT_CONFIG
from shared.runtime.naming import lease_name, leased, sole_keys, status_replica, take_lease
from shared.runtime.planes import connect_node_plane, connect_swarm_plane
from shared.runtime.status import StatusBoard
from shared.tasks.held_out import HeldOut
from shared.transport.base import AccessDenied, Conflict, NoStream, NotConnected, TransportError
from shared.transport.connect import connect
from shared.transport.nats.pull import fetch
from tests.integration.nats_users import raw, refused_of
from tests.integration.running_verifier import generate, group, until, verifier
from tests.secured_server import SecuredServer, make_certificates

LARGE = b"x" * (9 * 2**20)
"""More than one message may hold: travels in chunks."""


@pytest.fixture(scope="module", params=["text", "claims"])
def secured(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[SecuredServer]:
    """Two nodes' planes and the swarm's on one server, in accounts. Streams were made by the
    operators.
    """
    folder = tmp_path_factory.mktemp("secured")
    server = SecuredServer(folder, ["alpha", "beta", "gamma", "delta"], accounts=request.param)
    server.start()
    for node in server.nodes:
        server.init("node", server.config(node, folder))
    server.init("swarm", server.config("alpha", folder))
    yield server
    server.stop()


async def test_every_role_takes_renews_and_gives_up_its_lease_with_its_own_key(secured: SecuredServer, tmp_path: Path):
    config, log, before = secured.config("delta", tmp_path), structlog.get_logger(), len(secured.violations())
    for role in ROLES:
        plane = await connect_node_plane(config, role)
        await check_name(plane, "delta", "test", "here")
        lease = await take_lease(plane, config, StatusBoard("delta", role, status_replica(role, config.node.replica)), "", log)
        async with leased(plane, lease, config, role, log) as node:
            await lease.renew()
            for key in sole_keys(role, config.node.replica):
                await node.kv.put(subjects.node_bucket("delta"), key, b"")
        found = await plane.kv.get(subjects.node_bucket("delta"), subjects.LEASE_PREFIX + lease_name(role, config.node.replica))
        assert found is not None and decode(found.value, LeaseRecord).released
        with pytest.raises(NameTaken, match="belong to run test"):
            await check_name(plane, "delta", "another", "here")
        await plane.close()
    assert len(secured.violations()) == before


async def test_the_run_that_owns_a_name_stays_whatever_a_roles_key_writes(secured: SecuredServer, tmp_path: Path):
    """Who could write over it, with another run or with junk, would stop every service of the node
    at its next start.
    """
    config, stream = secured.config("beta", tmp_path), subjects.node_name_stream("beta")
    trainer = await connect_node_plane(config, "trainer")
    operator = await raw(secured, secured.keys / "beta" / "operator.nk", "_INBOX", [])
    try:
        await take_name(trainer, "beta", "test", "here")
        owner = await trainer.get(stream, 1)
        assert owner is not None
        evil = encode(NameOwner(run="evil", host="x", taken_at=1.0))
        for role in ROLES:
            errors: list[str] = []
            client = await raw(secured, secured.keys / "beta" / f"{role}.nk", f"_INBOX_beta.{role}", errors)
            for body, headers in itertools.product((evil, b"junk", b""), ({}, {"Nats-Rollup": "sub"}, {"KV-Operation": "PURGE"})):
                answer = json.loads((await client.request(subjects.node_name("beta"), body, timeout=30.0, headers=headers)).data)
                assert answer["error"]["code"] >= 400, (role, body, headers)
            removing = [f"$JS.API.STREAM.{verb}.{stream}" for verb in ("PURGE", "MSG.DELETE", "DELETE", "UPDATE")]
            wanted = [*removing, "$KV.node_beta.name"]
            assert await refused_of(client, errors, wanted, subscribe=False) == set(wanted)
            await client.close()
            plane = await connect_node_plane(config, role)
            await check_name(plane, "beta", "test", "here")
            await take_name(plane, "beta", "test", "here")
            with pytest.raises(NameTaken, match="belong to run test"):
                await take_name(plane, "beta", "evil", "here")
            await plane.close()
        for request in (f"$JS.API.STREAM.PURGE.{stream}", f"$JS.API.STREAM.MSG.DELETE.{stream}"):
            answer = json.loads((await operator.request(request, b'{"seq": 1}', timeout=30.0)).data)
            assert answer["error"]["code"] >= 400, "not even by mistake"
        assert await trainer.read(stream, 1, 10) == [owner]
    finally:
        await operator.close()
        await trainer.close()


async def test_every_role_can_do_its_work_on_the_node_plane_without_one_refusal(secured: SecuredServer, tmp_path: Path):
    node, config = "gamma", secured.config("gamma", tmp_path)
    bucket = subjects.node_bucket(node)
    rollouts, scored = subjects.node_rollouts_stream(node), subjects.node_scored_stream(node)
    batches, dead = subjects.node_batches_stream(node), subjects.node_dead_letters_stream(node)
    before = len(secured.violations())
    planes = {role: await connect_node_plane(config, role) for role in (*ROLES, "operator")}
    generator, reader, sampler, trainer = (planes[role] for role in ROLES)
    try:
        for role in ROLES:
            await prepare_node_streams(planes[role], node, create=False)
            await StatusBoard(node, role, status_replica(role, "pod-0")).report_once(planes[role])
        told = {entry.key for entry in (await planes["operator"].kv.newest(bucket, 1024, "status."))[0]}
        assert {f"status.{r}.{status_replica(r, 'pod-0')}" for r in ROLES} <= told

        for name, payload in (("small", b"1"), ("large", LARGE)):
            await generator.publish(subjects.node_rollouts(node), payload, stream=rollouts, message_id=name)
        await generator.publish(subjects.node_rollouts(node), LARGE, stream=rollouts, message_id="large")  # drops its own chunks
        await generator.kv.update(bucket, subjects.LEDGER_KEY, b"l", last_revision=0)
        with pytest.raises(Conflict):
            await generator.kv.update(bucket, subjects.LEDGER_KEY, b"l", last_revision=0)
        for key in (subjects.EVAL_KEY, subjects.EVAL_TURN_KEY):
            await generator.kv.put(bucket, key, b"e")

        deliveries = await fetch(reader, rollouts, subjects.VERIFIER_CONSUMER, 10, 2.0)
        assert [len(await reader.payload(each.message)) for each in deliveries] == [1, len(LARGE)]
        await deliveries[0].in_progress()
        await deliveries[0].nak()
        (again,) = await fetch(reader, rollouts, subjects.VERIFIER_CONSUMER, 10, 2.0)
        for name, payload in (("small", b"1"), ("large", LARGE)):
            await reader.publish(subjects.node_scored(node), payload, stream=scored, message_id=name)
            await reader.publish(subjects.node_dead_letters(node), payload, stream=dead, message_id=name)
        await again.ack()
        await deliveries[1].ack()
        assert (await reader.stream_state(rollouts)).messages == 0
        assert (await reader.consumer_state(rollouts, subjects.VERIFIER_CONSUMER)).ack_pending == 0
        await reader.kv.update(bucket, subjects.INTAKE_KEY, b"i", last_revision=0)
        await reader.kv.put(bucket, "senders.pod-0", b"s")
        assert (await reader.last(scored, subjects.node_scored(node))) is not None

        messages = await sampler.read(scored, 1, 10)
        assert [len(await sampler.payload(each)) for each in messages] == [1, len(LARGE)]
        await sampler.publish(subjects.node_batches(node), b"b", stream=batches, message_id="batch-1", expected_last_seq=0)
        await sampler.publish(subjects.node_batches(node), LARGE, stream=batches, message_id="batch-2", expected_last_seq=1)
        with pytest.raises(Conflict):
            await sampler.publish(subjects.node_batches(node), LARGE, stream=batches, message_id="batch-9", expected_last_seq=0)
        await sampler.purge(scored, 1)
        await sampler.kv.put(bucket, subjects.SAMPLER_KEY, b"s")
        assert {status.role for status in (await NodeProcesses.read(sampler, node)).statuses} == set(ROLES)

        read = await trainer.read(batches, 1, 10)
        assert len(await trainer.payload(read[1])) == len(LARGE)
        await trainer.purge(batches, 1)
        await trainer.kv.put(bucket, subjects.TRAINER_KEY, b"t")
        watch = generator.kv.watch(bucket, subjects.POLICY_KEY, poll_s=30.0)
        announced = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.3)
        weights = tmp_path / "weights.safetensors"
        weights.write_bytes(os.urandom(2**20))
        store = JetStreamStore(trainer, node, create=False)
        for version in (1, 2):
            stored = await store.publish(weights, version)
        pointer = PolicyPointer(
            version=2,
            uri=stored.uri,
            sha256=stored.sha256,
            size_bytes=stored.size_bytes,
            consumed_local=8,
            created_at=1.0,
        )
        await trainer.kv.put(bucket, subjects.POLICY_KEY, encode(pointer))
        found = decode((await asyncio.wait_for(announced, 120)).value, PolicyPointer)
        fetched = await JetStreamStore(generator, node).fetch(found, tmp_path / "fetched")
        assert fetched.read_bytes() == weights.read_bytes()
        await store.prune([2])
        await watch.aclose()
        assert (await reader.kv.get(bucket, subjects.POLICY_KEY)) is not None
    finally:
        for plane in planes.values():
            await plane.close()
    assert secured.violations()[before:] == []


async def test_two_nodes_share_through_the_secured_swarm_plane_without_one_refusal(secured: SecuredServer, tmp_path: Path):
    """Whole verifiers: local groups are scored and shared, the other's are taken in; scores and
    directory entries are written.
    """
    before = len(secured.violations())
    alpha_config, beta_config = (secured.config(node, tmp_path, eval={"tasks": 2}) for node in ("alpha", "beta"))
    alpha_generator = await connect_node_plane(alpha_config, "generator")
    async with verifier(alpha_config) as alpha, verifier(beta_config) as beta:
        await generate(alpha_generator, *(group("alpha", index) for index in range(3)))
        await until(lambda: beta.status.get("accepted") == 3)
        assert alpha.status.get("scored_local") == alpha.status.get("shared") == 3
        assert beta.status.get("refused") == 0
        await until(lambda: entry_of(beta, "alpha"))
    await alpha_generator.close()
    assert secured.violations()[before:] == []


async def test_nobody_but_the_operator_may_ask_about_a_stream_of_the_swarms(secured: SecuredServer):
    """The server answers one such request after the other for everybody."""
    names = [subjects.SWARM_ROLLOUTS, f"{subjects.SWARM_ROLLOUTS}_BLOBS", subjects.SWARM_EVALS, "KV_swarm_nodes"]
    wanted = [f"$JS.API.STREAM.INFO.{name}" for name in names]
    for key, prefix in (("beta/swarm.nk", "_INBOX_beta"), ("operator/observer.nk", "_INBOX_observer")):
        errors: list[str] = []
        client = await raw(secured, secured.keys / key, prefix, errors)
        assert await refused_of(client, errors, wanted, subscribe=False) == set(wanted), key
        await client.close()
    operator = await raw(secured, secured.keys / "operator" / "swarm.nk", "_INBOX", [])
    for subject in wanted:
        assert b'"state"' in (await operator.request(subject, b"", timeout=30.0)).data
    await operator.close()


async def test_a_member_asks_nothing_that_it_may_not_and_is_told_so_at_once(secured: SecuredServer, tmp_path: Path):
    before = len(secured.violations())
    plane = await connect_swarm_plane(secured.config("beta", tmp_path), "verifier", timeout_s=5.0)
    for ask in (plane.stream_state(subjects.SWARM_ROLLOUTS), plane.counts(subjects.SWARM_ROLLOUTS, ">")):
        with pytest.raises(AccessDenied, match="only an operator may ask"):
            await ask
    await plane.publish(subjects.evals("beta"), b"x", stream=subjects.SWARM_EVALS, message_id="asks-nothing")
    assert (await plane.ends(subjects.SWARM_EVALS)).messages >= 1
    assert await plane.kv.newest(subjects.SWARM_NODES_BUCKET, 10) is not None
    await plane.close()
    assert secured.violations()[before:] == []


async def entry_of(context: Any, node: str) -> bool:
    return await context.swarm.kv.get(subjects.SWARM_NODES_BUCKET, node) is not None


async def test_the_swarm_plane_refuses_the_keys_of_generator_sampler_and_trainer(secured: SecuredServer, tmp_path: Path):
    elsewhere = SecuredServer(tmp_path / "hub", ["alpha"], plane="swarm", keys=secured.keys)
    elsewhere.start()
    try:
        for role in ("generator", "sampler", "trainer", "verifier", "operator"):
            key, ca = secured.keys / "alpha" / f"{role}.nk", str(elsewhere.ca_file)
            began = time.monotonic()
            with pytest.raises(AccessDenied, match=f"the server refuses the key in {key}: its public key must be in the server's"):
                await connect(elsewhere.url, name="x", timeout_s=100.0, key_file=str(key), ca_file=ca)
            assert time.monotonic() - began < 50.0
    finally:
        elsewhere.stop()
    # Where both planes are one server's, the key leads to the node's own account, which has no
    # stream of the swarm's.
    for role in ROLES:
        plane = await connect_node_plane(secured.config("alpha", tmp_path), role)
        with pytest.raises(TransportError):
            await plane.publish(subjects.rollouts("alpha"), b"x", stream=subjects.SWARM_ROLLOUTS, message_id="x", timeout_s=0.5)
        with pytest.raises(TransportError):
            await plane.read(subjects.SWARM_ROLLOUTS, 1, 1, timeout_s=0.5)
        await plane.close()


async def test_a_direct_gets_reply_stores_nothing_under_another_nodes_subject_and_what_were_stored_there_would_be_refused(
    secured: SecuredServer, tmp_path: Path
):
    """Two defences: the server leads beta's replies into beta's own account, and the border refuses
    what is not alpha's.
    """
    alpha_key, beta_key = SigningKey(new_seed()), SigningKey(new_seed())
    claims = group("alpha", 7)
    honest = sign(group("alpha", 1), alpha_key)
    forgeries = {
        "beta's own signature under alpha's name": encode(sign(claims, beta_key)),
        "alpha's public key on what alpha did not sign": encode(
            SignedRollouts(
                swarm=honest.swarm,
                node="alpha",
                public_key=alpha_key.public_key,
                signature=honest.signature,
                body=encode(claims),
            )
        ),
        "a group that says it is beta's": encode(sign(group("beta", 7), beta_key)),
    }
    expected = [Refusal.UNKNOWN_KEY, Refusal.SIGNATURE, Refusal.AUTHOR]
    border = a_border(tmp_path)
    assert isinstance(border.examine(subjects.rollouts("alpha"), encode(honest), time.time()), Candidate)
    assert border._trust.bind("alpha", alpha_key.public_key, time.time()), "as with its first accepted group"
    beta = await connect_swarm_plane(secured.config("beta", tmp_path), "verifier", timeout_s=5.0)
    client = await raw(secured, secured.keys / "beta" / "swarm.nk", "_INBOX_beta.raw", [])
    victim = subjects.rollouts("alpha")
    try:
        for (what, payload), reason in zip(forgeries.items(), expected, strict=True):
            with pytest.raises(NotConnected, match="the server's permissions forbid this user to ask"):
                await beta.publish(victim, payload, stream=subjects.SWARM_ROLLOUTS, message_id=what, timeout_s=0.5)
            # Without a message id, or the copy would be dropped as a duplicate of it.
            ack = await client.request(subjects.rollouts("beta"), payload)
            request = json.dumps({"seq": json.loads(ack.data)["seq"]}).encode()
            await client.publish(f"$JS.API.DIRECT.GET.{subjects.SWARM_ROLLOUTS}", request, reply=victim)
            await client.flush()
            await asyncio.sleep(0.3)
            stored = await beta.last(subjects.SWARM_ROLLOUTS, victim)
            assert stored is None or stored.inline != payload
            verdict = border.examine(victim, payload, time.time())
            assert isinstance(verdict, Refused)
            assert verdict.reason is reason, what
    finally:
        await client.close()
        await beta.close()


def a_border(folder: Path) -> Border:
    rules = BorderRules(
        node="gamma",
        accept="any",
        own_tasks=frozenset(),
        max_age_s=1000.0,
        max_clock_skew_s=60.0,
        max_bytes=2**20,
        max_completions=64,
        max_answer_chars=1000,
    )
    own = ("gamma", SigningKey(new_seed()).public_key)
    return Border(rules, KnownKeys(folder / "known.txt", own), ReplayMemory(1000), HeldOut([]))


async def test_what_does_not_fit_is_told_at_once_with_file_and_remedy(secured: SecuredServer, tmp_path: Path, nats_url: str):
    garbage, unlisted, other_ca = tmp_path / "garbage.nk", tmp_path / "unlisted.nk", make_certificates(tmp_path / "other")[0]
    garbage.write_text("not a key")
    unlisted.write_bytes(new_seed())
    good, ca = str(secured.keys / "alpha" / "trainer.nk"), str(secured.ca_file)
    cases = [
        (secured.url, None, ca, "wants a key and none is given: set nats.node_key_file"),
        (secured.url, str(unlisted), ca, f"refuses the key in {unlisted}"),
        (secured.url, str(garbage), ca, f"key file {garbage} holds neither an nkey seed nor NATS credentials"),
        (secured.url, str(tmp_path / "none.nk"), ca, "none.nk does not exist: create it with `swarm nats keys`"),
        (secured.url, good, str(other_ca), f"signed by the authority in {other_ca}"),
        (secured.url, good, None, "signed by the system's authorities; set nats.node_ca_file"),
        (secured.url, good, str(garbage), f"certificate authority {garbage}"),
        (nats_url, None, ca, "the server offers no TLS"),
        (nats_url.replace("nats://", "tls://"), None, None, "the server offers no TLS"),
    ]
    for url, key, authority, message in cases:
        began = time.monotonic()
        with pytest.raises(AccessDenied) as denied:
            await connect(url, name="x", timeout_s=100.0, key_file=key, ca_file=authority)
        assert message in str(denied.value)
        assert time.monotonic() - began < 50.0, message


async def test_streams_that_the_operator_has_not_made_are_told_with_the_command_that_makes_them(tmp_path: Path):
    server = SecuredServer(tmp_path, ["alpha"])
    server.start()
    config = server.config("alpha", tmp_path)
    trainer = await connect_node_plane(config, "trainer")
    node, hub = await connect_node_plane(config, "sampler"), await connect_swarm_plane(config, "verifier", timeout_s=5.0)
    try:
        with pytest.raises(MissingStreams, match="`swarm nats init --plane node`"):
            await prepare_node_streams(node, "alpha", create=False)
        with pytest.raises(NoStream, match="`swarm nats init --plane swarm`"):
            await prepare_swarm_streams(hub, create=False)
        weights = tmp_path / "weights.safetensors"
        weights.write_bytes(b"weights")
        with pytest.raises(PolicyStoreError, match="`swarm nats init --plane node`"):
            await JetStreamStore(trainer, "alpha", create=False).publish(weights, 1)
    finally:
        await trainer.close()
        await node.close()
        await hub.close()
        server.stop()


def test_a_service_with_a_wrong_key_ends_at_once_and_is_not_restarted(secured: SecuredServer, tmp_path: Path):
    wrong = secured.keys / "alpha" / "swarm.nk"
    config = tmp_path / "alpha.toml"
    config.write_text(
        f'tasks = [{{ dataset = "gcd" }}]\n[node]\nid = "alpha"\nvar_dir = "{tmp_path}"\n[http]\nbase_port = 0\n'
        # Who waited for the server as for one that is away would still be waiting when this test
        # gives up.
        f'[nats]\nconnect_timeout_s = 600\nnode_url = "{secured.url}"\nnode_ca_file = "{secured.ca_file}"\n'
        f'node_key_file = "{tmp_path}/none.nk"\n'
    )
    command = [sys.executable, "-m", "services.sampler", "--config", str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, "SWARM_LOG__FORMAT": "json"})
    assert ended.returncode == EXIT_CONFIG, ended.stdout + ended.stderr
    assert "none.nk does not exist" in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr
    assert wrong.exists()


async def test_the_demo_needs_no_key(nats_url: str, tmp_path: Path):
    config = load_config(None, {"nats": {"node_url": nats_url}, "tasks": [{"dataset": "gcd"}], "node": {"var_dir": str(tmp_path)}})
    assert (config.nats.node_key_file, config.nats.swarm_key_file, config.nats.create_streams) == ("", "", True)
    plane = await connect_node_plane(config, "trainer")
    assert await plane.kv.buckets() is not None
    await plane.close()
