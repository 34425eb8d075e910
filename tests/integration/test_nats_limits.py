"""How much of the swarm's server one key of a member may hold: connections, subscriptions, memory,
subjects, others' scores.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest

from shared.contracts import subjects
from shared.contracts.limits import HOUR_S, SWARM_LIMITS
from shared.runtime.planes import connect_swarm_plane
from shared.transport.base import bucket_stream
from shared.transport.nats.claims import claims_of
from swarm_cli.errors import CommandError
from swarm_cli.nats.server_config import MEMBER_CONNECTIONS, MEMBER_SUBSCRIPTIONS
from tests.integration.nats_users import raw
from tests.integration.running_verifier import until
from tests.secured_server import SecuredServer

ANSWER_S = 30.0


@pytest.fixture(params=["text", "claims"])
def hub(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SecuredServer]:
    server = SecuredServer(tmp_path, ["alpha", "mallory"], accounts=request.param)
    server.start()
    server.init("swarm", server.config("alpha", tmp_path))
    yield server
    server.kill()


@asynccontextmanager
async def user(hub: SecuredServer, name: str, errors: list[str] | None = None) -> AsyncIterator[Any]:
    """A client with a node's swarm key, or the operator's."""
    client = await raw(hub, hub.keys / name / "swarm.nk", f"_INBOX_{name}.x", [] if errors is None else errors)
    try:
        yield client
    finally:
        with suppress(nats.errors.Error):
            await asyncio.wait_for(client.close(), ANSWER_S)


async def connect_once(hub: SecuredServer, name: str) -> None:
    """Connect without another try; raises what the server says."""
    context = ssl.create_default_context(cafile=str(hub.ca_file))
    key = hub.signing_in(hub.keys / name / "swarm.nk")
    client = await nats.connect(hub.url, **key, tls=context, allow_reconnect=False, max_reconnect_attempts=1)
    await client.close()


async def state_of(operator: Any, stream: str) -> dict[str, Any]:
    return dict(json.loads((await operator.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=ANSWER_S)).data))


async def configs(operator: Any) -> dict[str, dict[str, Any]]:
    """Settings of all streams, by name."""
    found = json.loads((await operator.request("$JS.API.STREAM.LIST", b"", timeout=ANSWER_S)).data)["streams"]
    return {each["config"]["name"]: {**each["config"], "metadata": {}} for each in found}


def peak_bytes(pid: int) -> int:
    """The most memory that a process ever had."""
    (peak_kib,) = re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(peak_kib) * 1024


def long_id() -> str:
    return os.urandom(30_000).hex()


async def until_forgotten(member: Any, subject: str, message_id: str) -> None:
    """Wait until the server takes a message with this id again."""

    async def forgotten() -> bool:
        answer = await member.request(subject, b"x", headers={"Nats-Msg-Id": message_id}, timeout=ANSWER_S)
        return not json.loads(answer.data).get("duplicate", False)

    await until(forgotten, 2 * ANSWER_S)


async def test_a_key_has_no_more_connections_than_its_limit_and_others_still_have_theirs(hub: SecuredServer, tmp_path: Path):
    held = [await raw(hub, hub.keys / "mallory" / "swarm.nk", f"_INBOX_mallory.{n}", []) for n in range(MEMBER_CONNECTIONS)]
    try:
        with pytest.raises((nats.errors.Error, OSError)):
            await connect_once(hub, "mallory")
        assert "maximum account active connections exceeded" in hub.log_file.read_text()
        async with user(hub, "alpha") as alpha:
            assert b"seq" in (await alpha.request(subjects.rollouts("alpha"), b"x", timeout=ANSWER_S)).data
        # A service that finds its node's connections used up waits for one: no refusal for good.
        last = asyncio.create_task(connect_swarm_plane(hub.config("mallory", tmp_path), "verifier", timeout_s=60.0))
        await until(lambda: hub.log_file.read_text().count("maximum account active connections exceeded") >= 3, 120)
        await held.pop().close()
        plane = await last
        assert plane.connected
        await plane.close()
    finally:
        for client in held:
            await client.close()


async def test_a_reload_brings_limits_to_accounts_that_had_none(tmp_path: Path):
    """As the operator of a server of before does it: write the configuration anew, reload."""
    server = SecuredServer(tmp_path, ["alpha", "mallory"])
    whole = server._text
    server._text = re.sub(r"^ +limits .*$", "", whole, flags=re.MULTILINE)
    assert server._text != whole
    server.configure()
    server.start()
    held = []
    try:
        held = [
            await raw(server, server.keys / "mallory" / "swarm.nk", f"_INBOX_mallory.{n}", []) for n in range(MEMBER_CONNECTIONS)
        ]
        await connect_once(server, "mallory")
        server._text = whole
        server.configure()
        server.reload()
        await until(lambda: "Reloaded server configuration" in server.log_file.read_text(), ANSWER_S)
        with pytest.raises((nats.errors.Error, OSError)):
            await connect_once(server, "mallory")
    finally:
        for client in held:
            await client.close()
        server.kill()


async def test_a_connection_has_no_more_subscriptions_than_its_limit(hub: SecuredServer):
    """Up to eight below the limit all are taken, as a client has a few of its own; one more than
    the limit is refused.
    """

    def subscribe(first: int, end: int) -> None:
        lines = (b"SUB _INBOX_mallory.x.%d %d\r\n" % (number, 10_000 + number) for number in range(first, end))
        mallory._transport.write(b"".join(lines))

    async with user(hub, "mallory") as mallory, user(hub, "operator") as operator:
        subscribe(0, MEMBER_SUBSCRIPTIONS - 8)
        await mallory.flush(timeout=ANSWER_S)
        assert "maximum subscriptions exceeded" not in hub.log_file.read_text()
        subscribe(MEMBER_SUBSCRIPTIONS - 8, MEMBER_SUBSCRIPTIONS + 1)
        await until(lambda: "maximum subscriptions exceeded" in hub.log_file.read_text(), ANSWER_S)
        with suppress(nats.errors.Error):
            await mallory.flush(timeout=ANSWER_S)
        assert b"config" in (await operator.request(f"$JS.API.STREAM.INFO.{subjects.SWARM_EVALS}", b"", timeout=ANSWER_S)).data


async def test_who_does_not_read_what_it_asked_for_is_cut_where_the_configuration_says(hub: SecuredServer):
    async with user(hub, "alpha") as alpha:
        for _ in range(34):
            await alpha.request(subjects.rollouts("alpha"), os.urandom(4_000_000), timeout=ANSWER_S)
    mallory = await raw(hub, hub.keys / "mallory" / "swarm.nk", "_INBOX_mallory.x", [])
    try:
        await mallory.subscribe("_INBOX_mallory.x.*")
        await mallory.flush(timeout=ANSWER_S)
        mallory._reading_task.cancel()
        mallory._transport._io_writer.transport.pause_reading()
        everything = json.dumps({"seq": 1, "batch": 1000, "max_bytes": 2**30}).encode()
        await mallory.publish(f"$JS.API.DIRECT.GET.{subjects.SWARM_ROLLOUTS}", everything, reply="_INBOX_mallory.x.1")
        await until(lambda: f"MaxPending of {96 * 2**20} Exceeded" in hub.log_file.read_text(), ANSWER_S)
    finally:
        mallory._transport._io_writer.transport.abort()
        with suppress(nats.errors.Error, TimeoutError):
            await asyncio.wait_for(mallory.close(), 5.0)


async def test_a_directory_entry_has_at_most_160_kib(hub: SecuredServer):
    """And a little more: the stream's bound counts headers too, and leaves room for them."""
    subject = f"$KV.{subjects.SWARM_NODES_BUCKET}.mallory"
    async with user(hub, "mallory") as mallory, user(hub, "operator") as operator:
        stored = json.loads((await mallory.request(subject, b"x" * 160 * 1024, timeout=ANSWER_S)).data)
        assert stored["seq"] == 1, stored
        refused = json.loads((await mallory.request(subject, b"x" * 162 * 1024, timeout=ANSWER_S)).data)
        assert "message size exceeds maximum" in refused["error"]["description"]
        assert (await state_of(operator, bucket_stream(subjects.SWARM_NODES_BUCKET)))["state"]["messages"] == 1


async def test_spectators_send_at_most_64_kib_a_message(hub: SecuredServer):
    client = await raw(hub, hub.keys / "operator" / "observer.nk", "_INBOX_observer.x", [])
    try:
        subject = f"$JS.API.DIRECT.GET.{subjects.SWARM_EVALS}"
        await client.publish(subject, b"x" * 64 * 1024)
        await client.flush(timeout=ANSWER_S)
        client._max_payload = 2**23  # an ill-meaning client takes no notice of what the server says
        await client.publish(subject, b"x" * (64 * 1024 + 1))
        await until(lambda: "maximum payload exceeded: 65537 vs 65536" in hub.log_file.read_text(), ANSWER_S)
    finally:
        with suppress(nats.errors.Error):
            await asyncio.wait_for(client.close(), ANSWER_S)


def test_the_running_server_limits_a_members_leaf_connections_to_four_and_gives_others_none(hub: SecuredServer):
    """Of the configuration that the server runs: a fifth leaf would take a server for each."""
    text = hub._config_file.read_text()
    leaves = dict(re.findall(r"^  (\w+) \{\n    limits \{ .*max_leafnodes: (\d+),", text, flags=re.MULTILINE))
    if hub.accounts == "claims":
        tokens = dict(re.findall(r"^  # (\w+)\n  A\w+: (\S+)$", text, flags=re.MULTILINE))
        limits = {name: claims_of(token)["nats"]["limits"] for name, token in tokens.items()}
        leaves = {name: str(each["leaf"]) for name, each in limits.items() if each["conn"] != -1}
    assert {name for name, most in leaves.items() if most != "0"} == {"SWARM_ALPHA", "SWARM_MALLORY"}
    assert leaves["SWARM_ALPHA"] == leaves["SWARM_MALLORY"] == "4"


async def test_a_member_has_four_subjects_and_makes_up_no_others(hub: SecuredServer):
    """Its groups, their chunks, its scores and its directory entry; nothing below, beside or above
    them, and no other node's.
    """
    directory = bucket_stream(subjects.SWARM_NODES_BUCKET)
    entry = f"$KV.{subjects.SWARM_NODES_BUCKET}"
    streams = (subjects.SWARM_ROLLOUTS, f"{subjects.SWARM_ROLLOUTS}_BLOBS", subjects.SWARM_EVALS, directory)
    async with user(hub, "mallory") as mallory, user(hub, "operator") as operator:
        before = {name: (await state_of(operator, name))["state"]["messages"] for name in streams}
        own = (subjects.rollouts("mallory"), f"blob.{subjects.rollouts('mallory')}", subjects.evals("mallory"), f"{entry}.mallory")
        for subject in own:
            for made_up in (f"{subject}.gcd", f"{subject}.made-up-1", f"{subject}-2", subject.replace("mallory", "nobody")):
                await mallory.publish(made_up, b"x")
        for subject in own:
            await mallory.request(subject, b"x", timeout=ANSWER_S)
        for name in streams:
            state = (await state_of(operator, name))["state"]
            assert (name, state["messages"], state["num_subjects"]) == (name, before[name] + 1, before[name] + 1)


async def test_one_member_cannot_push_out_others_scores(hub: SecuredServer):
    """As many reports as fill the stream several times over if nothing bounded one node's."""
    size, bound = SWARM_LIMITS.eval_max_bytes, SWARM_LIMITS.evals_max_per_node
    async with user(hub, "alpha") as alpha, user(hub, "mallory") as mallory, user(hub, "operator") as operator:
        await alpha.request(subjects.evals("alpha"), b"score", timeout=ANSWER_S)
        config = (await state_of(operator, subjects.SWARM_EVALS))["config"]
        sent = max(bound + 100, min(1.2 * config["max_bytes"] / size, 2000))
        body = os.urandom(size)
        for number in range(round(sent)):
            await mallory.publish(subjects.evals("mallory"), body)
            if number % 50 == 49:
                await mallory.request(subjects.evals("mallory"), body, timeout=ANSWER_S)
        newest = json.dumps({"last_by_subj": subjects.evals("alpha")}).encode()
        answer = await alpha.request(f"$JS.API.DIRECT.GET.{subjects.SWARM_EVALS}", newest, timeout=ANSWER_S)
        assert answer.data == b"score"
        state = (await state_of(operator, subjects.SWARM_EVALS))["state"]
        assert state["messages"] == bound + 1 and state["bytes"] * 16 < config["max_bytes"]


async def test_no_stream_of_the_swarm_knows_message_ids_for_longer_than_two_seconds(hub: SecuredServer):
    async with user(hub, "operator") as operator:
        windows = {name: config["duplicate_window"] for name, config in (await configs(operator)).items()}
    directory = bucket_stream(subjects.SWARM_NODES_BUCKET)
    assert windows.keys() == {subjects.SWARM_ROLLOUTS, f"{subjects.SWARM_ROLLOUTS}_BLOBS", subjects.SWARM_EVALS, directory}
    assert set(windows.values()) == {2 * 10**9}


async def test_long_message_ids_of_one_member_do_not_gather_in_the_servers_memory(hub: SecuredServer):
    """A server holds each id for the stream's duplicate window, also of messages that are gone.
    With a window of two minutes this flood took it to 424 MB, with two seconds to 134 MB.
    """
    subject = f"$KV.{subjects.SWARM_NODES_BUCKET}.mallory"
    async with user(hub, "mallory") as mallory:
        for _ in range(5):
            for number in range(800):
                newest = long_id()
                await mallory.publish(subject, b"x", headers={"Nats-Msg-Id": newest})
                if number % 25 == 24:  # so that little waits in the server's queue, which takes memory too
                    await mallory.request(subject, b"x", timeout=ANSWER_S)
            await until_forgotten(mallory, subject, newest)
    assert peak_bytes(hub.pid) < 250 * 10**6


async def test_init_shortens_the_time_for_which_a_server_of_before_knows_message_ids(hub: SecuredServer, tmp_path: Path):
    """Without `--lower`, because no message is lost; a node leaves the swarm's streams alone."""
    subject = f"$KV.{subjects.SWARM_NODES_BUCKET}.mallory"
    async with user(hub, "mallory") as mallory, user(hub, "operator") as operator:
        for name, config in (await configs(operator)).items():
            body = json.dumps({**config, "duplicate_window": 120 * 10**9}).encode()
            assert "error" not in json.loads((await operator.request(f"$JS.API.STREAM.UPDATE.{name}", body, timeout=ANSWER_S)).data)
        first = long_id()
        for _ in range(2):
            stored = await mallory.request(subject, b"x", headers={"Nats-Msg-Id": first}, timeout=ANSWER_S)
        assert json.loads(stored.data)["duplicate"]
        await asyncio.to_thread(hub.init, "swarm", hub.config("alpha", tmp_path))
        assert {config["duplicate_window"] for config in (await configs(operator)).values()} == {2 * 10**9}
        await until_forgotten(mallory, subject, first)


async def test_init_gives_streams_of_before_the_bounds_of_now_when_told_to_lower_them_and_keeps_what_fits(
    hub: SecuredServer, tmp_path: Path
):
    bounds = SWARM_LIMITS
    async with user(hub, "alpha") as alpha, user(hub, "operator") as operator:
        before = (await state_of(operator, subjects.SWARM_EVALS))["config"]
        before |= {
            "max_msgs_per_subject": -1,
            "max_bytes": 256 * 2**20,
            "max_msg_size": 256 * 1024,
            "max_age": round(HOUR_S) * 10**9,
        }
        before.pop("metadata", None)
        update = f"$JS.API.STREAM.UPDATE.{subjects.SWARM_EVALS}"
        assert "error" not in json.loads((await operator.request(update, json.dumps(before).encode(), timeout=ANSWER_S)).data)
        for number in range(bounds.evals_max_per_node + 20):
            await alpha.publish(subjects.evals("alpha"), b"%d" % number)
        await alpha.flush(timeout=ANSWER_S)
        bucket = bucket_stream(subjects.SWARM_NODES_BUCKET)
        for name, changed in ((subjects.SWARM_ROLLOUTS, {"description": "older"}), (bucket, {"max_age": 0})):
            config = (await state_of(operator, name))["config"] | changed
            config.pop("metadata", None)
            request = operator.request(f"$JS.API.STREAM.UPDATE.{name}", json.dumps(config).encode(), timeout=ANSWER_S)
            assert "error" not in json.loads((await request).data)
        with pytest.raises(CommandError, match=f"max_msgs_per_subject from no limit to.*{bucket}.*max_age_s from no limit to"):
            await asyncio.to_thread(hub.init, "swarm", hub.config("alpha", tmp_path))
        first = await state_of(operator, subjects.SWARM_ROLLOUTS)
        assert first["config"]["description"] == "older", "a command that refuses changes no stream, also none that it may"
        found = await state_of(operator, subjects.SWARM_EVALS)
        assert found["state"]["messages"] == bounds.evals_max_per_node + 20
        await asyncio.to_thread(hub.init, "swarm", hub.config("alpha", tmp_path), "--lower")
        found = await state_of(operator, subjects.SWARM_EVALS)
        assert found["config"]["max_msgs_per_subject"] == bounds.evals_max_per_node
        assert found["config"]["max_bytes"] == bounds.evals_max_bytes
        assert found["state"]["messages"] == bounds.evals_max_per_node
        oldest = await alpha.request(
            f"$JS.API.DIRECT.GET.{subjects.SWARM_EVALS}", json.dumps({"seq": 21}).encode(), timeout=ANSWER_S
        )
        assert oldest.data == b"20"
