"""The state that a sampler needs to resume. Every batch contains it, so a restarted sampler reads
it from the newest batch in the log.

Every field has a default, so that the state in a batch of an older version can still be read.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.contracts.wire import Count, DatasetName, Message, Number, Reward, Sha256, Share, ShortText

Discounted = Annotated[float, Meta(ge=0.0, le=1e12)]
"""A count in which older events have less weight."""
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
    """State of the controller that moves J. `services.sampler.composition` explains the
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
    scorer: Sha256 | None = None
    """The scorers that the remembered results are by (`shared.config.scorers_id`)."""
    questions: Sha256 | None = None
    """The held-out questions that `held_out` and `datasets` are about."""


class TrainedGroups(Message, frozen=True, kw_only=True):
    """Positions of local groups that were first used in `batch` and may be replayed
    (`services.sampler.memory`).
    """

    batch: Count
    seqs: Annotated[list[Count], Meta(max_length=MAX_REPLAYABLE)]


class SamplerState(Message, frozen=True, kw_only=True):
    """State from which a sampler resumes. It is part of each batch, so the newest batch in the log
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
    sharing: SharingState | None = None
    """What decides the next batch's I and J; None if they do not move."""
    replayable: Annotated[list[TrainedGroups], Meta(max_length=MAX_REPLAYABLE)] = []
    """The settled positions that the next batch may use again (`sampler.replay`)."""
