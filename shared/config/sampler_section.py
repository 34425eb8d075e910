"""Settings of the sampler. Every field's description states its meaning, its unit and the reason
for its default.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from shared.config.section import Section
from shared.registry import STRATEGIES

_MOST_GROUPS = 65_536
"""Most groups in a batch, as in `shared.contracts.messages.Batch`."""


class SamplerSection(Section):
    """Batches: what the sampler builds them of."""

    local: int = Field(
        2, ge=0, le=65_536, description="I: local groups per batch. With the default J, I + J is 8 groups, as in the paper."
    )
    external: int = Field(
        6,
        ge=0,
        le=65_536,
        description="J: foreign groups per batch, or their maximum if `adapt` moves J; 0: ordinary RL. It is high because `adapt` "
        "lowers it where local groups teach enough.",
    )
    strategy: str = Field(
        "likelihood_near",
        description="How foreign groups are drawn: uniform (the paper's), learnability, rescue, likelihood_near, or a "
        "`swarm.strategies` entry point; see docs/sampling.md. With likelihood_near, "
        "informed hostile nodes caused no measured loss (docs/results.md).",
    )
    oversample: float = Field(
        3.0,
        ge=1,
        le=64,
        description="With likelihood_near: number of foreign groups sent to the trainer for each one that it keeps.",
    )
    adapt: Literal["off", "adaptive"] = Field(
        "adaptive", description="adaptive: J moves between 0 and `external` while I + J stays constant."
    )
    adapt_period: int = Field(
        8, ge=1, le=10_000, description="Batches between two changes of J, so that one unusual batch has little effect."
    )
    adapt_informative: tuple[float, float] = Field(
        (0.6, 0.95),
        description="Bounds for the share of informative local groups: J is largest up to the first, 0 from the second on.",
    )
    shortage: Literal["wait", "fill_local", "short"] = Field(
        "fill_local",
        description="What to do if there are too few foreign groups after `shortage_wait_s`: keep waiting, use local groups "
        "instead, or use fewer groups.",
    )
    shortage_wait_s: float = Field(
        5.0,
        ge=0,
        le=3600,
        description="Seconds to wait for foreign groups before `shortage` decides. The trainer may be idle until then, so the "
        "wait is short.",
    )
    max_staleness: int = Field(
        1,
        ge=0,
        le=1024,
        description="Largest number of policy versions between sampling a group and using it; also paces the generator. 1 lets it "
        "work while the trainer does; more makes groups staler and waits less.",
    )
    max_external_age_s: float = Field(
        600.0,
        gt=0,
        description="Foreign groups older than this many seconds leave the pool: their authors' policies have changed since.",
    )
    pool_local: int = Field(
        1024,
        ge=1,
        le=1_000_000,
        description="Largest number of local groups waiting, to limit memory; the oldest are dropped first.",
    )
    pool_external: int = Field(
        1024,
        ge=1,
        le=1_000_000,
        description="Largest number of foreign groups waiting, to limit memory; when full, the sender with most groups loses its "
        "oldest.",
    )
    replay: int = Field(
        0,
        ge=0,
        le=65_536,
        description="Largest number of informative local groups from earlier batches that a batch repeats in addition to I and J; "
        "0: none.",
    )
    replay_batches: int = Field(
        10,
        ge=1,
        le=1000,
        description="How many batches ago a replayed group may first have been used. The scored stream keeps groups for that long.",
    )
    prefetch: int = Field(
        1,
        ge=1,
        le=64,
        description="Number of batches built ahead of the trainer. 1, because a batch built earlier is staler when it is trained "
        "on.",
    )
    max_share_per_node: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Largest part of a batch's foreign groups that may come from one node. An equal part for every node is always "
        "allowed, even if that is more, and there is no limit while there is only one other node. 1: off.",
    )

    newcomer_share: float = Field(
        0.25,
        gt=0,
        le=1,
        description="Largest part of a batch's foreign groups (but at least one group) that may come from all newcomers together "
        "while established nodes have enough groups; otherwise newcomers may supply more. 1: off.",
    )

    @field_validator("strategy")
    @classmethod
    def _strategy_is_known(cls, value: str) -> str:
        return STRATEGIES.check(value)

    @model_validator(mode="after")
    def _can_move(self) -> SamplerSection:
        few, enough = self.adapt_informative
        if not 0.0 <= few < enough <= 1.0:
            raise ValueError(f"adapt_informative {[few, enough]} must be two shares, 0 <= first < second <= 1")
        return self

    @model_validator(mode="after")
    def _can_replay(self) -> SamplerSection:
        """A number that can never be reached would make every batch wait or fall short. That looks
        like a slow node, not like a wrong setting.
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
