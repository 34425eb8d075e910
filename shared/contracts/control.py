"""What a node's services tell each other apart from rollouts: policies, positions, evaluations,
leases, status.

Most of it is stored under keys of the node's bucket (`shared.contracts.subjects`).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.contracts.messages import ModelIdentity
from shared.contracts.wire import (
    Count,
    DatasetName,
    Message,
    NodeId,
    Number,
    PlainText,
    Reward,
    SchemaVersion,
    Seconds,
    Sha256,
    ShortText,
    UnixTime,
)
from shared.roles import Role

MAX_DELTAS = 255
"""From one full copy of a policy to the next."""


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
    """Where the newest policy is. `version` counts the batches trained on; version 0 is the base
    policy.
    """

    schema: SchemaVersion = 1
    version: Count
    sha256: Sha256
    size_bytes: Count
    uri: Annotated[str, Meta(max_length=2048)]
    consumed_local: Count
    """Local groups in all batches up to the version's (`SamplerState.consumed_local` of that
    batch).
    """
    created_at: UnixTime
    anchor: PolicyFile | None = None
    """None: `uri` is the policy. Else `deltas`, in order, make it of this full copy, and `uri` is
    the full copy's.
    """
    deltas: Annotated[list[PolicyDelta], Meta(max_length=MAX_DELTAS)] = []


class PolicyRefusal(Message, frozen=True, kw_only=True):
    """A generator could not fetch the policy that the trainer announced: a part of it is gone,
    damaged or was made of other bytes.

    The trainer answers with a full copy of its newest policy, or the node would wait for groups of
    a policy that nobody can load.
    """

    schema: SchemaVersion = 1
    version: Count
    sha256: Sha256
    reason: Annotated[str, Meta(max_length=2048)]
    refused_at: UnixTime


class TrainerPosition(Message, frozen=True, kw_only=True):
    """How far the trainer is in its log of batches; the sampler builds the next batch when this
    comes near. `policy_version` batches are trained on.
    """

    schema: SchemaVersion = 1
    policy_version: Count
    consumed_local: Count
    finished: bool = False


class SamplerPosition(Message, frozen=True, kw_only=True):
    """What the sampler gave up on, so that admission does not count groups that will never be
    trained on.
    """

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
    """One held-out evaluation of a node's policy (greedy, one answer a task). `seconds`: of
    generating and scoring the answers.
    """

    schema: SchemaVersion = 1
    node: NodeId
    policy_version: Count
    created_at: UnixTime
    n: Count
    pass_rate: Reward
    mean_reward: Reward
    per_task: dict[DatasetName, TaskScore]
    seconds: Seconds
    held_out: Sha256 | None = None
    """Which tasks were asked (`shared.tasks.held_out.held_out_id`): scores compare where this is
    equal. None: software that did not say.
    """


class EvalTurn(Message, frozen=True, kw_only=True):
    """Whose turn it is, of a node's generators, to evaluate which version: the newest that was
    taken.
    """

    schema: SchemaVersion = 1
    policy_version: Count
    replica: PlainText


class IntakeCursor(Message, frozen=True, kw_only=True):
    """How far a node's verifiers are in the swarm's stream: everything up to `position` was looked
    at or passed over.
    """

    schema: SchemaVersion = 1
    position: Count


class PolicyChunks(Message, frozen=True, kw_only=True):
    """Where a policy lies in the stream of its node: its chunks are among `first..last`."""

    version: Count
    first: Count
    last: Count

    @property
    def positions(self) -> range:
        """All positions from the first chunk to the last; other policies' may lie between."""
        return range(self.first, self.last + 1)


class PolicyCatalogue(Message, frozen=True, kw_only=True):
    """All policies in the stream of a node."""

    schema: SchemaVersion = 1
    policies: list[PolicyChunks]


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
    """What one process says of itself every few seconds, in `node_<id>` under
    `status.<role>.<replica>`.

    `figures` holds the counters and gauges that `swarm status` and the progress view show; their
    names are in `shared.contracts.status_figures`.
    """

    schema: SchemaVersion = 1
    node: NodeId
    role: Role
    replica: ShortText
    pid: Count
    host: ShortText
    state: ShortText
    started_at: UnixTime
    updated_at: UnixTime
    figures: Annotated[dict[ShortText, Number], Meta(max_length=64)]


class TaskLedger(Message, frozen=True, kw_only=True):
    """Which task draws were handed out (`services.generator.ledger`): replicas of a generator share
    it by compare-and-set.
    """

    schema: SchemaVersion = 1
    next_draw: Count = 0
    leases: Annotated[list[DrawLease], Meta(max_length=65_536)] = []
    secret: Annotated[bytes, Meta(max_length=64)] = b""
    """Keys the draws' tasks, so that nobody outside the node can tell the next ones; empty until a
    generator makes it.
    """


class DrawLease(Message, frozen=True, kw_only=True):
    """Draws `[first, first + count)` are being worked on by `replica` until `expires_at`."""

    first: Count
    count: Annotated[int, Meta(ge=1, le=65_536)]
    replica: ShortText
    expires_at: UnixTime
