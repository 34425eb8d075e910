"""The messages on a rollout's path as typed and bounded structs: task, group, scored group, batch,
and what the swarm shares of them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from shared.contracts.codec import MAX_TOKENS
from shared.contracts.sampler_state import SamplerState
from shared.contracts.wire import (
    Count,
    DatasetName,
    FinishReason,
    Message,
    NodeId,
    Origin,
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

SCHEMA_VERSION = 1
"""Version of every message but `SignedRollouts`. It also stands in the subjects of held-out scores.
"""

SWARM_SCHEMA_VERSION = 2
"""Version of `SignedRollouts`; it also stands in the subjects of shared groups
(`swarm.rollouts.v2...`). 2: names the swarm.
"""

MAX_COMPLETIONS = 1024
_ARRAY_BYTES = 4 * MAX_TOKENS


class TaskRef(Message, frozen=True, kw_only=True):
    """Names one verifiable question; everything else about the task is derived from it
    (`shared.tasks.derive_task`).
    """

    dataset: DatasetName
    config: Annotated[str, Meta(max_length=4096)] = "{}"
    """Canonical JSON of the dataset's configuration (sorted keys, no spaces), without `seed`."""
    seed: Seed
    index: Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Task(Message, frozen=True, kw_only=True):
    """A task with what its reference derives to. From the swarm plane these derived fields are
    compared, never used.
    """

    ref: TaskRef
    question: Annotated[str, Meta(max_length=262_144)]
    answer: Annotated[str, Meta(max_length=262_144)] | None
    metadata: Annotated[str, Meta(max_length=1_048_576)] = "{}"
    """Canonical JSON of the scorer's metadata."""


class Completion(Message, frozen=True, kw_only=True):
    """One answer that a policy sampled.

    `token_ids` and `behaviour_logprobs` (packed, equal lengths) include the end-of-sequence token
    when `finish_reason` is `stop`. They are of use only under the same tokenizer and may be absent.
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
    """Which model sampled: its public name and the hash of its tokenizer
    (`shared.model.tokenizer_hash`).
    """

    name: PlainText
    tokenizer_hash: Sha256


class RolloutGroup(Message, frozen=True, kw_only=True):
    """All completions of one task by one policy version: the unit that is scored, shared and
    trained on.

    Its id is the SHA-256 of the encoded bytes (`content_id`) and is its `Nats-Msg-Id`. Rewards are
    not part of it.
    """

    schema: SchemaVersion = 1
    node: NodeId
    created_at: UnixTime
    draw: Count
    """The node's own running number of the task draw; no two groups of a node carry the same one.
    """
    task: Task
    completions: Annotated[list[Completion], Meta(min_length=1, max_length=MAX_COMPLETIONS)]
    model: ModelIdentity
    policy_version: Count
    sampling: Sampling
    prompt_ids: Annotated[bytes, Meta(max_length=_ARRAY_BYTES)] | None = None


class SignedRollouts(Message, frozen=True, kw_only=True):
    """What crosses the swarm plane: the exact bytes of a `RolloutGroup` and an Ed25519 signature
    over them.

    The signature covers `signed_bytes(swarm, body)`. `public_key` is an nkey (`U...`). `swarm` is
    the setting `nats.swarm_id` of the node that signed: what was made for one swarm counts in no
    other, and a receiver can tell such a group from a forgery.
    """

    schema: SwarmSchemaVersion = 2
    swarm: SwarmId
    node: NodeId
    public_key: Annotated[str, Meta(max_length=64)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]
    body: bytes


SIGNATURE_DOMAIN = b"swarm-rollouts-v2\x00"


def signed_bytes(swarm: str, body: bytes) -> bytes:
    """What a signature of a shared group covers. No swarm's name contains the zero byte that ends
    it here.
    """
    return SIGNATURE_DOMAIN + swarm.encode() + b"\x00" + body


class ScoredGroup(Message, frozen=True, kw_only=True):
    """A group with this node's own rewards for it, `rewards[i]` in [0, 1] for
    `group.completions[i]`.

    `failure` says why a local group could not be scored; its rewards are then empty and the sampler
    gives its place back to the generator, so that nothing waits for a group that will not come.
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
    """Of a foreign group: whose share of a batch it takes, its key's or that of all known copiers;
    None: its node's.
    """
    established: bool = True
    """Of a foreign group: whether its key had earned a whole share when it was taken in
    (`verifier.newcomer_groups`).
    """


class BatchItem(Message, frozen=True, kw_only=True):
    """One group of a batch, in training order. `staleness` counts policy versions between sampling
    and this choice.
    """

    scored: ScoredGroup
    staleness: Annotated[int, Meta(ge=-(2**40), le=2**40)] | None
    """None for groups of another node: their version counts another policy's steps."""
    age_s: Seconds
    weight: Annotated[float, Meta(ge=0.0, le=1e9)] | None = None
    """Its weight in the draw over the mean weight of the pool; None for local groups and where the
    strategy knows no weights.
    """
    replayed: bool = False
    """A local group that was in an earlier batch (`sampler.replay`); its staleness may be above
    `sampler.max_staleness`.
    """


class Preference(Message, frozen=True, kw_only=True):
    """What the trainer, which has the model, does with more foreign groups than a step takes.

    It keeps the `keep` whose text is likeliest (`near`) or least likely (`far`) under its policy,
    at most `node_cap` of one node. Of all `newcomers` (shares of the batch, as `ScoredGroup.share`)
    together at most `newcomers_most`; None: as many as come.
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
    """After this batch. `state.own` is what the draw knew of this node's pass rates;
    `state.steering` steers the next batch.
    """
    preference: Preference | None = None
    """None: every group of the batch is trained on."""
    pool_replay: Count = 0
    """Groups of earlier batches that could have been replayed."""
