"""Everything that the node writes to the swarm: its groups, its entry in the directory and its
held-out scores.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Literal, NamedTuple

import numpy as np
from msgspec import UNSET, structs

from services.verifier.episodes import without_prompt, without_tokens
from services.verifier.figures import Figures
from services.verifier.swarm_reader import SwarmLink
from shared.config.verifier_config import VerifierConfig
from shared.config.verifier_section import VerifierSection
from shared.contracts import subjects
from shared.contracts.codec import content_id, decode, encode, packed
from shared.contracts.control import EvalReport, NameInSwarm, NodeRecord, PolicyPointer, TrainerPosition
from shared.contracts.limits import SWARM_LIMITS
from shared.contracts.messages import (
    ROLLOUT_ID_HEADER,
    Completion,
    RolloutGroup,
    ScoredGroup,
    SignedRollouts,
    rollout_id_of,
    signed_bytes,
)
from shared.contracts.wire import DEFAULT_SWARM_ID, ENCODINGS, SWARM_SCHEMA_VERSION, Encoding, MessageError, ModelIdentity
from shared.identity.keys import SigningKey
from shared.identity.statements import SignatureStatus, check_statement, sign_statement
from shared.lease.holder import Newcomer
from shared.rewards import is_informative
from shared.runtime import FatalError
from shared.runtime.logs import Log
from shared.transport.base import KvEntry, TooLarge, Transport, TransportError, bucket_stream
from shared.version import VERSION

MAX_GROUPS = 512
MAX_BYTES = 128 * 2**20
RETRY_S = 1.0


class Parcel(NamedTuple):
    """A signed group waiting to be sent. `shared_id` is the id of the bytes that are sent, which
    differs from the local one if token ids are left out.
    """

    subject: str
    task: str
    policy_version: int
    group_id: str
    shared_id: str
    payload: bytes


class Outbox:
    """Groups waiting to be sent to the swarm. If there are too many, the oldest is dropped and
    counted.
    """

    def __init__(
        self,
        config: VerifierSection,
        key: SigningKey,
        link: SwarmLink,
        figures: Figures,
        log: Log,
        swarm_id: str = DEFAULT_SWARM_ID,
        audience: Audience | None = None,
    ) -> None:
        """audience: None: nobody asks for more than texts."""
        self._config = config
        self._audience = audience or Audience("", swarm_id)
        self._swarm_id = swarm_id
        self._key = key
        self._link = link
        self._figures = figures
        self._log = log
        self._waiting: deque[Parcel] = deque()
        self._size_bytes = 0
        self._filled = asyncio.Event()

    def offer(self, group: RolloutGroup, group_id: str, rewards: list[float]) -> None:
        """Queue a scored group if the share policy includes it. Never waits. `group_id` is its id
        on this node, `rewards` what its answers count for at other nodes.
        """
        if not is_shared(self._config.share, rewards):
            return
        content = self._audience.content(tokens=self._config.share_tokens, now_s=time.monotonic())
        signed = sign(group, self._key, content, swarm_id=self._swarm_id)
        payload, task = encode(signed), group.task.ref.dataset
        subject, shared_id = subjects.rollouts(group.node), content_id(signed.body)
        self._waiting.append(Parcel(subject, task, group.policy_version, group_id, shared_id, payload))
        self._size_bytes += len(payload)
        while len(self._waiting) > MAX_GROUPS or (self._size_bytes > MAX_BYTES and len(self._waiting) > 1):
            self._remove_first()
            self._figures.border.share_dropped()
        self._figures.border.outbox(len(self._waiting))
        self._filled.set()

    async def run(self) -> None:
        while True:
            await self._filled.wait()
            if not self._waiting:
                self._filled.clear()
                continue
            if self._link.transport is None or not await self._publish_first():
                await asyncio.sleep(RETRY_S)

    async def _publish_first(self) -> bool:
        transport = self._link.transport
        if transport is None:
            return False
        first = self._waiting[0]
        started, rollout_id = time.monotonic(), rollout_id_of(first.group_id)
        # Other nodes can know the group only by the bytes that they are sent.
        headers = {ROLLOUT_ID_HEADER: rollout_id_of(first.shared_id)}
        try:
            _check_size(first.payload)
            ack = await transport.publish(
                first.subject,
                first.payload,
                stream=subjects.SWARM_ROLLOUTS,
                message_id=message_id(first.shared_id, self._key),
                headers=headers,
            )
        except TooLarge as error:
            remedy = "lower generator.max_new_tokens or set share_tokens false"
            self._log.warning("share_too_large", rollout_id=rollout_id, reason=str(error), remedy=remedy)
            self._figures.border.share_dropped()
        except TransportError as error:
            self._figures.border.publish.failed("error")
            self._log.debug("share_delayed", rollout_id=rollout_id, reason=str(error))
            return False
        else:
            seconds = time.monotonic() - started
            self._link.note_sent(ack.seq)
            self._figures.border.shared(seconds, len(first.payload))
            self._log.info(
                "rollouts_shared",
                rollout_id=rollout_id,
                shared_rollout_id=headers[ROLLOUT_ID_HEADER],
                task=first.task,
                policy_version=first.policy_version,
                swarm_seq=ack.seq,
                duplicate=ack.duplicate,
                seconds=round(seconds, 4),
            )
        # While publishing, the queue may have overflowed and dropped this very entry.
        if self._waiting and self._waiting[0] is first:
            self._remove_first()
        self._figures.border.outbox(len(self._waiting))
        return True

    def _remove_first(self) -> None:
        self._size_bytes -= len(self._waiting.popleft().payload)


def _check_size(payload: bytes) -> None:
    """Raises TooLarge. A member may not ask a secured server what its stream takes, which then
    stores the chunks of a larger group before anybody refuses it.
    """
    most = SWARM_LIMITS.group_max_bytes
    if len(payload) > most:
        raise TooLarge(f"stream {subjects.SWARM_ROLLOUTS} accepts payloads up to {most} bytes, this one has {len(payload)}", most)


_MESSAGE_ID_DOMAIN = b"swarm-message-id\x00"


def is_shared(policy: Literal["all", "informative", "none"], rewards: Sequence[float]) -> bool:
    """Return whether a scored group is sent to the swarm."""
    return policy == "all" or (policy == "informative" and is_informative(rewards))


class Content(NamedTuple):
    """What is sent of a group, and how it is packed.

    tokens: `text`: no tokens; `needed`: the ids of answers whose text does not give them;
    `logprobs`: all ids and rounded logprobs; `all`: the group as it is.
    """

    tokens: Literal["text", "needed", "logprobs", "all"] = "needed"
    encoding: Encoding = "zstd"


WHOLE = Content("all", "none")


def sign(group: RolloutGroup, key: SigningKey, content: Content = WHOLE, *, swarm_id: str = DEFAULT_SWARM_ID) -> SignedRollouts:
    """The signed group for the swarm plane. `swarm_id` is the setting `nats.swarm_id`; the group is
    valid in that swarm only.
    """
    body = packed(encode(sent_part(group, content)), content.encoding)
    signature = key.sign(signed_bytes(swarm_id, body, content.encoding))
    return SignedRollouts(
        swarm=swarm_id, node=group.node, public_key=key.public_key, signature=signature, encoding=content.encoding, body=body
    )


def sent_part(group: RolloutGroup, content: Content) -> RolloutGroup:
    """The group with what others can use of it. They render the prompt themselves."""
    if content.tokens == "all":
        return group
    if content.tokens == "text":
        return without_tokens(group)
    with_logprobs = content.tokens == "logprobs"

    def sent(completion: Completion) -> Completion:
        ids, logprobs = completion.token_ids, completion.behaviour_logprobs
        return structs.replace(
            completion,
            token_ids=None if completion.canonical is True and not with_logprobs else ids,
            behaviour_logprobs=rounded_logprobs(logprobs) if with_logprobs and logprobs is not None else None,
            canonical=UNSET,
        )

    return structs.replace(without_prompt(group), completions=[sent(each) for each in group.completions])


_ROUNDED_BITS = np.uint32(13)
_HALF = np.uint32(1 << 12)


def rounded_logprobs(packed_logprobs: bytes) -> bytes:
    """The same logprobs to 1 part in 2,000, which compress to half: float32 whose last 13 bits are
    zero. A ratio of likelihoods changes by at most 1 % down to a logprob of -20.
    """
    bits = np.frombuffer(packed_logprobs, "<u4")
    is_negative = bits >> np.uint32(31) > 0  # one above 0 by rounding must not grow
    rounded = np.where(is_negative, bits + _HALF, bits) >> _ROUNDED_BITS << _ROUNDED_BITS
    return rounded.astype("<u4").tobytes()


AUDIENCE_READ = 32
"""Most entries of the directory read at a time, so that it costs the same in every swarm: of 128, a
thousand nodes made three quarters of the messages that their hub sent. Of a hundred nodes nearly
all hear an ask while it counts; where there are many more, a part of them.
"""
AUDIENCE_PERIOD_S = 60.0
AUDIENCE_RETRY_S = 2.0


def audience_start(last_seq: int, entries: int, draw: Random) -> int:
    """The position at which to begin to read: of more entries than are read a part drawn at random,
    each as likely as any other. Entries are renewed so regularly that the newest are always those
    of the same nodes.
    """
    behind = AUDIENCE_READ - 1 if entries <= AUDIENCE_READ else draw.randrange(entries + AUDIENCE_READ - 1)
    return max(1, last_seq - behind)


class Audience:
    """What other nodes read and use of a group, by their signed entries in the directory. An entry
    counts for as long as the directory keeps it.

    Of whom the node would take no group, no wish counts. Others can raise what a node sends to four
    times the bytes, and no further.
    """

    def __init__(self, node_id: str, swarm_id: str, is_heard: Callable[[str, str], bool] = lambda *_: True) -> None:
        """`is_heard`: whether the node of this name and key counts."""
        self._id, self._swarm_id, self._is_heard = node_id, swarm_id, is_heard
        self._logprobs_until_s = self._plain_until_s = 0.0
        self._random = Random()

    def content(self, *, tokens: bool, now_s: float) -> Content:
        """What to send. tokens: whether this node shares its tokens (`verifier.share_tokens`);
        now_s: monotonic time.
        """
        encoding: Encoding = "none" if now_s < self._plain_until_s else "zstd"
        if not tokens:
            return Content("text", encoding)
        return Content("logprobs" if now_s < self._logprobs_until_s else "needed", encoding)

    def note(self, record: NodeRecord, now_s: float) -> None:
        """Note an entry of the directory whose signature was checked. now_s: monotonic time."""
        reads_this = record.swarm_schema == SWARM_SCHEMA_VERSION
        if not reads_this or record.node == self._id or not self._is_heard(record.node, record.public_key):
            return
        until_s = now_s + SWARM_LIMITS.node_ttl_s
        if record.wants_logprobs:
            self._logprobs_until_s = until_s
        if "zstd" not in record.encodings:
            self._plain_until_s = until_s

    async def look(self, swarm: Transport) -> None:
        """Read some of the entries. Raises TransportError."""
        stream = bucket_stream(subjects.SWARM_NODES_BUCKET)
        ends = await swarm.ends(stream)
        start = audience_start(ends.last_seq, ends.messages, self._random)
        for message in await swarm.read(stream, start, AUDIENCE_READ):
            if message.inline is None:
                continue
            record = _signed(KvEntry(message.subject, message.inline, message.seq), self._swarm_id)
            if record is not None:
                self.note(record, time.monotonic())

    async def run(self, link: SwarmLink, log: Log) -> None:
        """Look without end."""
        while True:
            pause_s = AUDIENCE_RETRY_S
            if (swarm := link.transport) is not None:
                try:
                    await self.look(swarm)
                    pause_s = AUDIENCE_PERIOD_S
                except TransportError as error:
                    log.debug("directory_not_read", reason=str(error))
            await asyncio.sleep(pause_s)


def message_id(shared_id: str, key: SigningKey) -> str:
    """The `Nats-Msg-Id` under which a group is published: the same after a restart, and
    unpredictable for everybody else.

    A server stores only one message with a given id, whoever sends it. The chunks of a large group
    can be read before its message is stored. If the id depended only on the bytes (`content_id`), a
    reader could use it first, so that the group would never be stored. Ed25519 signatures are
    deterministic (RFC 8032, section 5.1.6).
    """
    return hashlib.sha256(key.sign(_MESSAGE_ID_DOMAIN + shared_id.encode())).hexdigest()


RECORD_PERIOD_S = SWARM_LIMITS.node_renewed_s
EVAL_PERIOD_S = 2.0
RECORD_RETRY_S = 1.0


class Reports:
    """Writes the node's directory entry and forwards its held-out scores."""

    def __init__(
        self, config: VerifierConfig, key: SigningKey, node: Transport, link: SwarmLink, own: LocalModel, log: Log
    ) -> None:
        self._config = config
        self._id = config.node.id
        self._key = key
        self._node = node
        self._link = link
        self._own = own
        self._log = log
        self._forwarded_revision = 0
        self._takes_groups = config.sampler.external > 0
        self._name = SwarmName(self._id, key.public_key, config.nats.swarm_id, node, log)

    async def run_evals(self) -> None:
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
            await asyncio.sleep(RECORD_PERIOD_S if written else RECORD_RETRY_S)

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
        bucket = subjects.node_bucket(self._id)
        pointer = await self._node.kv.get(bucket, subjects.POLICY_KEY)
        trainer = await self._node.kv.get(bucket, subjects.TRAINER_KEY)
        version = decode(pointer.value, PolicyPointer).version if pointer else self._own.policy_version
        record = NodeRecord(
            node=self._id,
            public_key=self._key.public_key,
            model=self._own.identity,
            tasks=sorted({spec.dataset for spec in self._config.tasks}),
            policy_version=version,
            software=f"swarm {VERSION}",
            updated_at=time.time(),
            swarm_schema=SWARM_SCHEMA_VERSION,
            encodings=[each for each in ENCODINGS if each != "none"],
            wants_ids=self._takes_groups,
            wants_logprobs=self._takes_groups and trainer is not None and decode(trainer.value, TrainerPosition).foreign_logprobs,
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


SILENT_S = 30.0
"""An entry that is not renewed for this long belongs to nobody; three periods of `reports`."""
TWIN_LOOKS = 3
"""Looks in a row at an entry of this node's key that none of its verifiers wrote. A single one may
be another verifier of this node that has not recorded it yet.
"""


class SwarmName:
    """Decides, before each write, whether this node may write its directory entry.

    Other nodes refuse a second key's groups under a name that they know, so a node that starts
    under somebody else's name would share in vain: it stops while the other node renews its entry.
    A node that the swarm has already known under its name continues, whatever anybody writes there,
    because the swarm plane is untrusted.
    """

    def __init__(
        self, node_id: str, public_key: str, swarm_id: str, node: Transport, log: Log, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._id, self._node, self._log, self._clock = node_id, node, log, clock
        self._mine = NameInSwarm(public_key=public_key, swarm_id=swarm_id)
        self._known: NameInSwarm | None = None
        self._newcomer = Newcomer()
        self._complained = False
        self._twins = 0

    async def may_write(self, swarm: Transport) -> bool:
        """Return whether the entry is free, this node's, or abandoned. False: not clear yet, ask
        again soon.

        Raises:
            FatalError: another node has the name.
            TransportError: a server does not answer.
        """
        if self._known is None:
            self._known = await self._remembered()
        entry = await swarm.kv.get(subjects.SWARM_NODES_BUCKET, self._id)
        record = None if entry is None else _signed(entry, self._mine.swarm_id)
        other = None if record is None else record.public_key
        if record is not None and other == self._mine.public_key:
            await self._look_for_twin(record)
        mine = {self._mine.public_key, self._known.public_key if self._known else self._mine.public_key}
        if entry is None or other is None or other in mine:
            return True
        if self._known is not None:
            if not self._complained:
                self._complained = True
                self._log.error(
                    "name_contested",
                    key=other,
                    reason=f"another key writes the directory entry of {self._id}",
                    consequence="this node was known under the name first and goes on; nodes that know both keep to the first",
                    remedy="ban that key (`swarm ban`), or use a roster and a secured server (docs/security.md)",
                )
            return True
        verdict = self._newcomer.look(free=False, revision=entry.revision, now_s=self._clock(), lease_s=SILENT_S)
        if verdict == "held":
            raise FatalError(
                f"the name {self._id} is taken in this swarm: a node with the key {other} renews its directory entry, and others "
                f"would refuse what this node (key {self._mine.public_key}) shares. Choose another name (node.id, or "
                "`swarm up --name`); if that node is yours, end it first or give this one its key (verifier.signing_key_file)"
            )
        return verdict == "take"

    async def wrote(self, at: float) -> None:
        """The entry was written with the time `at`: the swarm knows this node by this key. Raises
        TransportError.
        """
        known = structs.replace(self._mine, written_at=at)
        await self._node.kv.put(subjects.node_bucket(self._id), subjects.SWARM_NAME_KEY, encode(known))
        self._known = known

    async def _look_for_twin(self, record: NodeRecord) -> None:
        """Tell once where another process signs as this node: a folder that was copied to another
        machine, with a server of its own, so that no lease keeps the two apart. An entry that is
        older than this node's own is one that somebody put there again.
        """
        if self._known is None or record.updated_at <= self._known.written_at:
            self._twins = 0
            return
        written = await self._remembered()  # another verifier of this node writes it down there
        if written is None or record.updated_at <= written.written_at:
            self._twins = 0
            return
        self._twins += 1
        if self._twins == TWIN_LOOKS:
            self._log.error(
                "key_used_twice",
                key=record.public_key,
                reason=f"the directory entry of {self._id} is renewed with this node's key by a process that is not this node's",
                consequence="others take both for one node: its groups, scores and reputation are mixed",
                remedy="end one of the two, and give it a key and a name of its own (verifier.signing_key_file, node.id; "
                "`swarm join` in a new folder)",
            )

    async def _remembered(self) -> NameInSwarm | None:
        entry = await self._node.kv.get(subjects.node_bucket(self._id), subjects.SWARM_NAME_KEY)
        try:
            found = decode(entry.value, NameInSwarm) if entry is not None else None
        except MessageError:
            return None
        return found if found is not None and found.swarm_id == self._mine.swarm_id else None


def _signed(entry: KvEntry, swarm_id: str) -> NodeRecord | None:
    """The entry's record, if its key signed it for this swarm. None for an unsigned or badly signed
    entry, which anybody may have written and which therefore does not reserve the name.
    """
    try:
        heard = check_statement(entry.value, NodeRecord, time.time(), swarm_id)
    except MessageError:
        return None
    return heard.said if heard.standing is SignatureStatus.SIGNED else None


class LocalModel:
    """Name and tokenizer of the policy that made the newest local group; None before the first
    one.
    """

    def __init__(self) -> None:
        self.identity: ModelIdentity | None = None
        self.policy_version = 0

    def learn(self, group: RolloutGroup) -> None:
        self.identity = group.model
        self.policy_version = max(self.policy_version, group.policy_version)

    def same_tokenizer(self, group: RolloutGroup) -> bool:
        """Return whether the token ids of a foreign group have the same meaning here."""
        return self.identity is not None and self.identity.tokenizer_hash == group.model.tokenizer_hash
