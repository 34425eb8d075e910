"""The verifier's section of the configuration: what a node's border lets in, and what that may cost."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from shared.config.section import Section
from shared.contracts.limits import VERIFIER_ACK_WAIT_S, VERIFIER_MAX_DELIVER


class VerifierSection(Section):
    """The border of the node."""

    share: Literal["all", "informative", "none"] = Field(
        "all", description="Which local groups the swarm gets; informative: those whose rewards differ. The paper shares all."
    )
    share_tokens: bool = Field(True, description="Send token ids and behaviour logprobs too; of use under the same tokenizer.")
    workers: int = Field(
        2,
        ge=1,
        le=256,
        description="Scorer processes for this node's local groups; with one, an answer that hangs delays all others until it is "
        "killed. Foreign groups have processes of their own.",
    )
    foreign_workers: int = Field(
        1,
        ge=1,
        le=64,
        description="Scorer processes for foreign groups, besides `workers`: what strangers can take of this machine's processors "
        "at most. A group costs 10 ms of CPU time.",
    )
    foreign_group_s: float = Field(
        5.0,
        gt=0,
        le=600,
        description="Wall clock in seconds for a foreign group, its derivation included; past it the group is refused. Ordinary "
        "ones take milliseconds; one second of CPU time for the derivation and for each answer holds besides.",
    )
    answer_timeout_s: float = Field(5.0, gt=0, le=600, description="Wall clock for one own answer; after it the worker is killed.")
    worker_memory_mb: int = Field(2048, ge=256, description="Address space of a scorer process.")
    max_deliver: int = Field(
        VERIFIER_MAX_DELIVER, ge=1, le=100, description="Tries to score a group before it goes to the dead letters."
    )
    ack_wait_s: float = Field(VERIFIER_ACK_WAIT_S, ge=5, description="A group in work this long goes to another replica.")
    intake_groups_per_s: float = Field(20.0, gt=0, description="Foreign groups looked at per second, whatever the swarm's size.")
    intake_poll_s: float = Field(0.5, gt=0, le=60, description="Seconds between looks at the swarm's stream.")
    accept: Literal["auto", "same", "dataset", "any"] = Field(
        "auto",
        description="Foreign tasks taken in. same: dataset and config of one of this node's [[tasks]]; dataset: its dataset, in "
        "any config; any: every known dataset; auto: same with trust = open, dataset with trust = roster.",
    )
    max_age_s: float = Field(1800.0, gt=0, description="Oldest foreign group taken in.")
    max_clock_skew_s: float = Field(60.0, ge=0, description="How far in the future a foreign group may claim to be made.")
    max_foreign_bytes: int = Field(8 * 2**20, ge=1024, description="Largest foreign message looked at.")
    max_foreign_completions: int = Field(
        0,
        ge=0,
        le=1024,
        description="Completions taken in of a foreign group, the first ones where it has more; 0: twice generator.completions.",
    )
    max_foreign_length: float = Field(
        2.0,
        ge=1,
        le=1024,
        description="Longest foreign completion, as a multiple of generator.max_new_tokens; 2 leaves room for another tokenizer.",
    )
    max_answer_chars: int = Field(16_384, ge=1, description="Longest foreign completion text taken in.")
    foreign_partial_credit: bool = Field(
        False,
        description="Count what a foreign answer that does not pass (reward below 0.99) earned. Off: it counts 0, because paid "
        "near misses can be written on purpose. On: where a dataset hardly ever gives full marks.",
    )
    replay_memory: int = Field(200_000, ge=1000, description="Foreign group ids remembered so that none counts twice.")
    trust: Literal["open", "roster"] = Field(
        "open", description="open: a name belongs to the first key seen with it; roster: only what `roster_file` lists."
    )
    roster_file: Path = Field(
        Path("var/roster.txt"), description="Lines `name key [note]`, see `swarm roster`; read again when it changes."
    )
    signing_key_file: str = Field(
        "",
        description="Nkey seed that signs what is shared, for all replicas; empty: node.nk in the run's folder, made there.",
    )
    forget_names_after_s: float = Field(
        2_592_000.0, ge=3600, description="Trust open: a name that brought no group for this long is free again; 30 days."
    )
    max_sender_share: float = Field(0.5, gt=0, le=1, description="One sender's part of intake_groups_per_s at most.")
    newcomer_groups: int = Field(
        32, ge=0, le=1_000_000, description="Accepted groups until a key has earned a whole share (some minutes' work); 0: at once."
    )
    newcomer_share: float = Field(
        0.25,
        gt=0,
        lt=1,
        description="Part of intake and scorers that newcomers together have while established senders want it all; else more.",
    )
    intake_look_factor: float = Field(
        8.0, ge=1, le=1000, description="Messages read per one of intake_groups_per_s, to find the others' behind a flood."
    )

    @property
    def accepted_tasks(self) -> Literal["same", "dataset", "any"]:
        """What `accept` means with this `trust`."""
        if self.accept == "auto":
            return "dataset" if self.trust == "roster" else "same"
        return self.accept
