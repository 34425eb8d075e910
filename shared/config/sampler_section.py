"""Which groups become a batch. Every field says what it is, in which unit, and why its default is what it is."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from shared.config.section import Section

Strategy = Literal["uniform", "learnability", "spread", "freshness", "balanced", "rescue", "likelihood_near", "likelihood_far"]


_MOST_GROUPS = 65_536
"""What `shared.contracts.messages.Batch` takes."""


class SamplerSection(Section):
    """Which groups become a batch."""

    local: int = Field(2, ge=0, le=65_536, description="I: own groups a batch.")
    external: int = Field(
        6, ge=0, le=65_536, description="J: other nodes' groups a batch, the most where `adapt` moves it; 0: ordinary RL."
    )
    strategy: Literal[Strategy, "bandit"] = Field(
        "likelihood_near",
        description="How external groups are drawn, see docs/sampling.md; uniform is the paper's. With likelihood_near, informed "
        "hostile nodes cost nothing that was measured (docs/results.md).",
    )
    bandit_arms: list[Strategy] = Field(
        ["uniform", "learnability", "spread", "freshness", "balanced"],
        min_length=1,
        max_length=16,
        description="What strategy bandit mixes, by the held-out gain that each brings.",
    )
    oversample: float = Field(
        3.0, ge=1, le=64, description="External groups sent to the trainer for each it keeps, with strategies likelihood_*."
    )
    adapt: Literal["off", "adaptive"] = Field("adaptive", description="adaptive: J moves between 0 and `external`, I + J stays.")
    adapt_period: int = Field(8, ge=1, le=10_000, description="Batches between two moves.")
    adapt_informative: tuple[float, float] = Field(
        (0.6, 0.95), description="Share of own groups with an advantage: J is largest up to the first, 0 from the second on."
    )
    shortage: Literal["wait", "fill_local", "short"] = Field(
        "fill_local",
        description="Too few external groups after `shortage_wait_s`: wait on, use own ones, or go on with fewer.",
    )
    shortage_wait_s: float = Field(5.0, ge=0, le=3600, description="Patience before `shortage` decides.")
    max_staleness: int = Field(1, ge=0, le=1024, description="Optimiser steps between sampling and use; also paces the generator.")
    max_external_age_s: float = Field(600.0, gt=0, description="Older foreign groups leave the pool.")
    pool_local: int = Field(1024, ge=1, le=1_000_000, description="Own groups kept waiting at most.")
    pool_external: int = Field(1024, ge=1, le=1_000_000, description="Foreign groups kept waiting at most.")
    replay: int = Field(
        0,
        ge=0,
        le=65_536,
        description="Own groups of earlier batches, with an advantage, that a batch has again on top of I and J, at most; 0: none.",
    )
    replay_batches: int = Field(
        10,
        ge=1,
        le=1000,
        description="How many batches back a replayed group's first batch may be; the scored stream is kept so long.",
    )
    prefetch: int = Field(1, ge=1, le=64, description="Batches built ahead of the trainer.")
    max_share_per_node: float = Field(
        0.5,
        gt=0,
        le=1,
        description="One node's part of a batch's external groups at most, or an equal part if that is more; "
        "no cap while only one other node is there. 1: off.",
    )

    newcomer_share: float = Field(
        0.25,
        gt=0,
        le=1,
        description="Part of a batch's external groups, or one, that newcomers together have at most while established nodes "
        "have enough; else more. 1: off.",
    )

    @model_validator(mode="after")
    def _can_move(self) -> SamplerSection:
        few, enough = self.adapt_informative
        if not 0.0 <= few < enough <= 1.0:
            raise ValueError(f"adapt_informative {[few, enough]} must be two shares, 0 <= first < second <= 1")
        if len(set(self.bandit_arms)) < len(self.bandit_arms):
            raise ValueError(f"bandit_arms {self.bandit_arms} names a strategy twice")
        return self

    @model_validator(mode="after")
    def _can_replay(self) -> SamplerSection:
        if not self.replay:
            return self
        if not self.local and self.adapt == "off":
            raise ValueError(
                f"replay is {self.replay} but local is 0: there are no own groups to replay; set local above 0 or replay = 0"
            )
        if self.local + self.external + self.replay > _MOST_GROUPS:
            raise ValueError(
                f"local + external + replay is more than the {_MOST_GROUPS} groups that a batch may have: lower one of them"
            )
        most = (self.local + self.external) * self.replay_batches
        if self.replay > most:
            raise ValueError(
                f"replay is {self.replay}, but the last {self.replay_batches} batches have at most {most} groups: "
                "lower replay or raise replay_batches"
            )
        return self
