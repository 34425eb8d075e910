"""How a node's trainer learns. Every field says what it is, in which unit, and why its default is
what it is.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from shared.config.objective_section import ObjectiveSection
from shared.config.section import Section

MOST_RANK = 4096
"""Of adapters, whatever the model."""


class LoraSection(Section):
    """Low-rank adapters through peft; rank 0: full fine-tuning."""

    rank: int = Field(
        0,
        ge=0,
        le=MOST_RANK,
        description="Rank of the adapters. 0: full fine-tuning, the default, as it limits no change of the weights.",
    )
    alpha: float = Field(16.0, gt=0, description="The update is scaled by alpha / rank.")
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="On the adapter's input; 0, because with dropout what is trained is not the policy that sampled.",
    )
    target_modules: Literal["all-linear"] | list[str] = Field(
        "all-linear",
        description='all-linear: every linear layer but the output head. Or names of those to adapt, e.g. ["q_proj", "v_proj"]; '
        "a name fits all layers that end in it.",
    )
    publish: Literal["adapters", "merged"] = Field(
        "adapters",
        description="What generators get. adapters: their factors alone, in float32, beside the base that a generator has; small, "
        "and nothing is rounded into weights. merged: whole weights with the adapters in them, for an architecture that vLLM has "
        "no adapters for. A generator with vLLM needs the same trainer.lora settings as the trainer.",
    )


class TrainerSection(ObjectiveSection):
    """Advantages, loss, optimizer, checkpoints."""

    count_uninformative: bool | None = Field(
        None,
        description="Whether groups without spread in their rewards count in the loss's mean, which makes the step smaller. Unset: "
        "true for grpo, false for all others (DAPO's dynamic sampling).",
    )
    drop_truncated: bool = Field(
        False,
        description="Leave answers that were cut at the length limit out of the loss (DAPO's overlong filtering); their rewards "
        "stay in their group's baseline.",
    )
    advantage_scale: Literal["group", "batch", "none"] = Field(
        "group", description="What a group-centred reward is divided by: its group's deviation (GRPO), the batch's, or nothing."
    )
    advantage_std_ddof: Literal[0, 1] = Field(1, description="1: the sample's standard deviation, 0: the population's.")
    advantage_std_floor: float = Field(
        0.0,
        ge=0,
        description="The least standard deviation that is divided by, in units of the reward; 0: none. Partial rewards of 0.01 and "
        "0.05 otherwise become advantages as large as those of 0 and 1.",
    )
    oapl_value_beta: float = Field(1.0, gt=0, description="For objective oapl: temperature of the group's soft value.")
    importance_cap: float = Field(2.0, gt=0, description="Cap of the truncated importance weight between sampler and trainer.")
    unknown_behaviour_logprob: float | None = Field(
        None,
        le=0,
        description="Text without behaviour logprobs: a token weighs min(1, own probability / exp(this)), e.g. -3.0; unset: 1. For "
        "negative advantages alone where foreign_weight_positive is one.",
    )
    foreign_weight_level: Literal["token", "geometric_mean", "sequence"] = Field(
        "token",
        description="Importance weight of foreign text: per token, or one for the answer, the geometric mean or the product of its "
        "tokens' ratios. The last two also weigh text of another tokenizer whose author shares logprobs.",
    )
    foreign_weight_positive: Literal["capped", "at_most_one", "one"] = Field(
        "one",
        description="What becomes of that weight for positive advantages: min(w, importance_cap), min(w, 1), or 1. A weight below "
        "1 takes away what a better author has to teach.",
    )
    foreign_weight_negative: Literal["capped", "at_most_one", "one"] = Field(
        "at_most_one",
        description="The same for negative advantages: what this node's policy would hardly say need not be pushed down.",
    )
    foreign_negative_divergence: float | None = Field(
        None,
        ge=0,
        description="Drop foreign answers with a negative advantage whose author gave their tokens on average this much more "
        "log-probability than this node's policy, e.g. 0.5. Unset: none.",
    )
    foreign_capability_window: int = Field(
        0,
        ge=0,
        le=10_000,
        description="Multiply foreign advantages by how often their author's groups passed here next to this node's own, over this "
        "many earlier batches (HACPO: 5, of 128 questions each); 0: off.",
    )
    foreign_capability_bounds: tuple[float, float] = Field(
        (0.1, 10.0), description="Least and largest such factor. max_foreign_advantage bounds what it makes of an advantage."
    )
    drop_foreign_negatives: bool = Field(
        True,
        description="Drop all foreign answers with a negative advantage; they stay in their group's baseline. What is learned of "
        "others is then right by this node's verifier.",
    )
    drop_local_negatives: bool = Field(
        False,
        description="The same with the node's own answers, replayed ones included: what is trained on is right. A control for "
        "studies: how much of what sharing brings is learning from right answers alone (docs/results.md).",
    )
    policy_check_fraction: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Part of the foreign groups whose answers must not be absurd to this node's policy, at the cost of a "
        "forward pass; 0: off.",
    )
    foreign_logprob_slack: float | None = Field(
        2.0,
        gt=0,
        description="A checked answer whose mean logprob per token is more than this, in nats, below the mean of the batch's local "
        "answers is not trained on. Unset: only min_foreign_logprob counts.",
    )
    min_foreign_logprob: float = Field(
        -8.0, le=0, description="The same, whatever the local answers are like: the least mean logprob per token, in nats."
    )
    sequence_mask: tuple[float, float] | None = Field(
        None, description="Drop sequences whose geometric-mean importance ratio leaves these bounds, e.g. [0.5, 2.0]."
    )
    external_weight: float = Field(1.0, ge=0, le=1, description="Weight of foreign groups in the loss.")
    max_foreign_advantage: float = Field(
        0.0,
        ge=0,
        description="Largest |advantage| of a foreign completion. 0: automatic, sqrt(L - 1), the most that a group of L can have, "
        "with L generator.completions, at least 8.",
    )
    foreign_cost_factor: float = Field(
        4.0,
        ge=0,
        description="A foreign group may cost this many times what is usual in its batch, in tokens computed; 0: anything. A "
        "group of twice the completions of twice the length costs 4.",
    )
    foreign_share_factor: float = Field(
        4.0,
        ge=0,
        description="A foreign group counts for this many times a usual one's tokens at most, in losses that divide by tokens; "
        "0: for all it has. The demo's tasks differ by 4.",
    )
    foreign_norm_factor: float = Field(
        2.0,
        ge=0,
        description="A foreign group whose gradient is more than this many times the typical group's is scaled down to typical; "
        "only when foreign gradients are out of proportion (foreign_norm_proportion). 0: never. Honest groups of models/base are "
        "within 1.8 in nine batches of ten.",
    )
    foreign_norm_proportion: float = Field(
        1.5,
        ge=0,
        description="Foreign groups are measured one by one where their gradient's norm is this many times that of as many local "
        "groups. Lower is stricter, and costs two more passes over them in more steps.",
    )
    learning_rate: float = Field(1e-6, gt=0, le=1, description="Of AdamW; 1e-6 suits full fine-tuning of a real model.")
    betas: tuple[float, float] = Field(
        (0.9, 0.95),
        description="Of AdamW; 0.95 forgets old gradient sizes sooner than torch's 0.999, as is usual for language models.",
    )
    adam_eps: float = Field(1e-8, gt=0, description="Of AdamW, against division by 0; torch's default.")
    weight_decay: float = Field(
        0.0, ge=0, description="Of AdamW, decoupled; 0: nothing pulls weights toward 0, away from the model that is post-trained."
    )
    grad_clip: float = Field(
        1.0, ge=0, description="Largest gradient norm, so that one odd batch cannot move the policy far; 0: off."
    )
    warmup_steps: int = Field(0, ge=0, description="Steps over which the learning rate rises from 0.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Of the learning rate after warm-up; constant, as it alone needs no end."
    )
    schedule_steps: int = Field(0, ge=0, description="Where linear and cosine end; 0: max_steps.")
    updates_per_batch: int = Field(1, ge=1, le=64, description="Optimizer updates on each batch; clipping acts above 1.")
    token_budget: int = Field(16_384, ge=64, description="Padded tokens of one forward pass; changes memory, not the result.")
    shared_prompt: Literal["auto", "on", "off"] = Field("auto", description="Compute a group's prompt once instead of L times.")
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations: less memory. Off, because it takes longer: layers are computed twice."
    )
    max_steps: int = Field(0, ge=0, description="Stop after this many steps; 0: never.")
    checkpoint_every: int = Field(
        10,
        ge=1,
        le=1000,
        description="Steps between checkpoints: one that dies repeats those since the last. More often writes more to disk. "
        "Earlier after 256 MiB of batches, of which the log keeps a gigabyte.",
    )
    keep_checkpoints: int = Field(
        2, ge=1, description="Newest checkpoints kept; with 2 there is one to go on from when the newest is broken."
    )
    keep_best: bool = Field(True, description="Also keep the checkpoint with the best held-out pass rate.")
    threads: int = Field(0, ge=0, description="CPU threads for torch; 0: torch's own choice.")
    collective_timeout_s: float = Field(
        600.0, ge=1, description="With torchrun: how long a process waits for the others before all end."
    )
    lora: LoraSection = Field(default_factory=LoraSection)
    publish_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Of published whole weights; auto: model.dtype. bfloat16 drops changes of less than 0.2 to 0.4 % of a weight, "
        "also of adapters that are merged in (lora.publish, swarm_trainer_delta_lost_ratio), float16 an eighth of that. Helps only "
        "generators with the same model.dtype or float32: others round again. See docs/models.md.",
    )

    @model_validator(mode="after")
    def _bounds(self) -> TrainerSection:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)} must be two numbers of at least 0 and below 1")
        if self.sequence_mask and not 0 <= self.sequence_mask[0] < 1 < self.sequence_mask[1]:
            raise ValueError(f"sequence_mask {list(self.sequence_mask)} must be two bounds, 0 <= low < 1 < high")
        low, high = self.foreign_capability_bounds
        if not 0 < low <= 1 <= high < math.inf:
            raise ValueError(f"foreign_capability_bounds {[low, high]} must be two bounds, 0 < low <= 1 <= high")
        if self.schedule != "constant" and not (self.schedule_steps or self.max_steps):
            raise ValueError(f"schedule {self.schedule} needs an end: set trainer.schedule_steps or trainer.max_steps")
        return self
