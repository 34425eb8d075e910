"""Records which run a node's streams on a server belong to. A run must not use the batches,
positions and policies of another run, even one that has ended.

The first process of a run writes the record, whichever role it has, so any role's key may write it.
The server takes one (`StreamSpec.write_once`), so that no role can replace it afterwards.
"""

from __future__ import annotations

import asyncio
import socket
import time
import uuid

from shared.contracts.codec import decode, encode
from shared.contracts.control import NameOwner
from shared.contracts.subjects import node_name, node_name_stream
from shared.contracts.wire import MessageError
from shared.transport.base import Conflict, NotConnected, Transport, TransportError


class NameTaken(Exception):
    """Another run or process has the name; the message says which, and what to do."""


_ATTEMPTS, _PAUSE_S = 20, 0.1


async def check_name(plane: Transport, node: str, run: str, where: str) -> None:
    """Refuse, before anything is written, if the name belongs to another run. `where`: the server's
    name in messages.

    Raises:
        NameTaken: it does. TransportError: the server does not answer.
    """
    try:
        await plane.stream_state(node_name_stream(node))
    except NotConnected:
        raise
    except TransportError:
        return  # There is no stream, so nobody has the name.
    _refuse_other(await name_owner(plane, node), node, run, where)


async def take_name(plane: Transport, node: str, run: str, where: str) -> None:
    """Record this run as the name's owner if it has none. Raises what `check_name` raises."""
    mine = NameOwner(run=run, host=socket.gethostname(), taken_at=time.time())
    for _ in range(_ATTEMPTS):
        owner = await name_owner(plane, node)
        if owner is not None:
            _refuse_other(owner, node, run, where)
            return
        try:
            await plane.publish(node_name(node), encode(mine), stream=node_name_stream(node), message_id=uuid.uuid4().hex)
        except Conflict:
            await asyncio.sleep(_PAUSE_S)  # Another process was faster; the read came from a server that lags.
        else:
            return
    raise NotConnected(f"{where}: the owner of the name {node} cannot be read (stream {node_name_stream(node)})")


async def name_owner(plane: Transport, node: str) -> NameOwner | None:
    """The run that the name belongs to; None if it is nobody's.

    Raises:
        NameTaken: the record cannot be read. TransportError: the server does not answer, or has no
            such stream.
    """
    message = await plane.last(node_name_stream(node), node_name(node))
    if message is None:
        return None
    try:
        return decode(await plane.payload(message), NameOwner)
    except MessageError as error:
        raise NameTaken(
            f"the owner of the name {node} cannot be read (stream {node_name_stream(node)}: {error}): run all of the node's "
            "services in the same version"
        ) from None


def _refuse_other(owner: NameOwner | None, node: str, run: str, where: str) -> None:
    if owner is None or owner.run == run:
        return
    raise NameTaken(
        f"the name {node} is taken: its streams at {where} belong to run {owner.run} (first started on {owner.host}), and run "
        f"{run} would overwrite its state. Choose another name (node.id, or `swarm up --name`), or go on with that run where its "
        f"files are (node.run, or `swarm up --run {owner.run}`)"
    )
