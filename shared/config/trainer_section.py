"""Settings of the trainer. Every field's description states its meaning, its unit and the reason
for its default.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from shared.config.section import AnyDtype, Section
from shared.registry import OBJECTIVES, TRACKERS

COMMON_OPTIONS = ("aggregation", "advantage_scale", "count_uninformative", "dual_clip")
"""Names in `trainer.objective_options` that every objective of this project has."""


class ObjectiveSection(Section):
    """The loss and its constants: the part of `[trainer]` that an objective reads."""

    objective: str = Field(
        "dapo",
        description="The loss: one of docs/training.md, such as grpo, dapo, gspo or cispo, or a `swarm.objectives` entry point.",
    )
    objective_options: dict[str, float | int | bool | str] = Field(
        default_factory=dict,
        description="Constants of the loss, by name: aggregation, advantage_scale, count_uninformative, dual_clip, the "
        "objective's own such as max of cispo (docs/training.md), and those of an installed one.",
    )
    clip_low: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Ratios below 1 - clip_low are clipped. Unset: the objective's published bound.",
    )
    clip_high: float | None = Field(
        None,
        ge=0,
        description="Ratios above 1 + clip_high are clipped. Unset: the objective's published bound. The SAPO paper trains "
        "grpo with 0.28.",
    )
    kl_coefficient: float = Field(
        0.0, ge=0, description="Weight of the KL divergence to the base policy (k3 estimator); 0 as in the paper."
    )

    @field_validator("objective")
    @classmethod
    def _objective_is_known(cls, value: str) -> str:
        return OBJECTIVES.check(value)


MOST_RANK = 4096
"""Largest adapter rank, for any model."""


class LoraSection(Section):
    """Low-rank adapters through peft; rank 0: full fine-tuning."""

    rank: int = Field(0, ge=0, le=MOST_RANK, description="Rank of the adapters. 0: full fine-tuning.")
    alpha: float = Field(16.0, gt=0, description="The update is scaled by alpha / rank: by 1 at the common rank of 16.")
    target_modules: Literal["all-linear"] | list[str] = Field(
        "all-linear",
        description='all-linear: every linear layer except the output head. Or names of layers, e.g. ["q_proj", "v_proj"]; a '
        "name matches all that end in it.",
    )
    publish: Literal["adapters", "merged"] = Field(
        "adapters",
        description="adapters: only their factors in float32, which each generator adds to its base. merged: full weights, for "
        "an architecture whose adapters vLLM does not support. A generator with vLLM needs the trainer's "
        "trainer.lora.",
    )


class TrainerConstants(Section):
    """Constants that only experiments change, one by one (docs/training.md, "Constants")."""

    foreign_weight_level: Literal["token", "geometric_mean", "sequence"] = Field(
        "token",
        description="Level of the importance weight of foreign text. token: one weight per token. geometric_mean, sequence: one "
        "weight per answer, the geometric mean or the product of its tokens' ratios; these two also apply to text of another "
        "tokenizer whose sender shares logprobs.",
    )
    foreign_weight_positive: Literal["capped", "at_most_one", "one"] = Field(
        "one",
        description="How that weight w is used for positive advantages: min(w, importance_cap), min(w, 1), or 1. A weight below 1 "
        "reduces what can be learned from a better policy.",
    )
    foreign_weight_negative: Literal["capped", "at_most_one", "one"] = Field(
        "at_most_one",
        description="The same for negative advantages. Text that this node's policy would hardly produce need not be made even "
        "less likely.",
    )
    foreign_negative_divergence: float | None = Field(
        None,
        ge=0,
        description="Drop foreign answers with a negative advantage if their sender's mean log-probability per token exceeds this "
        "node's by this many nats, e.g. 0.5. Unset: never.",
    )
    drop_foreign_negatives: bool = Field(
        True,
        description="Drop all foreign answers with a negative advantage; they stay in their group's baseline. Then everything "
        "learned from foreign groups is right according to this node's verifier.",
    )
    drop_local_negatives: bool = Field(
        False,
        description="The same for local answers, including replayed ones, so that only right answers are trained on. A control for "
        "studies of how much of the benefit of sharing comes from learning only from right answers (docs/results.md).",
    )
    policy_check_fraction: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Fraction of the foreign groups whose answers are checked for their likelihood under this node's policy. The "
        "check costs a forward pass. 0: off.",
    )
    foreign_logprob_slack: float | None = Field(
        2.0,
        gt=0,
        description="A checked answer is left out if its mean logprob per token is more than this many nats below the mean of the "
        "batch's local answers. Unset: only min_foreign_logprob applies.",
    )
    min_foreign_logprob: float = Field(
        -8.0, le=0, description="The same with a fixed limit: smallest mean logprob per token, in nats; -8 bars only absurd text."
    )
    sequence_mask: tuple[float, float] | None = Field(
        None, description="Drop sequences whose geometric-mean importance ratio is outside these bounds, e.g. [0.5, 2.0]."
    )
    external_weight: float = Field(1.0, ge=0, le=1, description="Weight of foreign groups in the loss; 1: the same as local ones.")
    foreign_cost_factor: float = Field(
        4.0,
        ge=0,
        description="Largest cost of a foreign group, in computed tokens, as a multiple of the usual group of its batch; 0: no "
        "limit. A group with twice the completions of twice the length costs 4.",
    )
    foreign_share_factor: float = Field(
        4.0,
        ge=0,
        description="In losses that divide by tokens: largest number of tokens that a foreign group counts for, as a multiple of a "
        "usual group's; 0: no limit. The demo's tasks differ by a factor of 4.",
    )
    foreign_norm_factor: float = Field(
        2.5,
        ge=0,
        description="A foreign group whose gradient norm is more than this many times the mean of the last 16 local groups' "
        "is scaled down to it. 0: never. Of honest nodes' steps this changes about one in a hundred.",
    )
    importance_cap: float = Field(
        2.0, gt=0, description="Upper limit of the importance weight between engine and trainer, so that no single token dominates."
    )
    advantage_std_ddof: Literal[0, 1] = Field(1, description="1: the sample standard deviation, as in TRL; 0: the population's.")
    betas: tuple[float, float] = Field(
        (0.9, 0.95),
        description="AdamW's betas; 0.95 forgets old gradient sizes sooner than torch's 0.999, as is usual for language models.",
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="AdamW's decoupled weight decay; 0, so that nothing pulls weights toward 0, away from the pretrained model.",
    )
    adam_eps: float = Field(1e-8, gt=0, description="AdamW's epsilon, against division by 0; torch's default.")

    @model_validator(mode="after")
    def _bounds(self) -> TrainerConstants:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)} must be two numbers of at least 0 and below 1")
        if self.sequence_mask and not 0 <= self.sequence_mask[0] < 1 < self.sequence_mask[1]:
            raise ValueError(f"sequence_mask {list(self.sequence_mask)} must be two bounds, 0 <= low < 1 < high")
        return self


RAW = {
    "drop_foreign_negatives": False,
    "policy_check_fraction": 0.0,
    "foreign_cost_factor": 0.0,
    "foreign_share_factor": 0.0,
    "foreign_norm_factor": 0.0,
}
"""Constants with `foreign = "raw"`."""


class TrainerSection(ObjectiveSection):
    """Advantages, loss, optimizer, checkpoints."""

    packed_rows: ClassVar[bool] = True
    """Compute texts without padding and a prompt once, not L times, where the model allows it."""
    keep_best: ClassVar[bool] = True
    """Also keep the checkpoint with the best held-out result, as a run may fall from it."""
    collective_timeout_s: ClassVar[float] = 600.0
    """With torchrun: how long a process waits for the others before all exit."""

    foreign: Literal["bounded", "raw"] = Field(
        "bounded",
        description="How foreign groups are trained on. bounded: only their right answers, none that is absurd under this node's "
        "policy, and none with more cost, tokens or gradient than usual. raw: like local groups, as in the paper.",
    )
    constants: TrainerConstants = Field(default_factory=TrainerConstants)
    drop_truncated: bool = Field(
        False,
        description="Leave answers truncated at the length limit out of the loss (DAPO's overlong filtering); they stay in the "
        "group's baseline.",
    )
    learning_rate: float = Field(
        1e-6, gt=0, le=1, description="AdamW's learning rate; 1e-6 suits full fine-tuning of a pretrained model."
    )
    grad_clip: float = Field(1.0, ge=0, description="Largest gradient norm; 0: off.")
    warmup_steps: int = Field(0, ge=0, description="Steps over which the learning rate rises from 0 to learning_rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="Schedule of the learning rate after warm-up; linear and cosine end at max_steps.",
    )
    updates_per_batch: int = Field(1, ge=1, le=64, description="Optimizer updates per batch; clipping has an effect only above 1.")
    token_budget: int = Field(
        16_384,
        ge=64,
        description="Tokens in a forward pass; affects memory and a GPU's speed. 16,384 suit 0.5B and 48 GB.",
    )
    gradient_checkpointing: bool = Field(
        False,
        description="Recompute activations in the backward pass, which saves memory and takes longer.",
    )
    max_steps: int = Field(0, ge=0, description="Stop after this many steps; 0: never.")
    checkpoint_every: int = Field(
        10,
        ge=1,
        le=1000,
        description="Steps between checkpoints, which a trainer that dies repeats. One is written early after 256 MiB of "
        "batches, because the log keeps only a gigabyte.",
    )
    keep_checkpoints: int = Field(
        2, ge=1, description="Newest checkpoints kept. With 2, training can resume even if the newest is damaged."
    )
    lora: LoraSection = Field(default_factory=LoraSection)
    publish_dtype: AnyDtype = Field(
        "auto",
        description="Dtype of published full weights; auto: model.dtype. bfloat16 rounds away changes smaller than 0.2 to 0.4 "
        "% of a weight (swarm_trainer_delta_lost_ratio). A higher precision helps only generators with the same "
        "model.dtype or float32 (docs/models.md).",
    )

    @model_validator(mode="after")
    def _bounds(self) -> TrainerSection:
        if self.schedule != "constant" and not self.max_steps:
            raise ValueError(f"schedule {self.schedule} needs an end: set trainer.max_steps")
        return self

    @model_validator(mode="before")
    @classmethod
    def _constants_of_raw(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("foreign") == "raw" and isinstance(values.get("constants", {}), dict):
            return {**values, "constants": {**RAW, **values.get("constants", {})}}
        return values


class TrackingSection(Section):
    """Experiment trackers to which the trainer also sends its metrics; see
    docs/extend/tracker.md.
    """

    trackers: Literal["auto"] | list[str] = Field(
        "auto",
        description="auto: TensorBoard if it is installed. Or a list of tensorboard, wandb, trackio and `swarm.trackers` entry "
        "points. []: none.",
    )
    project: str = Field(
        "swarm",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="The project under which a tracker files the run. The run itself is named after node.run and node.id.",
    )
    online: bool = Field(
        False,
        description="Whether a tracker may contact a server; account and address come from its own environment variables. "
        "False: everything stays in node.var_dir.",
    )
    options: dict[str, float | int | bool | str] = Field(
        default_factory=dict,
        description="Settings of a tracker from an installed package, by name; see that tracker's documentation.",
    )

    @field_validator("trackers")
    @classmethod
    def _trackers_are_known(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, list):
            for name in value:
                TRACKERS.check(name)
        return value
