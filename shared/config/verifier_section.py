"""The section `[verifier]` of a node's configuration: scoring, sharing, and the border; and what
commands that look at nodes read.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from shared.config.node_sections import ProcessConfig
from shared.config.section import Section
from shared.contracts.limits import VERIFIER_ACK_WAIT_S, VERIFIER_MAX_DELIVER


class VerifierSection(Section):
    """Scoring of answers, sharing, and the border."""

    max_foreign_completions: ClassVar[int] = 0
    """Completions accepted per foreign group, of which the first are used; 0: twice
    generator.completions.
    """
    newcomer_share: ClassVar[float] = 0.25
    """Part of intake and scorer time for all newcomers together while others could use all of it.
    """
    foreign_group_s: ClassVar[float] = 5.0
    """Wall-clock limit for deriving and scoring a foreign group. Ordinary groups take milliseconds.
    """
    max_deliver: ClassVar[int] = VERIFIER_MAX_DELIVER
    """Attempts to score a group before it becomes a dead letter: a verifier that is stopped uses
    one up.
    """
    ack_wait_s: ClassVar[float] = VERIFIER_ACK_WAIT_S
    """After this an unfinished group goes to another replica; longer than eight answers take that
    hang.
    """
    intake_poll_s: ClassVar[float] = 0.5
    """Between reads of the swarm's stream: little of a group's age, and few requests."""
    max_age_s: ClassVar[float] = 1800.0
    """Maximum age of a foreign group, where the sampler takes none that is older; group ids are
    remembered for as long.
    """
    max_clock_skew_s: ClassVar[float] = 60.0
    """How far in the future a foreign group may be made: a clock that was not set for weeks."""
    max_foreign_bytes: ClassVar[int] = 8 * 2**20
    """Largest foreign message accepted, so that a stranger cannot make this node decode more at
    once.
    """
    max_foreign_length: ClassVar[float] = 2.0
    """Longest foreign completion over generator.max_new_tokens: another tokenizer may need more."""
    replay_memory: ClassVar[int] = 200_000
    """Foreign group ids remembered, so that no group counts twice."""
    forget_names_after_s: ClassVar[float] = 30 * 86_400.0
    """With trust open, a name is free after so long without a new group of its key."""
    intake_groups_per_s: ClassVar[float] = 20.0
    """Most foreign groups examined per second, whatever the sampler wants."""
    max_sender_share: ClassVar[float] = 0.5
    """Largest part of intake_groups_per_s for one sender; below 1, so that none can use all of it.
    """
    intake_look_factor: ClassVar[float] = 8.0
    """Most messages read for each one that may be examined, so that honest ones are found behind a
    flood.
    """

    share: Literal["all", "informative", "none"] = Field(
        "informative",
        description="Which local groups to share with the swarm; informative: those with both right and wrong answers, because the "
        "others teach nobody. all, as in the paper.",
    )
    share_tokens: bool = Field(
        True,
        description="Also share token ids where the text does not give them, and all ids and logprobs while a node asks for "
        "logprobs.",
    )
    workers: int = Field(
        2,
        ge=1,
        le=256,
        description="Scorer processes for local groups; half as many, at least one, score foreign groups. With only one, an "
        "answer that hangs delays all others until it is killed.",
    )
    answer_timeout_s: float = Field(
        5.0,
        gt=0,
        le=600,
        description="Wall-clock limit in seconds for scoring one local answer; beyond it the scorer is killed and the reward "
        "is unknown.",
    )
    worker_memory_mb: int = Field(2048, ge=256, description="Address space of a scorer process in MiB.")
    accept: Literal["auto", "same", "dataset", "any"] = Field(
        "auto",
        description="Foreign tasks to accept. same: dataset and config of one of this node's [[tasks]]. dataset: any config of "
        "their datasets. any: also every dataset of reasoning-gym. auto: same with trust = open, dataset with "
        "trust = roster.",
    )
    foreign_partial_credit: bool = Field(
        False,
        description="Keep the reward of a foreign answer that does not pass. Off: it counts as wrong, because a sender can write "
        "nearly right answers on purpose.",
    )
    trust: Literal["open", "roster"] = Field(
        "open",
        description="open: a name belongs to the first key that used it. roster: only the keys in `roster_file` are admitted.",
    )
    roster_file: Path = Field(
        Path("var/roster.txt"),
        description="File with lines of the form `name key [note]`; see `swarm roster`. It is reloaded when it changes.",
    )
    signing_key_file: str = Field(
        "",
        description="File with the nkey seed that all replicas sign shared groups with; empty: node.nk in the run's folder, "
        "created there if missing.",
    )
    demonstrations: bool = Field(
        False,
        description="Train on groups of the roster's nodes whose answers are all right: at most a quarter of a batch, each answer "
        "with its reward minus this node's own pass rate. Needs trust = roster.",
    )
    newcomer_groups: int = Field(
        32,
        ge=0,
        le=1_000_000,
        description="Accepted groups after which a key has earned a whole share. 0: at once.",
    )

    @model_validator(mode="after")
    def _demonstrators_are_known(self) -> VerifierSection:
        if self.demonstrations and self.trust != "roster":
            raise ValueError(
                "demonstrations needs trust = roster, because a demonstration teaches whatever its sender wrote: name the senders "
                "in a roster, or set demonstrations = false"
            )
        return self

    @property
    def foreign_workers(self) -> int:
        """Scorer processes for foreign groups: how much of this machine strangers can use."""
        return max(1, self.workers // 2)

    @property
    def accepted_tasks(self) -> Literal["same", "dataset", "any"]:
        """The value of `accept`, with `auto` resolved by `trust`."""
        if self.accept == "auto":
            return "dataset" if self.trust == "roster" else "same"
        return self.accept


class ViewConfig(ProcessConfig):
    """The part of a node's configuration that a command reads which looks at nodes: the servers,
    and whose keys count (`verifier.trust` and its roster).
    """

    verifier: VerifierSection = Field(default_factory=VerifierSection)
