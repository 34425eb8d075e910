"""NATS servers for chaos tests: with the shipped configuration, and a cluster of three."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from swarm_cli.installation import NATS_CONFIG
from tests.nats_server import NatsServer, free_port


class ShippedServer(NatsServer):
    """Runs the server with the configuration that `swarm up` gives it."""

    def configure(self, config: str = "", jetstream: str = "") -> None:
        """Nothing is added: the promise is about what is shipped."""
        shutil.copy(NATS_CONFIG, self._config_file)


class Cluster:
    """Three servers on this machine that replicate each other's streams."""

    def __init__(self, folder: Path) -> None:
        routes = [free_port() for _ in range(3)]
        peers = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
        self.servers = {
            f"s{number}": NatsServer(
                folder / f"s{number}",
                jetstream="sync_interval: always",
                config=f"server_name: s{number}\ncluster {{ name: chaos, host: 127.0.0.1, port: {route}, routes: [{peers}] }}\n",
            )
            for number, route in enumerate(routes)
        }

    @property
    def url(self) -> str:
        """All three, as a service is given them."""
        return ",".join(server.url for server in self.servers.values())

    def start(self) -> Cluster:
        """Start all; they elect leaders within seconds."""
        for server in self.servers.values():
            server.start()
        return self

    def kill(self) -> None:
        """End all."""
        for server in self.servers.values():
            server.kill()

    async def restart(self, name: str, down_s: float) -> None:
        """Bring a killed server back after `down_s`."""
        await asyncio.sleep(down_s)
        await asyncio.to_thread(self.servers[name].start)
