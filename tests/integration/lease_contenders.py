"""Processes that all want to be one node's trainer and write its position as fast as they may:
`python -m tests.integration.lease_contenders FOLDER LEASE_S URL...` starts one for each url.

Each says with a line in `FOLDER/<number>.log` what the server acknowledged. A life that loses the
lease ends, and the process begins another one. They are forked after the imports, so that five cost
little more than one.
"""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from pathlib import Path

import structlog

from shared.config import NodeConfig, load_config
from shared.contracts.subjects import TRAINER_KEY, node_bucket
from shared.lease.holder import LeaseLost
from shared.lease.name import NameTaken
from shared.runtime.naming import leased, take_lease
from shared.runtime.status import StatusBoard
from shared.transport.base import TransportError
from shared.transport.connect import connect
from tests.constants import with_constants

NODE = "alpha"
WRITE_EVERY_S = 0.01


async def live(config: NodeConfig, log: Path) -> None:
    """One life: wait for the lease, then write under it until it is lost."""
    plane = await connect(config.nats.node_url, name=log.stem, timeout_s=60.0)
    life, number = uuid.uuid4().hex[:8], 0
    try:
        lease = await take_lease(plane, config, StatusBoard(NODE, "trainer", "0"), "", structlog.get_logger())
        async with leased(plane, lease, config, "trainer", structlog.get_logger()) as node:
            while True:
                number += 1
                try:
                    revision = await node.kv.put(node_bucket(NODE), TRAINER_KEY, f"{life} {number}".encode())
                    with log.open("a") as file:
                        file.write(f"{revision} {life} {number}\n")
                except LeaseLost:
                    raise
                except TransportError:
                    pass  # as the services do: tried again
                await asyncio.sleep(WRITE_EVERY_S)
    finally:
        await plane.close()


async def contend(config: NodeConfig, log: Path) -> None:
    """Lives, one after the other."""
    while True:
        try:
            await live(config, log)
        except (NameTaken, TransportError):
            await asyncio.sleep(0.05)


def main() -> None:
    folder, lease_s, urls = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    structlog.configure(processors=[structlog.processors.JSONRenderer()], logger_factory=structlog.ReturnLoggerFactory())
    for number, url in enumerate(urls):
        node = {"id": NODE, "run": "test", "var_dir": str(folder)}
        config = load_config(
            None,
            {
                "node": node,
                "nats": {"node_url": url, "swarm_url": "none"},
                "tasks": [{"dataset": "gcd"}],
                "sampler": {"external": 0},
            },
        )
        config = with_constants(config, node={"lease_s": lease_s})
        if os.fork() == 0:
            try:
                asyncio.run(contend(config, folder / f"{number}.log"))
            finally:
                os._exit(1)
    os.waitpid(-1, 0)


if __name__ == "__main__":
    main()
