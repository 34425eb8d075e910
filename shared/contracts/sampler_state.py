"""The state that a sampler needs to resume. Every batch contains it, so the newest batch in the log
is the sampler's memory.

Every field has a default: a batch of an older version is a memory without the newer fields.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.contracts.wire import Count, DatasetName, Message, Reward, ShortText

Discounted = Annotated[float, Meta(ge=0.0, le=1e12)]
"""A count in which older events weigh less."""
Gain = Annotated[float, Meta(ge=-1e12, le=1e12)]
MAX_REPLAYABLE = 65_536
"""Local groups that may be replayed, the oldest give way: as positions a quarter of a megabyte in
each batch.
"""
MAX_DATASETS = 1024
"""Datasets whose held-out pass rates are followed."""


class SourceRecord(Message, frozen=True, kw_only=True):
    """How this node's policy lately did on one source of tasks, named by
    `services.sampler.pool.task_source`.

    failed_groups: how many of the newest local groups, one after the other, had no completion that
    passes.
    """

    source: ShortText
    completions: Discounted
    passes: Discounted
    failed_groups: Count = 0


class OwnRecord(Message, frozen=True, kw_only=True):
    """What the node's own scored groups showed. All but `sources` are plain sums since the node's
    first group.

    reward_sum, reward_squares: of the groups' mean rewards and of their squares.
    """

    sources: Annotated[list[SourceRecord], Meta(max_length=4096)] = []
    groups: Count = 0
    informative: Count = 0
    reward_sum: Discounted = 0.0
    reward_squares: Discounted = 0.0


class ArmRecord(Message, frozen=True, kw_only=True):
    """One strategy in the bandit's hand: how long it was used and what was gained meanwhile, both
    discounted.
    """

    strategy: ShortText
    windows: Discounted = 0.0
    gain: Gain = 0.0


class ArmRun(Message, frozen=True, kw_only=True):
    """`strategy` is in force from batch `first_batch` on; the empty string where a batch had no
    foreign group.
    """

    first_batch: Count
    strategy: ShortText


class BanditState(Message, frozen=True, kw_only=True):
    """The mixture's memory (`services.sampler.bandit`).

    version, pass_rate: the newest held-out result that was counted. scale: discounted mean square
    of the gains, its weight `scale_weight`. runs: which strategy was in force since then, the last
    one being that of the next batch.
    """

    arms: Annotated[list[ArmRecord], Meta(max_length=64)] = []
    runs: Annotated[list[ArmRun], Meta(max_length=65_536)] = []
    version: Count | None = None
    pass_rate: Reward = 0.0
    scale: Discounted = 0.0
    scale_weight: Discounted = 0.0


class Level(Message, frozen=True, kw_only=True):
    """A smoothed value and the best that is remembered of it."""

    now: Reward
    best: Reward


class DatasetLevel(Message, frozen=True, kw_only=True):
    """Held-out results on one dataset: the newest pass rate, of `n` questions, and the best mean of
    two that is remembered.
    """

    dataset: DatasetName
    n: Count
    rate: Reward
    best: Reward


class SharingState(Message, frozen=True, kw_only=True):
    """Memory of the controller that moves J (`services.sampler.share_controller`), which is also
    where its words are explained.
    """

    external: Count
    ceiling: Count
    patience: Count
    calm: Count = 0
    batches: Count = 0
    groups: Count = 0
    informative_groups: Count = 0
    reward_sum: Discounted = 0.0
    reward_squares: Discounted = 0.0
    external_wanted: Count = 0
    external_taken: Count = 0
    age_sum_s: Discounted = 0.0
    informative: Reward | None = None
    reward: Level | None = None
    held_out: Level | None = None
    held_out_version: Count | None = None
    datasets: Annotated[list[DatasetLevel], Meta(max_length=MAX_DATASETS)] = []
    why: ShortText = ""


class SteeringState(Message, frozen=True, kw_only=True):
    """What decides the I, J and strategy of the next batch, as far as they move."""

    bandit: BanditState | None = None
    sharing: SharingState | None = None


class TrainedGroups(Message, frozen=True, kw_only=True):
    """Positions of local groups whose first batch was `batch` and that later ones may replay
    (`services.sampler.replay`).
    """

    batch: Count
    seqs: Annotated[list[Count], Meta(max_length=MAX_REPLAYABLE)]


class SamplerState(Message, frozen=True, kw_only=True):
    """What a sampler must know to go on: it travels in each batch, so the newest batch in the log
    is the sampler's memory.

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
    """Of the settled positions, those that the next batch may take once more (`sampler.replay`)."""
