"""Everything that travels between processes, as typed and bounded structs.

Messages are MessagePack on the wire. They are packed with `msgpack` and unpacked straight into these structs by
msgspec's typed decoder: unknown fields, missing fields, values out of range, over-long lengths, NaN and an unknown
schema version are refused before any other code sees them, in time that does not depend on what a hostile sender put in.

Token arrays travel as raw little-endian bytes (`int32` ids, `float32` logprobs) because a list of a million Python
integers costs far more to decode than to use; `pack_ids`/`unpack_ids` and `pack_logprobs`/`unpack_logprobs` convert.
"""

from __future__ import annotations

import hashlib
import math
import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgpack
import msgspec
from msgspec import Meta

from shared.contracts.sampler_state import SamplerState as SamplerState
from shared.contracts.wire import DEFAULT_SWARM_ID as DEFAULT_SWARM_ID
from shared.contracts.wire import (
    Count,
    DatasetName,
    FinishReason,
    NodeId,
    Number,
    PlainText,
    Reward,
    SchemaVersion,
    Seconds,
    Seed,
    Sha256,
    ShortText,
    SwarmId,
    SwarmSchemaVersion,
    UnixTime,
)
from shared.contracts.wire import Message as Message
from shared.contracts.wire import MessageError as MessageError
from shared.contracts.wire import Origin as Origin

SCHEMA_VERSION = 1
"""Version of every message in this file but `SignedRollouts`. It also stands in the subjects of held-out scores."""

SWARM_SCHEMA_VERSION = 2
"""Version of `SignedRollouts`; it also stands in the subjects of shared groups (`swarm.rollouts.v2...`). 2: names the swarm."""

MAX_COMPLETIONS = 1024
MAX_DELTAS = 255
"""From one full copy of a policy to the next."""
MAX_LOGPROB = 1e-3
"""A logarithm of a probability is not above 0; engines round."""
MAX_TOKENS = 1_048_576
_ARRAY_BYTES = 4 * MAX_TOKENS


class TaskRef(Message, frozen=True, kw_only=True):
    """Names one verifiable question; everything else about the task is derived from it (`shared.tasks.derive_task`)."""

    dataset: DatasetName
    config: Annotated[str, Meta(max_length=4096)] = "{}"
    """Canonical JSON of the dataset's configuration (sorted keys, no spaces), without `seed`."""
    seed: Seed
    index: Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Task(Message, frozen=True, kw_only=True):
    """A task with what its reference derives to. From the swarm plane these derived fields are compared, never used."""

    ref: TaskRef
    question: Annotated[str, Meta(max_length=262_144)]
    answer: Annotated[str, Meta(max_length=262_144)] | None
    metadata: Annotated[str, Meta(max_length=1_048_576)] = "{}"
    """Canonical JSON of the scorer's metadata."""


class Completion(Message, frozen=True, kw_only=True):
    """One answer that a policy sampled.

    `token_ids` and `behaviour_logprobs` (packed, equal lengths) include the end-of-sequence token when `finish_reason` is
    `stop`. They are of use only under the same tokenizer and may be absent.
    """

    text: Annotated[str, Meta(max_length=4_194_304)]
    finish_reason: FinishReason
    token_count: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    token_ids: Annotated[bytes, Meta(max_length=_ARRAY_BYTES)] | None = None
    behaviour_logprobs: Annotated[bytes, Meta(max_length=_ARRAY_BYTES)] | None = None


class Sampling(Message, frozen=True, kw_only=True):
    """How completions were sampled. `top_k` 0 means off."""

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    max_new_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 256


class ModelIdentity(Message, frozen=True, kw_only=True):
    """Which model sampled: its public name and the hash of its tokenizer (`shared.model.tokenizer_hash`)."""

    name: PlainText
    tokenizer_hash: Sha256


class RolloutGroup(Message, frozen=True, kw_only=True):
    """All completions of one task by one policy version: the unit that is scored, shared and trained on.

    Its id is the SHA-256 of the encoded bytes (`content_id`) and is its `Nats-Msg-Id`. Rewards are not part of it.
    """

    schema: SchemaVersion = 1
    node: NodeId
    created_at: UnixTime
    draw: Count
    """The node's own running number of the task draw; no two groups of a node carry the same one."""
    task: Task
    completions: Annotated[list[Completion], Meta(min_length=1, max_length=MAX_COMPLETIONS)]
    model: ModelIdentity
    policy_version: Count
    sampling: Sampling
    prompt_ids: Annotated[bytes, Meta(max_length=_ARRAY_BYTES)] | None = None


class SignedRollouts(Message, frozen=True, kw_only=True):
    """What crosses the swarm plane: the exact bytes of a `RolloutGroup` and an Ed25519 signature over them.

    The signature covers `signed_bytes(swarm, body)`. `public_key` is an nkey (`U...`). `swarm` is the setting `nats.swarm_id` of
    the node that signed: what was made for one swarm counts in no other, and a receiver can tell such a group from a forgery.
    """

    schema: SwarmSchemaVersion = 2
    swarm: SwarmId
    node: NodeId
    public_key: Annotated[str, Meta(max_length=64)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]
    body: bytes


SIGNATURE_DOMAIN = b"swarm-rollouts-v2\x00"


def signed_bytes(swarm: str, body: bytes) -> bytes:
    """What a signature of a shared group covers. No swarm's name contains the zero byte that ends it here."""
    return SIGNATURE_DOMAIN + swarm.encode() + b"\x00" + body


class ScoredGroup(Message, frozen=True, kw_only=True):
    """A group with this node's own rewards for it, `rewards[i]` in [0, 1] for `group.completions[i]`.

    `failure` says why a local group could not be scored; its rewards are then empty and the sampler gives its place back to the
    generator, so that nothing waits for a group that will not come.
    """

    schema: SchemaVersion = 1
    group_id: Sha256
    origin: Origin
    group: RolloutGroup
    rewards: Annotated[list[Reward], Meta(max_length=MAX_COMPLETIONS)]
    scored_by: ShortText
    score_seconds: Seconds
    scored_at: UnixTime
    failure: ShortText | None = None
    share: ShortText | None = None
    """Of a foreign group: whose share of a batch it takes, its key's or that of all known copiers; None: its node's."""
    established: bool = True
    """Of a foreign group: whether its key had earned a whole share when it was taken in (`verifier.newcomer_groups`)."""


class BatchItem(Message, frozen=True, kw_only=True):
    """One group of a batch, in training order. `staleness` counts optimiser steps between sampling and this choice."""

    scored: ScoredGroup
    staleness: Annotated[int, Meta(ge=-(2**40), le=2**40)] | None
    """None for groups of another node: their version counts another policy's steps."""
    age_s: Seconds
    weight: Annotated[float, Meta(ge=0.0, le=1e9)] | None = None
    """Its weight in the draw over the mean weight of the pool; None for own groups and where the strategy knows no weights."""
    replayed: bool = False
    """A local group that was in an earlier batch (`sampler.replay`); its staleness may be above `sampler.max_staleness`."""


class Preference(Message, frozen=True, kw_only=True):
    """What the trainer, which has the model, does with more external groups than a step takes.

    It keeps the `keep` whose text is likeliest (`near`) or least likely (`far`) under its policy, at most `node_cap` of one node.
    Of all `newcomers` (shares of the batch, as `ScoredGroup.share`) together at most `newcomers_most`; None: as many as come.
    """

    keep: Count
    by: Literal["near", "far"]
    node_cap: Count
    newcomers: Annotated[list[ShortText], Meta(max_length=65_536)] = []
    newcomers_most: Count | None = None


class Batch(Message, frozen=True, kw_only=True):
    """The groups of one trainer step and the explanation of how they were chosen."""

    schema: SchemaVersion = 1
    number: Annotated[int, Meta(ge=1, le=2**62)]
    """1 for a node's first batch; batch n is trained at step n."""
    created_at: UnixTime
    items: Annotated[list[BatchItem], Meta(min_length=1, max_length=65_536)]
    strategy: ShortText
    seed: Seed
    wanted_local: Count
    wanted_external: Count
    pool_local: Count
    pool_external: Count
    shortage: Literal["none", "fill_local", "short"]
    state: SamplerState
    """After this batch. `state.own` is what the draw knew of the own pass rates; `state.steering` steers the next batch."""
    preference: Preference | None = None
    """None: every group of the batch is trained on."""
    pool_replay: Count = 0
    """Groups of earlier batches that could have been replayed."""


class PolicyFile(Message, frozen=True, kw_only=True):
    """A file in the policy store, published for one version."""

    version: Count
    sha256: Sha256
    size_bytes: Count
    uri: Annotated[str, Meta(max_length=2048)]


class PolicyDelta(Message, frozen=True, kw_only=True):
    """What changed from the policy before to the one of `file.version`, whose sha256 is `makes`."""

    file: PolicyFile
    makes: Sha256


class PolicyPointer(Message, frozen=True, kw_only=True):
    """Where the newest policy is. `version` counts optimiser steps; version 0 is the base policy."""

    schema: SchemaVersion = 1
    version: Count
    sha256: Sha256
    size_bytes: Count
    uri: Annotated[str, Meta(max_length=2048)]
    batch_number: Count
    consumed_local: Count
    """Local groups in all batches up to `batch_number` (`SamplerState.consumed_local` of that batch)."""
    created_at: UnixTime
    anchor: PolicyFile | None = None
    """None: `uri` is the policy. Else `deltas`, in order, make it of this full copy, and `uri` is the full copy's."""
    deltas: Annotated[list[PolicyDelta], Meta(max_length=MAX_DELTAS)] = []


class PolicyRefusal(Message, frozen=True, kw_only=True):
    """A generator could not fetch the policy that the trainer announced: a part of it is gone, damaged or was made of other bytes.

    The trainer answers with a full copy of its newest policy, or the node would wait for groups of a policy that nobody can load.
    """

    schema: SchemaVersion = 1
    version: Count
    sha256: Sha256
    reason: Annotated[str, Meta(max_length=2048)]
    refused_at: UnixTime


class TrainerPosition(Message, frozen=True, kw_only=True):
    """How far the trainer is in its log of batches; the sampler builds the next batch when this comes near."""

    schema: SchemaVersion = 1
    batch_number: Count
    step: Count
    policy_version: Count
    consumed_local: Count
    finished: bool = False


class SamplerPosition(Message, frozen=True, kw_only=True):
    """What the sampler gave up on, so that admission does not count groups that will never be trained on."""

    schema: SchemaVersion = 1
    batch_number: Count
    consumed_local: Count
    dropped_local: Count
    local: Count | None = None
    """I of the next batch where it moves (`sampler.adapt`); None: what the configuration says."""


class TaskScore(Message, frozen=True, kw_only=True):
    """Held-out result on one dataset. `pass_rate` is the share of answers with reward >= 0.99."""

    n: Count
    pass_rate: Reward
    mean_reward: Reward


class EvalReport(Message, frozen=True, kw_only=True):
    """One held-out evaluation of a node's policy (greedy, one answer a task)."""

    schema: SchemaVersion = 1
    node: NodeId
    policy_version: Count
    created_at: UnixTime
    n: Count
    pass_rate: Reward
    mean_reward: Reward
    per_task: dict[DatasetName, TaskScore]
    seconds: Seconds


class NodeRecord(Message, frozen=True, kw_only=True):
    """A node's entry in the swarm's directory (`swarm_nodes`)."""

    schema: SchemaVersion = 1
    node: NodeId
    public_key: Annotated[str, Meta(max_length=64)]
    model: ModelIdentity
    tasks: Annotated[list[DatasetName], Meta(max_length=1024)]
    policy_version: Count
    software: PlainText
    updated_at: UnixTime


class ServiceStatus(Message, frozen=True, kw_only=True):
    """What one process says of itself every few seconds, in `node_<id>` under `status.<role>.<replica>`.

    `figures` holds the counters and gauges that `swarm status` and the progress view show; their names are listed in
    `shared.runtime.status`.
    """

    schema: SchemaVersion = 1
    node: NodeId
    role: Literal["generator", "verifier", "sampler", "trainer"]
    replica: ShortText
    pid: Count
    host: ShortText
    state: ShortText
    started_at: UnixTime
    updated_at: UnixTime
    figures: Annotated[dict[ShortText, Number], Meta(max_length=64)]


class TaskLedger(Message, frozen=True, kw_only=True):
    """Which task draws were handed out (`services.generator.ledger`): replicas of a generator share it by compare-and-set."""

    schema: SchemaVersion = 1
    next_draw: Count = 0
    leases: Annotated[list[DrawLease], Meta(max_length=65_536)] = []
    secret: Annotated[bytes, Meta(max_length=64)] = b""
    """Keys the draws' tasks, so that nobody outside the node can tell the next ones; empty until a generator makes it."""


class DrawLease(Message, frozen=True, kw_only=True):
    """Draws `[first, first + count)` are being worked on by `replica` until `expires_at`."""

    first: Count
    count: Annotated[int, Meta(ge=1, le=65_536)]
    replica: ShortText
    expires_at: UnixTime


M = TypeVar("M", bound=Message)
_decoders: dict[type[Message], msgspec.msgpack.Decoder[Any]] = {}


def encode(message: Message) -> bytes:
    """Pack a message to MessagePack."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)), use_bin_type=True)
    return packed


def decode(payload: bytes, kind: type[M]) -> M:
    """Unpack and validate one message.

    Raises:
        MessageError: `schema_version` for a version this software does not know, `malformed` for everything else.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders.setdefault(kind, msgspec.msgpack.Decoder(kind))
    try:
        message: M = decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError, OverflowError) as error:
        detail = str(error)[:200]
        if detail.endswith("$.schema`"):
            raise MessageError("schema_version", f"{kind.__name__}: {detail}: update the older side") from None
        raise MessageError("malformed", f"{kind.__name__}: {detail}") from None
    return message


def content_id(payload: bytes) -> str:
    """SHA-256 of the encoded bytes, in hex: a group's id and `Nats-Msg-Id`."""
    return hashlib.sha256(payload).hexdigest()


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids to little-endian int32 bytes."""
    return _little_endian(array("i", token_ids))


def unpack_ids(packed: bytes) -> list[int]:
    """Inverse of `pack_ids`. Raises MessageError (`malformed`) on a torn or negative array."""
    ids = _unpack("i", packed)
    if ids and min(ids) < 0:
        raise MessageError("malformed", "negative token id")
    return ids.tolist()


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """Log-probabilities to little-endian float32 bytes."""
    return _little_endian(array("f", logprobs))


def unpack_logprobs(packed: bytes) -> list[float]:
    """Inverse of `pack_logprobs`. Raises MessageError (`malformed`) on a torn array, NaN, or a value above 0 (rounding aside)."""
    values = _unpack("f", packed).tolist()
    if any(math.isnan(v) or v > MAX_LOGPROB for v in values):
        raise MessageError("malformed", "a log-probability is NaN or positive")
    return values


def _unpack(typecode: str, packed: bytes) -> array[Any]:
    if len(packed) % 4:
        raise MessageError("malformed", f"array of {len(packed)} bytes is not a multiple of 4")
    values = array(typecode)
    values.frombytes(packed)
    return _swap_if_big_endian(values)


def _little_endian(values: array[Any]) -> bytes:
    return _swap_if_big_endian(values).tobytes()


def _swap_if_big_endian(values: array[Any]) -> array[Any]:

    if sys.byteorder == "big":
        values.byteswap()
    return values
