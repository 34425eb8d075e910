"""Secures a service process's name: locks the run's folder, checks which run has the name, takes
the lease, and renews it until the end.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from shared.cancelling import cancel_and_wait
from shared.config.node_sections import ProcessConfig
from shared.contracts import subjects
from shared.contracts.control import LeaseRecord
from shared.contracts.status_figures import STARTING, STATUS_INTERVAL_S
from shared.contracts.subjects import FINDINGS_KEY, SENDERS_PREFIX
from shared.lease.folder import FolderLock, FolderTaken
from shared.lease.holder import Lease, LeaseLost, described
from shared.lease.name import NameTaken, take_name
from shared.roles import SEVERAL
from shared.runtime.logs import Log
from shared.runtime.status import StatusBoard
from shared.transport.base import NotConnected, Transport, TransportError

RENEWALS = 6
"""How often a lease is renewed within its time."""
_RELEASE_S = 1.0
_FOLDER_PATIENCE_S = 10.0
"""How long a process in orderly shutdown may take to release the folder for its successor."""


def status_replica(role: str, replica: str) -> str:
    """The replica that the process's status names."""
    return replica if role in SEVERAL else subjects.SOLE_REPLICA


def lease_name(role: str, replica: str) -> str:
    """`trainer`, or `generator.<replica>`: a name that only one process may have."""
    return subjects.lease_key(role, replica if role in SEVERAL else "").removeprefix(subjects.LEASE_PREFIX)


def sole_keys(role: str, replica: str) -> tuple[str, ...]:
    """Keys of the node's bucket that only the holder of the lease writes."""
    status = subjects.status_key(role, status_replica(role, replica))
    if role == "trainer":
        return subjects.POLICY_KEY, subjects.TRAINER_KEY, FINDINGS_KEY, status
    if role == "sampler":
        return subjects.SAMPLER_KEY, status
    return (f"{SENDERS_PREFIX}{replica}", status) if role == "verifier" else (status,)


async def lock_folder(config: ProcessConfig, role: str, log: Log) -> FolderLock | None:
    """Lock this process's part of the run's folder. None if the folder does not support locks; then
    only the lease keeps others away.

    Raises: NameTaken: another process on this machine has it.
    """
    name = lease_name(role, config.node.replica)
    try:
        return await FolderLock.take(
            config.node.run_dir / f"{name}.lock",
            who=f"{role} of {config.node.id}",
            patience_s=min(_FOLDER_PATIENCE_S, config.node.lease_s),
        )
    except FolderTaken as error:
        raise NameTaken(str(error)) from None
    except OSError as error:
        log.warning(
            "folder_not_locked",
            reason=str(error),
            consequence=f"after a crash, a restart waits for {config.node.lease_s:g} s",
        )
        return None


async def take_lease(plane: Transport, config: ProcessConfig, status: StatusBoard, place: str, log: Log) -> Lease:
    """Wait until this process holds the lease of its role or replica. Its state says meanwhile for
    whose lease it waits, and until when; it is reported once the holder has missed two renewals.

    Raises: NameTaken: another run has the name, or a live process has the lease. NotConnected: the
    server does not answer for too long.
    """
    node, lease_s, role = config.node.id, config.node.lease_s, status.role
    await take_name(plane, node, config.node.run, config.nats.node_url)
    record = LeaseRecord(
        holder=uuid.uuid4().hex,
        place=place,
        run=config.node.run,
        host=socket.gethostname(),
        pid=os.getpid(),
        taken_at=time.time(),
        lease_s=lease_s,
    )
    key = subjects.LEASE_PREFIX + lease_name(role, config.node.replica)
    lease = Lease(plane.kv, subjects.node_bucket(node), key, record)
    started, told, reported = time.monotonic(), False, 0.0
    reason = f"the holder of {key} was not known in time"
    while time.monotonic() - started < 3 * lease_s + config.nats.connect_timeout_s:
        try:
            verdict = await lease.look()
        except TransportError as error:
            verdict, reason = "wait", str(error)
        if verdict == "take":
            status.state(STARTING)
            return lease
        if verdict == "held":
            raise NameTaken(
                f"node {node} has a running {lease_name(role, config.node.replica)} already: {described(lease.seen)} has just "
                "renewed its lease. End that one, or choose another name (node.id, or `swarm up --name`); one more generator or "
                "verifier of the same node needs its own node.replica"
            )
        if not told and lease.seen is not None:
            told, lease_s = True, max(lease_s, lease.seen.lease_s)
            log.info("waiting_for_the_name", held_by=described(lease.seen), until=f"it is renewed, or silent for {lease_s:g} s")
        if lease.seen is not None:
            until = time.strftime("%H:%M:%S UTC", time.gmtime(time.time() + lease.wait_s))
            status.state(f"waiting until {until} for the lease of {described(lease.seen)}")
            # Until then the key of the status is the holder's. One that comes back writes it again.
            if lease_s - lease.wait_s > 2 * lease_s / RENEWALS and time.monotonic() - reported > STATUS_INTERVAL_S:
                await status.report_once(plane)
                reported = time.monotonic()
        await asyncio.sleep(min(0.5, lease_s / 20))
    raise NotConnected(f"{config.nats.node_url}: {reason}. Check the NATS server and its permissions (`swarm nats config`)")


@asynccontextmanager
async def leased(plane: Transport, lease: Lease, config: ProcessConfig, role: str, log: Log) -> AsyncIterator[Transport]:
    """The node plane for the holder of `lease`, which is renewed meanwhile and released at the end.
    Raises TransportError.
    """
    renewing = asyncio.create_task(_renew(lease, log))
    try:
        await lease.claim_keys(sole_keys(role, config.node.replica))
        yield plane.fenced(lease)
    finally:
        await cancel_and_wait(renewing)
        if plane.connected:
            with suppress(TransportError, TimeoutError):
                async with asyncio.timeout(_RELEASE_S):
                    await lease.release()


async def _renew(lease: Lease, log: Log) -> None:
    while True:
        await asyncio.sleep(lease.lease_s / RENEWALS)
        try:
            await lease.renew()
        except LeaseLost:
            return
        except TransportError as error:
            log.debug("lease_not_renewed", reason=str(error))
