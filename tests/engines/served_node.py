"""A generator whose policy is served elsewhere, as a process, and what is said of it in its node's
bucket and log.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.contracts.codec import decode
from shared.contracts.control import ServiceStatus
from shared.contracts.streams import ensure_node_streams
from shared.contracts.subjects import node_bucket, node_rollouts_stream, status_key
from shared.transport.base import Transport
from shared.transport.connect import connect
from tests.forked import SERVER, Forked

REPO = Path(__file__).resolve().parents[2]
TASKS = '[[tasks]]\ndataset = "gcd"\nconfig = { min_numbers = 2, max_numbers = 2, max_value = 20 }\n'
DEADLINE_S = 120.0


@dataclass
class ServedNode:
    """The running generator."""

    name: str
    process: Forked
    transport: Transport
    log: Path

    async def until(self, what: Callable[[], Any]) -> None:
        """Poll until the coroutine of `what` gives something true; the generator must not end."""
        deadline = time.monotonic() + DEADLINE_S
        while not await what():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-3000:]
            await asyncio.sleep(0.1)

    async def state(self) -> str:
        entry = await self.transport.kv.get(node_bucket(self.name), status_key("generator", "0"))
        return "" if entry is None else decode(entry.value, ServiceStatus).state

    async def groups(self) -> int:
        return (await self.transport.stream_state(node_rollouts_stream(self.name))).messages

    def told(self, event: str) -> list[dict[str, Any]]:
        """The log's lines of one event."""
        whole = self.log.read_text().rpartition("\n")[0] if self.log.exists() else ""  # the last one may be half written
        lines = [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]


@asynccontextmanager
async def served_node(nats_url: str, folder: Path, url: str, tmp_path: Path, **settings: str) -> AsyncIterator[ServedNode]:
    """A generator over the server at `url`; `folder` has the model's tokenizer. It ends with the
    block, in order if it still runs.
    """
    name = f"served-{uuid.uuid4().hex[:8]}"
    config = tmp_path / "node.toml"
    config.write_text(TASKS)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SWARM_")},
        **SERVER,
        "SWARM_NODE__ID": name,
        "SWARM_NODE__VAR_DIR": str(tmp_path / "var"),
        "SWARM_NATS__NODE_URL": nats_url,
        "SWARM_NATS__SWARM_URL": "none",
        "SWARM_HTTP__BASE_PORT": "0",
        "SWARM_LOG__FORMAT": "json",
        "SWARM_LOG__LEVEL": "info",
        "SWARM_MODEL__PATH": str(folder),
        "SWARM_GENERATOR__ENGINE": "openai",
        "SWARM_GENERATOR__OPENAI_URL": url,
        "SWARM_GENERATOR__OPENAI_MODEL": "tiny",
        "SWARM_GENERATOR__COMPLETIONS": "2",
        "SWARM_GENERATOR__GROUPS_PER_CALL": "2",
        "SWARM_GENERATOR__MAX_NEW_TOKENS": "8",
        "SWARM_GENERATOR__GROUPS_PER_MINUTE": "240",
        "SWARM_EVAL__TASKS": "0",
        "SWARM_SAMPLER__LOCAL": "2",
        "SWARM_SAMPLER__EXTERNAL": "0",
    } | settings
    log = tmp_path / "generator.log"
    process = Forked("services.generator", ["--config", str(config)], environment=environment, cwd=REPO, log=log)
    transport = await connect(nats_url, name="test")
    try:
        await ensure_node_streams(transport, name)
        yield ServedNode(name, process, transport, log)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 60) == 0, log.read_text()[-3000:]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        await transport.close()
