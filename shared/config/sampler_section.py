"""The sampler's settings, and all that it reads. Every field's description states its meaning,
its unit and the reason for its default.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from shared.config.load import Entry
from shared.config.node_sections import ProcessConfig
from shared.config.section import Section
from shared.config.task_sections import TaskSpec, rewards_from
from shared.registry import STRATEGIES

_MOST_GROUPS = 65_536
"""Most groups in a batch, as in `shared.contracts.messages.Batch`."""


class SamplerSection(Section):
    """Batches: what the sampler builds them of."""

    replay_batches: ClassVar[int] = 10
    """How many batches ago a replayed group may first have been used."""
    oversample: ClassVar[float] = 3.0
    """Foreign groups sent to the trainer for each place; more than 1, because some teach its policy
    nothing.
    """
    max_share_per_source: ClassVar[float] = 0.5
    """Largest part of a batch's foreign groups from one task source; an equal part for each is
    always allowed.
    """
    adapt_period: ClassVar[int] = 8
    """Batches between two changes of J, so that one unusual batch has little effect."""
    adapt_informative: ClassVar[tuple[float, float]] = (0.6, 0.95)
    """Share of informative local groups up to which J is largest, and from which it is 0."""
    newcomer_share: ClassVar[float] = 0.25
    """Largest part of a batch's foreign groups (at least one) from all newcomers together while
    others have enough.
    """
    pool_local: ClassVar[int] = 1024
    """Most local groups waiting; the oldest are dropped first."""
    pool_external: ClassVar[int] = 1024
    """Most foreign groups waiting; the sender with most loses its oldest."""
    prefetch: ClassVar[int] = 1
    """Batches built ahead of the trainer; more would be staler when trained on."""

    local: int = Field(2, ge=0, le=65_536, description="I: local groups per batch.")
    external: int = Field(
        6,
        ge=0,
        le=65_536,
        description="J: foreign groups per batch, or the most if `adapt` moves J; 0: ordinary RL.",
    )
    strategy: str = Field(
        "uniform",
        description="How foreign groups are drawn: uniform (the paper's), another of docs/sampling.md such as learnability, or a "
        "`swarm.strategies` entry point.",
    )
    adapt: Literal["off", "adaptive"] = Field(
        "adaptive", description="adaptive: J moves between 0 and `external` while I + J stays constant."
    )
    shortage: Literal["wait", "fill_local", "short"] = Field(
        "fill_local",
        description="With too few foreign groups after `shortage_wait_s`: keep waiting, use local groups instead, or use fewer.",
    )
    shortage_wait_s: float = Field(5.0, ge=0, le=3600, description="Seconds to wait for foreign groups before `shortage` decides.")
    max_staleness: int = Field(
        1,
        ge=0,
        le=1024,
        description="Most policy versions between sampling a group and using it; also paces the generator. More makes groups "
        "staler and waits less.",
    )
    max_external_age_s: float = Field(
        600.0, gt=0, le=30 * 86_400, description="Foreign groups older than this many seconds leave the pool."
    )
    replay: int = Field(
        0,
        ge=0,
        le=65_536,
        description="Most informative local groups of the last 10 batches that a batch repeats in addition to I and J; 0: none.",
    )
    max_share_per_node: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Largest part of a batch's foreign groups from one node; an equal part for every node is always allowed. "
        "1: off.",
    )

    @field_validator("strategy")
    @classmethod
    def _strategy_is_known(cls, value: str) -> str:
        # The verifier's image has the section and no sampler, whose files name the strategies.
        return STRATEGIES.check(value) if STRATEGIES.built_in else value

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


class SamplerConfig(ProcessConfig):
    """The part of a node's configuration that the sampler reads."""

    tasks: list[TaskSpec] = Field(default_factory=list)
    sampler: SamplerSection = Field(default_factory=SamplerSection)

    @classmethod
    def placed(cls, values: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The values of a file in `folder`, with the whole paths of the rewards that it names."""
        return {**values, "tasks": rewards_from(values["tasks"], folder)} if "tasks" in values else values

    def problems(self) -> Iterator[str]:
        """As in the base class."""
        if not self.tasks:
            yield (
                "tasks: at least one [[tasks]] entry is needed, because a configuration file, or SWARM_TASKS, replaces the demo's: "
                "begin with `swarm config show --all > node.toml`, or choose dataset names from `swarm task list`"
            )
        if self.sampler.local + self.sampler.external == 0:
            yield "sampler.local + sampler.external is 0: a batch would be empty; set at least one of them above 0"
        if self.sampler.external and self.nats.swarm_url is None:
            yield (
                f"sampler.external is {self.sampler.external} but nats.swarm_url is none: there is no swarm to receive foreign "
                "groups from; set sampler.external = 0 or set nats.swarm_url"
            )
        yield from super().problems()

    def entries(self) -> Iterator[Entry]:
        """As in the base class."""
        yield "sampler", STRATEGIES.kind, self.sampler.strategy
        yield from super().entries()
