"""The state that a sampler needs to resume. Every batch contains it, so a restarted sampler reads
it from the newest batch in the log.

Every field has a default, so that the state in a batch of an older version can still be read.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.contracts.wire import Count, DatasetName, Message, Number, Reward, Share, ShortText

Discounted = Annotated[float, Meta(ge=0.0, le=1e12)]
"""A count in which older events have less weight."""
Gain = Annotated[float, Meta(ge=-1e12, le=1e12)]
MAX_REPLAYABLE = 65_536
"""Largest number of local groups that may be replayed; beyond it the oldest are forgotten. Their
positions take a quarter of a megabyte in each batch.
"""
MAX_DATASETS = 1024
"""Largest number of datasets whose held-out pass rates are followed."""


class SourceRecord(Message, frozen=True, kw_only=True):
    """Recent performance of this node's policy on one task source, named by
    `services.sampler.pool.task_source`.

    failed_groups: number of newest local groups in succession in which no completion passes.
    """

    source: ShortText
    completions: Discounted
    passes: Discounted
    failed_groups: Count = 0


class OwnRecord(Message, frozen=True, kw_only=True):
    """Statistics of this node's scored groups. All except `sources` are plain sums since the node's
    first group.

    reward_sum, reward_squares: sums of the groups' mean rewards and of the squares of these means.
    """

    sources: Annotated[list[SourceRecord], Meta(max_length=4096)] = []
    groups: Count = 0
    informative: Count = 0
    reward_sum: Number = 0.0
    reward_squares: Number = 0.0


class ArmRecord(Message, frozen=True, kw_only=True):
    """The bandit's record of one strategy: how long it was used and the gain meanwhile, both
    discounted.
    """

    strategy: ShortText
    windows: Discounted = 0.0
    gain: Gain = 0.0


class ArmRun(Message, frozen=True, kw_only=True):
    """`strategy` is used from batch `first_batch` on; an empty string stands for batches without
    foreign groups.
    """

    first_batch: Count
    strategy: ShortText


class BanditState(Message, frozen=True, kw_only=True):
    """State of the bandit that chooses strategies (`services.sampler.bandit`).

    version, pass_rate, mean_reward: the newest held-out result that was counted. scale: discounted
    mean square of the gains; scale_weight: its weight. runs: the strategies used since that result;
    the last one is the next batch's.
    """

    arms: Annotated[list[ArmRecord], Meta(max_length=64)] = []
    runs: Annotated[list[ArmRun], Meta(max_length=65_536)] = []
    version: Count | None = None
    pass_rate: Share | None = 0.0
    mean_reward: Reward = 0.0
    scale: Discounted = 0.0
    scale_weight: Discounted = 0.0


class Level(Message, frozen=True, kw_only=True):
    """A smoothed value and the best value remembered."""

    now: Reward
    best: Reward


class DatasetLevel(Message, frozen=True, kw_only=True):
    """Held-out results on one dataset: the newest pass rate `rate` over `n` questions, and `best`,
    the highest remembered mean of two successive results.
    """

    dataset: DatasetName
    n: Count
    rate: Share
    best: Share


class SharingState(Message, frozen=True, kw_only=True):
    """State of the controller that moves J. `services.sampler.share_controller` explains the
    fields.
    """

    external: Count
    ceiling: Count
    patience: Count
    calm: Count = 0
    batches: Count = 0
    groups: Count = 0
    informative_groups: Count = 0
    reward_sum: Number = 0.0
    reward_squares: Number = 0.0
    external_wanted: Count = 0
    external_taken: Count = 0
    age_sum_s: Discounted = 0.0
    informative: Share | None = None
    reward: Level | None = None
    held_out: Level | None = None
    held_out_version: Count | None = None
    datasets: Annotated[list[DatasetLevel], Meta(max_length=MAX_DATASETS)] = []
    why: ShortText = ""


class SteeringState(Message, frozen=True, kw_only=True):
    """What determines the next batch's I, J and strategy if the configuration lets them change."""

    bandit: BanditState | None = None
    sharing: SharingState | None = None


class TrainedGroups(Message, frozen=True, kw_only=True):
    """Positions of local groups that were first used in `batch` and may be replayed
    (`services.sampler.replay`).
    """

    batch: Count
    seqs: Annotated[list[Count], Meta(max_length=MAX_REPLAYABLE)]


class SamplerState(Message, frozen=True, kw_only=True):
    """What a sampler must know to resume. It is part of each batch, so the newest batch in the log
    contains the current state.

    `settled` holds the stream positions in `(floor_seq, scored_seq]` that were trained on or
    dropped; everything at or below `floor_seq` is settled.
    """

    scored_seq: Count = 0
    floor_seq: Count = 0
    settled: Annotated[list[Count], Meta(max_length=1_000_000)] = []
    consumed_local: Count = 0
    dropped_local: Count = 0
    own: OwnRecord = OwnRecord()
    steering: SteeringState = SteeringState()
    replayable: Annotated[list[TrainedGroups], Meta(max_length=MAX_REPLAYABLE)] = []
    """The settled positions that the next batch may use again (`sampler.replay`)."""
