"""The connection to the swarm plane, which may be unavailable at the start or at any time."""

from __future__ import annotations

import asyncio

from services.verifier.figures import Figures
from shared.config import NodeConfig
from shared.contracts.streams import prepare_swarm_streams
from shared.runtime.logs import Log
from shared.runtime.planes import connect_swarm_plane
from shared.transport.base import AccessDenied, Transport, TransportError

RETRY_S = 2.0
DENIED_RETRY_S = 30.0
"""A server that refuses the key may accept it later; meanwhile the node trains alone."""
CONNECT_TIMEOUT_S = 5.0


class SwarmLink:
    """Holds the transport once it is connected. From then on the transport reconnects by itself."""

    def __init__(self, config: NodeConfig, transport: Transport | None, figures: Figures, log: Log) -> None:
        """`transport`: the connection made at the start, or None."""
        self._config = config
        self._transport = transport
        self._given = transport
        self._figures = figures
        self._log = log
        self._was_connected = transport is not None
        self._told = ""

    @property
    def transport(self) -> Transport | None:
        """The swarm plane's transport while it can be reached, else None."""
        return self._transport if self._transport is not None and self._transport.connected else None

    @property
    def held(self) -> Transport | None:
        """The transport, even while it has lost its connection."""
        return self._transport

    async def run(self) -> None:
        """Connect in the background, and ensure that the streams exist whenever the swarm plane
        comes back.
        """
        if self._config.nats.swarm_url is None:
            return
        self._figures.border.connected(self._was_connected)
        while True:
            if self._transport is None:
                await self._connect()
            connected = self.transport is not None
            if connected and not self._was_connected:
                connected = await self._ensure_streams()
            if connected != self._was_connected:
                self._log.info("swarm_plane", connected=connected)
            self._was_connected = connected
            self._figures.border.connected(connected)
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Close the connection if it was made here; the one given at the start belongs to the
        runtime.
        """
        if self._transport is not None and self._transport is not self._given:
            await self._transport.close()

    async def _connect(self) -> None:
        try:
            self._transport = await connect_swarm_plane(self._config, "verifier", timeout_s=CONNECT_TIMEOUT_S)
        except AccessDenied as error:
            self._log.error("swarm_plane_denied", reason=str(error), consequence="training alone", retry_s=DENIED_RETRY_S)
            await asyncio.sleep(DENIED_RETRY_S)
        except TransportError as error:
            self._log.debug("swarm_plane_away", reason=str(error))

    async def _ensure_streams(self) -> bool:
        assert self._transport is not None
        try:
            nats = self._config.nats
            await prepare_swarm_streams(self._transport, create=nats.create_streams, replicas=nats.swarm_replicas)
        except TransportError as error:
            if str(error) != self._told:
                self._log.warning("swarm_streams", reason=str(error), consequence="training alone", retry_s=RETRY_S)
            self._told = str(error)
            return False
        self._told = ""
        return True
