"""Each user of a secured server publishes and subscribes to what its permissions allow; all else
the real server refuses.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from shared.contracts import subjects
from shared.identity.permissions import Permissions, node_role, swarm_node
from shared.roles import ROLES
from tests.integration.nats_users import everything_anybody_may_publish, raw, refused_of
from tests.secured_server import SecuredServer
from tests.unit.test_permissions import matches

USERS = [("swarm", swarm_node("alpha")), *((role, node_role("alpha", role)) for role in ROLES)]


@pytest.mark.parametrize(("user", "permissions"), USERS, ids=[name for name, _ in USERS])
async def test_the_server_lets_each_user_publish_and_subscribe_to_what_is_allowed_and_nothing_else(
    tmp_path: Path, user: str, permissions: Permissions
):
    """Every permission of every user is tried by every user, on a server without streams so that a
    purge does no harm.
    """
    server = SecuredServer(tmp_path, ["alpha", "beta"])
    server.start()
    errors: list[str] = []
    client = await raw(server, server.keys / "alpha" / f"{user}.nk", f"_INBOX_alpha.{user}", errors)
    try:
        wanted = everything_anybody_may_publish()
        forbidden = {subject for subject in wanted if not any(matches(pattern, subject) for pattern in permissions.publish)}
        assert await refused_of(client, errors, wanted, subscribe=False) == forbidden
        assert 0 < len(forbidden) < len(wanted)
        inboxes = [f"_INBOX_{node}.{role}.x" for node, role in itertools.product(("alpha", "beta"), ROLES)]
        keys = [f"$KV.node_alpha.{key}" for key in ("policy", "sampler", "trainer", "ledger")]
        wanted = [
            *inboxes,
            *keys,
            "_INBOX.>",
            "_INBOX.x",
            ">",
            "swarm.>",
            subjects.rollouts("alpha"),
            "$JS.EVENT.>",
            "node.>",
        ]
        forbidden = {subject for subject in wanted if not any(matches(pattern, subject) for pattern in permissions.subscribe)}
        assert await refused_of(client, errors, wanted, subscribe=True) == forbidden
        assert 0 < len(forbidden) < len(wanted)
    finally:
        await client.close()
        server.stop()
