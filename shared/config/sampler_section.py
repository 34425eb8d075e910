"""Which groups become a batch. Every field says what it is, in which unit, and why its default is
what it is.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from shared.config.section import Section
from shared.registry import STRATEGIES

BANDIT = "bandit"
"""Not a strategy but a mixture of some, chosen between by what each brings."""
_MOST_GROUPS = 65_536
"""What `shared.contracts.messages.Batch` takes."""


class SamplerSection(Section):
    """Which groups become a batch."""

    local: int = Field(2, ge=0, le=65_536, description="I: local groups a batch.")
    external: int = Field(
        6, ge=0, le=65_536, description="J: foreign groups a batch, the most where `adapt` moves it; 0: ordinary RL."
    )
    strategy: str = Field(
        "likelihood_near",
        description="How foreign groups are drawn: uniform (the paper's), learnability, spread, freshness, balanced, rescue, "
        "likelihood_near, likelihood_far, bandit, or a `swarm.strategies` entry point; see docs/sampling.md. With likelihood_near, "
        "informed hostile nodes cost nothing that was measured (docs/results.md).",
    )
    bandit_arms: list[str] = Field(
        ["uniform", "learnability", "spread", "freshness", "balanced"],
        min_length=1,
        max_length=16,
        description="What strategy bandit mixes, by the held-out gain that each brings.",
    )
    oversample: float = Field(
        3.0, ge=1, le=64, description="Foreign groups sent to the trainer for each it keeps, with strategies likelihood_*."
    )
    adapt: Literal["off", "adaptive"] = Field("adaptive", description="adaptive: J moves between 0 and `external`, I + J stays.")
    adapt_period: int = Field(
        8, ge=1, le=10_000, description="Batches between two moves of J, so that one odd batch moves it little."
    )
    adapt_informative: tuple[float, float] = Field(
        (0.6, 0.95), description="Share of local groups with an advantage: J is largest up to the first, 0 from the second on."
    )
    shortage: Literal["wait", "fill_local", "short"] = Field(
        "fill_local",
        description="Too few foreign groups after `shortage_wait_s`: wait on, use own ones, or go on with fewer.",
    )
    shortage_wait_s: float = Field(
        5.0,
        ge=0,
        le=3600,
        description="Seconds to wait for foreign groups before `shortage` decides; until then the trainer may stand still.",
    )
    max_staleness: int = Field(1, ge=0, le=1024, description="Policy versions between sampling and use; also paces the generator.")
    max_external_age_s: float = Field(
        600.0, gt=0, description="Older foreign groups leave the pool, in seconds: their authors' policies have moved on."
    )
    pool_local: int = Field(
        1024, ge=1, le=1_000_000, description="Local groups kept waiting at most, to bound memory; the oldest leave first."
    )
    pool_external: int = Field(
        1024,
        ge=1,
        le=1_000_000,
        description="Foreign groups kept waiting at most, to bound memory; when full, whoever has most loses the oldest.",
    )
    replay: int = Field(
        0,
        ge=0,
        le=65_536,
        description="Local groups of earlier batches, with an advantage, that a batch has again on top of I and J, at most; "
        "0: none.",
    )
    replay_batches: int = Field(
        10,
        ge=1,
        le=1000,
        description="How many batches back a replayed group's first batch may be; the scored stream is kept so long.",
    )
    prefetch: int = Field(
        1,
        ge=1,
        le=64,
        description="Batches built ahead of the trainer; 1, because what is built earlier is older when it is trained on.",
    )
    max_share_per_node: float = Field(
        0.5,
        gt=0,
        le=1,
        description="One node's part of a batch's foreign groups at most, or an equal part if that is more; "
        "no cap while only one other node is there. 1: off.",
    )

    newcomer_share: float = Field(
        0.25,
        gt=0,
        le=1,
        description="Part of a batch's foreign groups, or one, that newcomers together have at most while established nodes "
        "have enough; else more. 1: off.",
    )

    @field_validator("strategy")
    @classmethod
    def _strategy_is_known(cls, value: str) -> str:
        return value if value == BANDIT else STRATEGIES.check(value)

    @field_validator("bandit_arms")
    @classmethod
    def _arms_are_known(cls, value: list[str]) -> list[str]:
        return [STRATEGIES.check(name) for name in value]

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
        """A number that can never be met would make every batch wait or fall short, which looks
        like a slow node and not like a setting.
        """
        if not self.replay:
            return self
        if not self.local and self.adapt == "off":
            raise ValueError(
                f"replay is {self.replay} but local is 0: there are no local groups to replay; set local above 0 or replay = 0"
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
