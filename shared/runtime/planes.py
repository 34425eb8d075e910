"""Connects to a node's two planes as configured: url, key, certificate authority, private inbox."""

from __future__ import annotations

from shared.config.node_sections import ProcessConfig
from shared.identity.permissions import SWARM_ACCOUNT, node_account_name, user_account
from shared.roles import OPERATOR
from shared.transport.base import Transport
from shared.transport.connect import connect

REFUSED_S = 60.0
"""For how long a service that starts tries a key that the server refuses: a newcomer's line may be
on its way, and a server may have lost its accounts and get them back.
"""


def for_process(template: str, node: str, role: str) -> str:
    """`template` with this process's node and role in place of {node} and {role}."""
    return template.replace("{node}", node).replace("{role}", role)


async def connect_node_plane(
    config: ProcessConfig, role: str, *, timeout_s: float | None = None, url: str = "", refused_s: float = 0.0
) -> Transport:
    """The node plane, as the user of `role` (`operator` for a person's commands). Raises what
    `connect` raises, which explains `refused_s`.
    """
    nats, node = config.nats, config.node.id
    return await connect(
        url or nats.node_url,
        name=f"{node}-{role}",
        timeout_s=timeout_s or nats.connect_timeout_s,
        key_file=for_process(nats.node_key_file, node, role) or None,
        ca_file=nats.node_ca_file or None,
        inbox_prefix=for_process(nats.inbox_prefix, node, role),
        refused_s=refused_s,
        accounts=(user_account(node_account_name(node), role),),
    )


async def connect_swarm_plane(
    config: ProcessConfig, role: str, *, timeout_s: float, url: str = "", refused_s: float = 0.0
) -> Transport:
    """The swarm plane, as this node's user. Raises what `connect` raises, which explains
    `refused_s`, and ValueError for a node without a swarm.
    """
    nats, node = config.nats, config.node.id
    chosen = url or nats.swarm_url
    if chosen is None:
        raise ValueError(f"node {node} has no swarm plane (nats.swarm_url is none)")
    key_file = for_process(nats.swarm_key_file, node, role)
    return await connect(
        chosen,
        name=f"{node}-border" if role == "verifier" else f"{node}-{role}",
        timeout_s=timeout_s,
        key_file=key_file or None,
        ca_file=nats.swarm_ca_file or None,
        inbox_prefix=for_process(nats.inbox_prefix, node, role),
        domain=nats.swarm_domain,
        may_ask=not key_file,
        hub=chosen != nats.node_url,
        refused_s=refused_s,
        # A person's command may have been given the operator's key or the node's.
        accounts=(user_account(SWARM_ACCOUNT, node), *([SWARM_ACCOUNT] if role == OPERATOR else [])),
    )
