"""Messages between a node's services other than rollouts: policies, positions, evaluations, leases,
status.

Most of them are stored under keys of the node's bucket (`shared.contracts.subjects`).
"""

from __future__ import annotations

from typing import Annotated, Protocol

from msgspec import Meta

from shared.contracts.wire import (
    Count,
    DatasetName,
    Message,
    ModelIdentity,
    NodeId,
    Number,
    PlainText,
    Reward,
    SchemaVersion,
    Seconds,
    Sha256,
    Share,
    ShortText,
    UnixTime,
)
from shared.roles import Role

MAX_DELTAS = 255
"""Largest number of deltas between two full copies of a policy."""


class PolicyFile(Message, frozen=True, kw_only=True):
    """One file of one policy version in the policy store."""

    version: Count
    sha256: Sha256
    size_bytes: Count
    uri: Annotated[str, Meta(max_length=2048)]


class PolicyDelta(Message, frozen=True, kw_only=True):
    """The changes from the previous policy to version `file.version`, whose sha256 is `makes`."""

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
    """Local groups in all batches up to this version (`SamplerState.consumed_local` of its last
    batch).
    """
    created_at: UnixTime
    anchor: PolicyFile | None = None
    """None: `uri` is the whole policy. Otherwise `uri` is this full copy, and applying `deltas` to
    it in order gives the policy.
    """
    deltas: Annotated[list[PolicyDelta], Meta(max_length=MAX_DELTAS)] = []


class PolicyRefusal(Message, frozen=True, kw_only=True):
    """A generator's report that it could not fetch the announced policy, because a part is missing,
    damaged or was made from other bytes.

    The trainer answers with a full copy of its newest policy. Otherwise the node would wait for
    groups of a policy that no generator can load.
    """

    schema: SchemaVersion = 1
    version: Count
    sha256: Sha256
    reason: Annotated[str, Meta(max_length=2048)]
    refused_at: UnixTime


class TrainerPosition(Message, frozen=True, kw_only=True):
    """The trainer's position in the batch log. The sampler builds the next batch when the trainer
    comes close to the newest one. `policy_version` is the number of batches trained on.
    """

    schema: SchemaVersion = 1
    policy_version: Count
    consumed_local: Count
    finished: bool = False
    foreign_logprobs: bool = False
    """Whether its loss uses the behaviour logprobs of foreign groups."""


class SamplerPosition(Message, frozen=True, kw_only=True):
    """The groups that the sampler dropped, so that admission does not count groups that will never
    be trained on.
    """

    schema: SchemaVersion = 1
    batch_number: Count
    consumed_local: Count
    dropped_local: Count
    local: Count | None = None
    """I of the next batch if `sampler.adapt` moves it; None: the configured value."""


class ForeignDemand(Message, frozen=True, kw_only=True):
    """Number of foreign groups that the sampler lacks for its next batches, having read the scored
    stream up to `scored_seq`. What the verifiers have stored since comes off it.
    """

    schema: SchemaVersion = 1
    groups: Count
    scored_seq: Count = 0


NOTHING_WANTED = ForeignDemand(groups=0)


RewardsBySource = Annotated[dict[PlainText, Annotated[list[Reward], Meta(max_length=3)]], Meta(max_length=64)]


class TaskScore(Message, frozen=True, kw_only=True):
    """Held-out result on one dataset: `n` answers whose reward is known. pass_rate: the share of
    them that pass; None: no pass is defined for one of its sources (`shared.tasks.evaluation`).
    """

    n: Count
    pass_rate: Share | None
    mean_reward: Reward

    @property
    def score(self) -> float:
        """The number by which results are compared: the pass rate, or the mean reward where no pass
        is defined.
        """
        return self.mean_reward if self.pass_rate is None else self.pass_rate


class EvalReport(Message, frozen=True, kw_only=True):
    """One held-out evaluation of a node's policy (greedy, one answer per task). `seconds` covers
    generation and scoring.
    """

    schema: SchemaVersion = 1
    node: NodeId
    policy_version: Count
    created_at: UnixTime
    n: Count
    pass_rate: Share | None
    """None: no pass is defined for one of the sources."""
    mean_reward: Reward
    per_task: dict[DatasetName, TaskScore]
    seconds: Seconds
    held_out: Sha256 | None = None
    """Identifies the held-out questions (`shared.tasks.held_out.held_out_id`); None: written by a
    version that did not report it, as for the next two.
    """
    scorer: Sha256 | None = None
    """Identifies the scorers (`shared.config.scorers_id`)."""
    pass_rule: Sha256 | None = None
    """Identifies the rule of what passes; None also if no pass is defined."""
    unknown: Count = 0
    """Answers whose reward is unknown; they are left out of `n` and of the means."""
    reward_values: RewardsBySource = {}
    """The distinct rewards of sources whose pass depends on them (`shared.tasks.evaluation`)."""
    max_new_tokens: Count | None = None
    """The longest that an answer could be; None: written by a version that did not report it."""

    @property
    def score(self) -> float:
        """The number by which results are compared: the pass rate, or the mean reward where no pass
        is defined.
        """
        return self.mean_reward if self.pass_rate is None else self.pass_rate


class HeldOutScore(Protocol):
    """A held-out result, in any of its forms."""

    @property
    def n(self) -> int: ...
    @property
    def unknown(self) -> int: ...
    @property
    def pass_rate(self) -> float | None: ...
    @property
    def held_out(self) -> str | None: ...
    @property
    def scorer(self) -> str | None: ...
    @property
    def pass_rule(self) -> str | None: ...
    @property
    def max_new_tokens(self) -> int | None: ...


def incomparable(one: HeldOutScore, newest: HeldOutScore) -> str:
    """Return why a held-out result cannot be compared with the newest one by the newest's measure,
    to follow "was evaluated"; empty if it can. They must have the same questions and scorers and,
    unless mean rewards are compared, the same rule of what passes. Answers must have had the same
    limit, where both results have it on record.
    """
    if bool(one.scorer) != bool(newest.scorer):
        return "by another version of Swarm"
    if (one.held_out or "", one.n + one.unknown) != (newest.held_out or "", newest.n + newest.unknown):
        return "on other held-out questions"
    if (one.scorer or "") != (newest.scorer or ""):
        return "with another reward"
    if newest.pass_rate is not None and (one.pass_rate is None or (one.pass_rule or "") != (newest.pass_rule or "")):
        return "with another rule of what passes"
    limits = one.max_new_tokens, newest.max_new_tokens
    if all(limits) and len({*limits}) > 1:
        return "with up to {:,} tokens an answer, and the newest with up to {:,}".format(*limits)
    return ""


class SetTurn(Message, frozen=True, kw_only=True):
    """The newest version that a generator has claimed to measure on an evaluation set. `measure`:
    of the set's questions, scorer, k and temperature; with another one everything is measured
    again. done: it has been; base: so has the base policy. questions: what is asked
    (`shared.tasks.held_out.held_out_id`); added_at: the trainer's version when they first were, so
    that steps up to it may have trained on them.
    """

    measure: Sha256
    policy_version: Count
    replica: PlainText
    done: bool = False
    base: bool = False
    questions: Sha256 | None = None
    added_at: Count = 0


class EvalTurn(Message, frozen=True, kw_only=True):
    """Which of a node's generators evaluates which version: the newest version that a generator has
    claimed, of the held-out tasks, and of each evaluation set by name.
    """

    schema: SchemaVersion = 1
    policy_version: Count
    replica: PlainText
    sets: Annotated[dict[PlainText, SetTurn], Meta(max_length=64)] = {}


class RewardValues(Message, frozen=True, kw_only=True):
    """The distinct rewards that a node's own scorers gave, by task source, as far as needed to tell
    whether a source has a pass (`shared.tasks.evaluation`). A node's verifiers share it.
    """

    schema: SchemaVersion = 1
    sources: RewardsBySource = {}
    scorer: Sha256 | None = None
    """The scorers that gave them (`shared.config.scorers_id`); other scorers forget them."""


class IntakeCursor(Message, frozen=True, kw_only=True):
    """Position of a node's verifiers in the swarm's stream: everything up to `position` was
    examined or skipped, except `unread`, in order, of which some may still be read. `readers`: when
    each replica last read (Unix time).
    """

    schema: SchemaVersion = 1
    position: Count
    unread: Annotated[list[Count], Meta(max_length=1024)] = []
    readers: Annotated[dict[PlainText, UnixTime], Meta(max_length=1024)] = {}


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
    swarm_schema: Count = 2
    """Version of the groups that it shares and reads (`SWARM_SCHEMA_VERSION`). Version 2 did not
    say so.
    """
    encodings: Annotated[list[PlainText], Meta(max_length=16)] = []
    """Encodings of groups that it reads (`SignedRollouts.encoding`), besides `none`."""
    wants_ids: bool = True
    wants_logprobs: bool = True
    """Whether it uses the token ids and behaviour logprobs of foreign groups."""


class ServiceStatus(Message, frozen=True, kw_only=True):
    """Status of one process, written every few seconds to `node_<id>` under
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
    roles: Annotated[list[Role], Meta(max_length=4)] = []
    """The roles that the node has; empty: all four."""
    scorer: Sha256 | None = None
    """Identifies the rewards that the process has read (`shared.config.rewards_id`). A process
    keeps them until it is started again, so those of a node differ after a change until all were.
    """


class TaskLedger(Message, frozen=True, kw_only=True):
    """Which task draws were handed out (`services.generator.ledger`). A node's generators share it
    by compare-and-set.
    """

    schema: SchemaVersion = 1
    next_draw: Count = 0
    leases: Annotated[list[DrawLease], Meta(max_length=65_536)] = []
    secret: Annotated[bytes, Meta(max_length=64)] = b""
    """Key from which the draws' tasks are derived, so that nobody outside the node can predict the
    next ones; empty until a generator creates it.
    """


class DrawLease(Message, frozen=True, kw_only=True):
    """`replica` is working on the draws `[first, first + count)` until `expires_at`."""

    first: Count
    count: Annotated[int, Meta(ge=1, le=65_536)]
    replica: ShortText
    expires_at: UnixTime


class NameOwner(Message, frozen=True, kw_only=True):
    """The run that a node's streams and bucket belong to: the one message of the stream
    `NODE_<ID>_NAME`. The run's first process writes it.
    """

    schema: SchemaVersion = 1
    run: ShortText
    host: ShortText
    taken_at: UnixTime


class LeaseRecord(Message, frozen=True, kw_only=True):
    """Which process is a node's trainer, sampler, or a replica of its generator or verifier, stored
    under `lease.<role>`.

    The holder renews the lease by writing it again. Others judge its age by watching its revision,
    never by comparing clocks; the times are for people.
    """

    schema: SchemaVersion = 1
    holder: ShortText
    """A random number that identifies one life of one process."""
    place: ShortText = ""
    """Random number of the lock file that the process holds; empty: it holds none."""
    run: ShortText
    host: ShortText
    pid: Count
    taken_at: UnixTime
    lease_s: Seconds
    """How long the holder may be silent before another process may take its place."""
    released: bool = False
    """The process ended in order and gave up the lease."""


class NameInSwarm(Message, frozen=True, kw_only=True):
    """The key under which the swarm knows this node, stored under `swarm_name`: its verifiers have
    signed the node's directory entry with this key.
    """

    schema: SchemaVersion = 1
    public_key: Annotated[str, Meta(max_length=64)]
    swarm_id: ShortText
    written_at: UnixTime = 0.0
    """The time in the newest entry that one of the node's own verifiers wrote."""
