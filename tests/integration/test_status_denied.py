"""A node's pod for people has the key of the node's operator and none for the swarm's server: what
looks at the node shows the node, and says what it cannot show.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from shared.config import load_config
from shared.contracts.streams import ensure_node_streams, ensure_swarm_streams
from shared.identity.keys import SigningKey, create
from shared.transport.connect import connect
from shared.transport.nats.client import PromptTransport
from swarm_cli.installation import DEMO_CONFIG
from swarm_cli.observe.evaluation_log import EvaluationLog
from swarm_cli.observe.snapshot import NoSuchNode, look_at_hub, take_snapshot
from swarm_cli.observe.status import hub_caption, show
from swarm_cli.observe.top import screen
from swarm_cli.target import Target, check_listening
from tests.nats_server import NatsServer


@pytest.fixture
def planes(tmp_path: Path) -> Iterator[tuple[NatsServer, NatsServer]]:
    """A node's server that takes everybody, and a swarm's that wants a key."""
    key: SigningKey = create(tmp_path / "somebody.nk")
    hub = NatsServer(tmp_path / "hub", config=f"authorization {{ users: [{{ nkey: {key.public_key} }}] }}").start()
    node = NatsServer(tmp_path / "node").start()
    yield node, hub
    node.stop()
    hub.stop()


async def test_a_node_is_shown_to_whoever_has_no_key_for_the_swarm(planes: tuple[NatsServer, NatsServer]) -> None:
    node, hub = planes
    plane = await connect(node.url, name="test", timeout_s=10)
    await ensure_node_streams(plane, "alpha")
    await plane.close()
    with pytest.raises(NoSuchNode, match="could not be read.*the nodes there are alpha"):
        await take_snapshot(load_config(DEMO_CONFIG), Target(node.url, hub.url), ["beta"], timeout_s=5.0)
    snapshot = await take_snapshot(load_config(DEMO_CONFIG), Target(node.url, hub.url), ["alpha"], timeout_s=5.0)
    assert [each.node for each in snapshot.nodes] == ["alpha"] and snapshot.swarm_denied
    written = io.StringIO()
    show(snapshot, Console(file=written, width=300))
    on_screen = io.StringIO()
    Console(file=on_screen, width=300).print(screen(snapshot, height=40, width=300, headline=node.url))
    for said in (written.getvalue(), on_screen.getvalue()):
        assert "refuses this command (nats.swarm_key_file)" in said and "train alone" not in said


@pytest.mark.slow
async def test_a_directory_that_cannot_be_read_is_not_shown_as_an_empty_one(tmp_path: Path) -> None:
    asked = "$JS.API.DIRECT.GET.KV_swarm_nodes"
    users = f'default_permissions: {{ publish: {{ deny: ["{asked}", "{asked}.>"] }} }}, users: [{{ user: a, password: a }}]'
    deny = f"authorization {{ {users} }}\nno_auth_user: a"
    hub = NatsServer(tmp_path / "hub", config=deny).start()
    try:
        plane = await connect(hub.url, name="test", timeout_s=10)
        await ensure_swarm_streams(plane)
        seen = await look_at_hub(plane, EvaluationLog())
        assert "directory could not be read" in seen.swarm_problem and "directory could not be read" in hub_caption(seen)
        await plane.close()
    finally:
        hub.stop()


def test_a_connection_whose_tls_is_over_is_ended_all_the_same() -> None:
    """As Python 3.11.2 answers: the TLS layer has let go of its connection."""

    def broken() -> None:
        raise AttributeError("'NoneType' object has no attribute '_abort'")

    ended: list[str] = []
    connection = PromptTransport()
    connection._io_writer = SimpleNamespace(transport=SimpleNamespace(abort=broken))
    connection._bare_io_writer = SimpleNamespace(transport=SimpleNamespace(abort=lambda: ended.append("bare")))
    connection.abort()
    assert ended == ["bare"]


def test_a_look_at_one_of_several_servers_leaves_it_to_the_connection_to_find_one_that_listens() -> None:
    check_listening(Path("var"), Target("tls://127.0.0.1:1,tls://127.0.0.1:2", None))
