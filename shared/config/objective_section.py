"""The loss that a node's trainer minimises, and its constants."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from shared.config.section import Section
from shared.registry import OBJECTIVES


class ObjectiveSection(Section):
    """The loss and its constants: the part of `[trainer]` that an objective reads."""

    objective: str = Field(
        "dapo",
        description="The loss: grpo, dr_grpo, dapo, gspo, cispo, reinforce, rloo, m2po, gepo, vespo, oapl, or a `swarm.objectives` "
        "entry point; docs/objectives.md has formulas and sources. dapo averages over all tokens of the batch. m2po, gepo, vespo "
        "and oapl are designed for text sampled by other or older policies.",
    )
    objective_options: dict[str, float | int | bool | str] = Field(
        default_factory=dict,
        description="Constants of an objective from an installed package, by name; see that objective's documentation.",
    )
    aggregation: Literal["sequence_mean", "token_mean", "fixed_length", "sequence_sum"] | None = Field(
        None, description="What the loss is averaged over. Unset: the objective's published choice."
    )
    clip_low: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Ratios below 1 - clip_low are clipped. Unset: the objective's published bound, 0.2; gspo: 3e-4.",
    )
    clip_high: float | None = Field(
        None,
        ge=0,
        description="Ratios above 1 + clip_high are clipped. Unset: the objective's published bound: 0.28 for dapo, 4e-4 for gspo, "
        "else 0.2. The SAPO paper trains grpo with 0.28.",
    )
    dual_clip: float = Field(
        0.0, ge=0, description="Limit of the ratio for negative advantages (dual-clip PPO), above 1 + clip_high; 0: off."
    )
    cispo_min: float = Field(0.0, ge=0, description="Lower bound of the importance ratio for objective cispo; 0: none, as in TRL.")
    cispo_max: float = Field(
        5.0, gt=0, description="Upper bound of the importance ratio for objective cispo; 5 as in ScaleRL and recommended by TRL."
    )
    m2_threshold: float = Field(
        0.04,
        gt=0,
        description="For objective m2po: largest mean of (log policy - log behaviour)^2 over the kept tokens that an update moves "
        "further from the policy that sampled them; 0.04 as in the paper.",
    )
    vespo_positive: tuple[float, float] = Field(
        (2.0, 3.0), description="For objective vespo: k and lambda for positive advantages, as in the paper and TRL."
    )
    vespo_negative: tuple[float, float] = Field(
        (3.0, 2.0), description="The same for negative advantages, also as in the paper and TRL."
    )
    oapl_scale: float = Field(
        1e-3,
        gt=0,
        description="For objective oapl: factor of the log ratio when it is compared with the advantage. It is small because the "
        "ratio is of a whole answer, tens or hundreds of nats.",
    )
    kl_coefficient: float = Field(
        0.0, ge=0, description="Weight of the KL divergence to the base policy (k3 estimator); 0 as in the paper."
    )

    @field_validator("objective")
    @classmethod
    def _objective_is_known(cls, value: str) -> str:
        return OBJECTIVES.check(value)

    @model_validator(mode="after")
    def _constants_have_a_meaning(self) -> Self:
        most = 1 + (self.clip_high or 0.0)
        if self.dual_clip and self.dual_clip <= most:
            raise ValueError(f"dual_clip {self.dual_clip} must be above 1 + clip_high = {most}; 0 turns it off")
        if self.cispo_min >= self.cispo_max:
            raise ValueError(f"cispo_min {self.cispo_min} must be below cispo_max {self.cispo_max}")
        if min(*self.vespo_positive, *self.vespo_negative) <= 0:
            raise ValueError("vespo_positive and vespo_negative must be two numbers above 0 each")
        return self
