"""The section `[verifier]` of a node's configuration: scoring, sharing, and the border."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from shared.config.section import Section
from shared.contracts.limits import VERIFIER_ACK_WAIT_S, VERIFIER_MAX_DELIVER


class VerifierSection(Section):
    """Scoring of answers, sharing, and the border."""

    share: Literal["all", "informative", "none"] = Field(
        "all",
        description="Which local groups to share with the swarm; informative: only those whose rewards differ. all, as in the "
        "paper.",
    )
    share_tokens: bool = Field(
        True, description="Also share token ids and behaviour logprobs, which nodes with the same tokenizer can use."
    )
    workers: int = Field(
        2,
        ge=1,
        le=256,
        description="Number of scorer processes for local groups. With only one, an answer that hangs delays all others until it "
        "is killed. Foreign groups have separate processes.",
    )
    foreign_workers: int = Field(
        1,
        ge=1,
        le=64,
        description="Number of scorer processes for foreign groups, in addition to `workers`. It limits how much of this machine's "
        "processors strangers can use. A group costs about 10 ms of CPU time.",
    )
    foreign_group_s: float = Field(
        5.0,
        gt=0,
        le=600,
        description="Wall-clock limit in seconds for deriving and scoring a foreign group; a group that exceeds it is refused. "
        "Ordinary groups take milliseconds. In addition, the derivation and each answer may use one second of CPU time.",
    )
    answer_timeout_s: float = Field(
        5.0,
        gt=0,
        le=600,
        description="Wall-clock limit in seconds for scoring one local answer; if it is exceeded, the scorer process is killed and "
        "the answer's reward is unknown. Ordinary answers take milliseconds.",
    )
    worker_memory_mb: int = Field(
        2048,
        ge=256,
        description="Address space of a scorer process in MiB; limited so that an answer cannot use up the machine's memory.",
    )
    max_deliver: int = Field(
        VERIFIER_MAX_DELIVER,
        ge=1,
        le=100,
        description="Attempts to score a group before it becomes a dead letter. More than one, because a verifier that is stopped "
        "in the middle of a group uses one up.",
    )
    ack_wait_s: float = Field(
        VERIFIER_ACK_WAIT_S,
        ge=5,
        description="Seconds after which an unfinished group is redelivered to another replica. 60 is longer than eight answers "
        "take that all reach answer_timeout_s.",
    )
    intake_groups_per_s: float = Field(
        20.0,
        gt=0,
        le=1_000_000,
        description="Foreign groups examined per second. The limit keeps a node's cost independent of the swarm's size.",
    )
    intake_poll_s: float = Field(
        0.5,
        gt=0,
        le=60,
        description="Seconds between reads of the swarm's stream; waiting adds little to "
        "the age of foreign groups, and each read is a request.",
    )
    accept: Literal["auto", "same", "dataset", "any"] = Field(
        "auto",
        description="Which foreign tasks are accepted. same: dataset and config of one of this node's [[tasks]]. dataset: one of "
        "their datasets, in any config. any: these and every dataset of reasoning-gym. auto: same with trust = open, dataset with "
        "trust = roster.",
    )
    max_age_s: float = Field(
        1800.0,
        gt=0,
        le=30 * 86_400,
        description="Maximum age of a foreign group in seconds. Group ids are remembered for as long, so that no group is accepted "
        "twice.",
    )
    max_clock_skew_s: float = Field(
        60.0,
        ge=0,
        description="How many seconds in the future a foreign group's creation time may be. 60 admits a clock that has run for "
        "weeks without being set.",
    )
    max_foreign_bytes: int = Field(
        8 * 2**20,
        ge=1024,
        description="Largest foreign message accepted, in bytes. It limits how much a stranger can make this node decode at once.",
    )
    max_foreign_completions: int = Field(
        0,
        ge=0,
        le=1024,
        description="Completions accepted per foreign group; if it has more, the first ones are used. 0: twice "
        "generator.completions.",
    )
    max_foreign_length: float = Field(
        2.0,
        ge=1,
        le=1024,
        description="Longest foreign completion, as a multiple of generator.max_new_tokens. 2 allows for another tokenizer.",
    )
    max_answer_chars: int = Field(
        16_384, ge=1, description="Longest foreign completion text accepted, in characters. It limits what a scorer has to read."
    )
    foreign_partial_credit: bool = Field(
        False,
        description="Keep the reward of a foreign answer that does not pass. Off: such an answer gets 0, "
        "because a sender can write nearly right answers on purpose. Turn it on if a dataset rarely gives full marks.",
    )
    replay_memory: int = Field(
        200_000, ge=1000, description="Number of foreign group ids remembered so that no group counts twice."
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
    forget_names_after_s: float = Field(
        2_592_000.0,
        ge=3600,
        description="With trust open, a name whose key has sent no new group for this many seconds becomes free; the default is 30 "
        "days.",
    )
    max_sender_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Largest part of intake_groups_per_s that one sender can use; below 1, so that none can use all of it.",
    )
    newcomer_groups: int = Field(
        32,
        ge=0,
        le=1_000_000,
        description="Number of accepted groups after which a key has earned a whole share; 32 take some minutes. 0: at once.",
    )
    newcomer_share: float = Field(
        0.25,
        gt=0,
        lt=1,
        description="Part of intake and scorer time that all newcomers together get while established senders could use all of it; "
        "otherwise newcomers get more.",
    )
    intake_look_factor: float = Field(
        8.0,
        ge=1,
        le=1000,
        description="Number of messages read for each one in intake_groups_per_s, so that honest senders' messages are found "
        "behind a flood.",
    )

    @property
    def accepted_tasks(self) -> Literal["same", "dataset", "any"]:
        """The value of `accept`, with `auto` resolved by `trust`."""
        if self.accept == "auto":
            return "dataset" if self.trust == "roster" else "same"
        return self.accept
