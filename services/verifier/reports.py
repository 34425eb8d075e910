"""The signed statements of the node to the swarm: its entry in the directory and its held-out
scores.
"""

from __future__ import annotations

import asyncio
import time

from services.verifier.own_model import OwnModel
from services.verifier.swarm_link import SwarmLink
from services.verifier.swarm_name import SwarmName
from shared.config import NodeConfig
from shared.contracts import subjects
from shared.contracts.codec import content_id, decode, encode
from shared.contracts.control import EvalReport, NodeRecord, PolicyPointer
from shared.contracts.limits import SWARM_LIMITS
from shared.contracts.messages import ScoredGroup
from shared.contracts.wire import MessageError
from shared.identity.keys import SigningKey
from shared.identity.statements import sign_statement
from shared.runtime.logs import Log
from shared.transport.base import Transport, TransportError
from shared.version import VERSION

RECORD_PERIOD_S = SWARM_LIMITS.node_renewed_s
EVAL_PERIOD_S = 2.0
RETRY_S = 1.0


class Reports:
    """Writes the node's directory entry and forwards its held-out scores."""

    def __init__(self, config: NodeConfig, key: SigningKey, node: Transport, link: SwarmLink, own: OwnModel, log: Log) -> None:
        self._config = config
        self._id = config.node.id
        self._key = key
        self._node = node
        self._link = link
        self._own = own
        self._log = log
        self._forwarded_revision = 0
        self._name = SwarmName(self._id, key.public_key, config.nats.swarm_id, node, log)

    async def run_evals(self) -> None:
        """Forward each new held-out report. Never returns."""
        while True:
            try:
                await self._forward_eval()
            except (TransportError, MessageError) as error:
                self._log.debug("eval_report_delayed", reason=str(error))
            await asyncio.sleep(EVAL_PERIOD_S)

    async def run_record(self) -> None:
        """Keep renewing the directory entry. Raises FatalError if the name belongs to another
        node.
        """
        while True:
            written = False
            try:
                written = await self._write_record()
            except (TransportError, MessageError) as error:
                self._log.debug("node_record_delayed", reason=str(error))
            await asyncio.sleep(RECORD_PERIOD_S if written else RETRY_S)

    async def _forward_eval(self) -> None:
        swarm = self._link.transport
        entry = await self._node.kv.get(subjects.node_bucket(self._id), subjects.EVAL_KEY)
        if swarm is None or entry is None or entry.revision == self._forwarded_revision:
            return
        payload = self._signed(decode(entry.value, EvalReport))
        await swarm.publish(subjects.evals(self._id), payload, stream=subjects.SWARM_EVALS, message_id=content_id(payload))
        self._forwarded_revision = entry.revision

    async def _write_record(self) -> bool:
        """False while the node's model is unknown. A local group reveals it, and a directory entry
        without a tokenizer would be useless to others. The pointer's version is used before that of
        the last group, which lags behind it.
        """
        swarm = self._link.transport
        if swarm is None or not await self._name.may_write(swarm):
            return False
        if self._own.identity is None:
            await self._learn_from_log()
        if self._own.identity is None:
            return False
        pointer = await self._node.kv.get(subjects.node_bucket(self._id), subjects.POLICY_KEY)
        version = decode(pointer.value, PolicyPointer).version if pointer else self._own.policy_version
        record = NodeRecord(
            node=self._id,
            public_key=self._key.public_key,
            model=self._own.identity,
            tasks=sorted({spec.dataset for spec in self._config.tasks}),
            policy_version=version,
            software=f"swarm {VERSION}",
            updated_at=time.time(),
        )
        await swarm.kv.put(subjects.SWARM_NODES_BUCKET, self._id, self._signed(record))
        await self._name.wrote(record.updated_at)
        return True

    def _signed(self, said: EvalReport | NodeRecord) -> bytes:
        return encode(sign_statement(said, self._key, self._config.nats.swarm_id))

    async def _learn_from_log(self) -> None:
        """After a restart, learn the model from the newest scored group, if it is local."""
        newest = await self._node.last(subjects.node_scored_stream(self._id), subjects.node_scored(self._id))
        if newest is None:
            return
        scored = decode(await self._node.payload(newest), ScoredGroup)
        if scored.origin == "local":
            self._own.learn(scored.group)
