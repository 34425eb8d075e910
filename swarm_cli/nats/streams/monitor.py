"""Reads from a server's monitoring port what a report says about the server itself and the
cluster's leader.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shared.transport.base import TransportError
from shared.transport.nats.answers import readable
from swarm_cli.nats.streams.findings import storage_finding
from swarm_cli.nats_monitor import answer

TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server's figures. `problem`: why it could not be asked; then the rest is empty."""

    url: str
    problem: str = ""
    name: str = ""
    version: str = ""
    uptime: str = ""
    health: str = ""
    connections: int = 0
    slow_consumers: int = 0
    memory_bytes: int = 0
    store_bytes: int = 0
    store_most_bytes: int = 0
    reserved_bytes: int = 0
    leader: str | None = None
    """Leader of the cluster; None for a single server, empty if there is no leader."""
    offline: tuple[str, ...] = ()

    def findings(self) -> Iterator[str]:
        """A sentence for each thing that is wrong with it."""
        if self.problem:
            yield f"monitoring port {self.url} does not answer: {self.problem}"
            return
        if self.health != "ok":
            yield f"server {self.name} is not healthy: {self.health}"
        if self.leader == "":
            yield f"server {self.name} knows no leader of the cluster: no stream can be made or changed"
        for name in self.offline:
            yield f"server {name} is offline, according to {self.name}"
        yield from storage_finding(f"server {self.name}", self.store_bytes, self.store_most_bytes)


def ask(url: str) -> Server:
    """A server's figures. Never raises: if the server does not answer, `problem` says why."""
    try:
        about, stored, health = (answer(url, page, TIMEOUT_S) for page in ("varz", "jsz", "healthz"))
        with readable("varz, jsz and healthz"):
            meta = stored.get("meta_cluster")
            copies = (meta or {}).get("replicas") or []
            return Server(
                url=url,
                name=str(about["server_name"]),
                version=str(about["version"]),
                uptime=str(about["uptime"]),
                health=str(health["status"] if health["status"] == "ok" else health.get("error") or health["status"]),
                connections=int(about["connections"]),
                slow_consumers=int(about["slow_consumers"]),
                memory_bytes=int(about["mem"]),
                store_bytes=int(stored["storage"]),
                store_most_bytes=int(stored["config"]["max_storage"]),
                reserved_bytes=int(stored["reserved_storage"]),
                leader=None if meta is None else str(meta.get("leader") or ""),
                offline=tuple(str(each.get("name")) for each in copies if each.get("offline")),
            )
    except TransportError as error:
        return Server(url=url, problem=str(error))
