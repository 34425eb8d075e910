"""Which objective, with which constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from services.trainer.objectives.base import Aggregation, Objective
from shared.config import NodeConfig
from shared.registry import OBJECTIVES

OptionValue = float | int | bool | str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """Constants of the objective `name`; what each does with them is in its file.

    dual_clip: at most this multiple of |A| is lost where A < 0 (arXiv 1912.09729); more than 1 +
    clip_high; None: off. is_min, is_max: cispo's bounds of the ratio itself. kl_coefficient: weight
    of the k3 divergence to the reference policy; 0: no reference is needed. max_completion_tokens:
    dr_grpo's constant length; must not change between steps. log_ratio_bound: log ratios are
    clamped to +- this before exp. m2_threshold: m2po's tau. vespo_positive, vespo_negative: (k, l)
    by the advantage's sign. oapl_scale: its second beta. aggregation: overrides the objective's
    own. options: the constants of an objective that an installed package brings, by name.
    """

    name: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    is_min: float = 0.0
    is_max: float = 5.0
    kl_coefficient: float = 0.0
    max_completion_tokens: int | None = None
    log_ratio_bound: float = 20.0
    m2_threshold: float = 0.04
    vespo_positive: tuple[float, float] = (2.0, 3.0)
    vespo_negative: tuple[float, float] = (3.0, 2.0)
    oapl_scale: float = 1e-3
    aggregation: Aggregation | None = None
    options: Mapping[str, OptionValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse combinations that have no meaning."""
        objective = self.objective
        if self.aggregation not in (None, *get_args(Aggregation)):
            raise ValueError(f"aggregation {self.aggregation!r} is unknown: use sequence_mean, token_mean or fixed_length")
        if not 0.0 <= self.clip_low <= 1.0:
            raise ValueError(f"clip_low is {self.clip_low}: 1 - clip_low bounds a ratio, so use a value from 0 to 1")
        if not self.clip_high >= 0.0:
            raise ValueError(f"clip_high is {self.clip_high}: it must be 0 or more")
        if self.dual_clip is not None and not objective.clips:
            raise ValueError(f"dual_clip acts on objectives that clip, and {self.name} does not: set it to 0 or choose another")
        if self.dual_clip is not None and not self.dual_clip > 1.0 + self.clip_high:
            raise ValueError(f"dual_clip is {self.dual_clip}: it must be more than 1 + clip_high")
        if not 0.0 <= self.is_min < self.is_max:
            raise ValueError(f"is_min {self.is_min} and is_max {self.is_max}: need 0 <= is_min < is_max")
        if not self.kl_coefficient >= 0.0:
            raise ValueError(f"kl_coefficient is {self.kl_coefficient}: it must be 0 or more")
        if not self.log_ratio_bound > 0.0:
            raise ValueError(f"log_ratio_bound is {self.log_ratio_bound}: it must be more than 0")
        if not self.m2_threshold > 0.0:
            raise ValueError(f"m2_threshold is {self.m2_threshold}: it must be more than 0")
        if not all(number > 0.0 for number in (*self.vespo_positive, *self.vespo_negative)):
            raise ValueError(f"vespo_positive {self.vespo_positive} and vespo_negative {self.vespo_negative} must be more than 0")
        if not self.oapl_scale > 0.0:
            raise ValueError(f"oapl_scale is {self.oapl_scale}: it must be more than 0")
        if self.aggregated_by == "fixed_length" and (self.max_completion_tokens or 0) < 1:
            raise ValueError(f"{self.name} divides by a constant length: set max_completion_tokens to 1 or more")

    @property
    def objective(self) -> Objective:
        """The objective itself.

        Raises:
            UnknownNameError, BrokenEntryError: see `shared.registry.Registry.load`.
            TypeError: what an installed package calls so is no `Objective`.
        """
        found: Any = OBJECTIVES.load(self.name)
        if not isinstance(found, Objective):
            raise TypeError(f"objective {self.name} is a {type(found).__name__}: its entry point must name an Objective")
        return found

    @property
    def aggregated_by(self) -> Aggregation:
        """The aggregation in force."""
        return self.aggregation or self.objective.aggregation

    @property
    def needs_reference(self) -> bool:
        """Whether logprobs of a reference policy are needed."""
        return self.kl_coefficient > 0.0


def objective_config(config: NodeConfig) -> ObjectiveConfig:
    """The objective that a node's configuration asks for.

    Raises:
        ValueError: it cannot be had, or not with the other settings; the message names them as the
            configuration does.
    """
    trainer = config.trainer
    if trainer.objective_options and trainer.objective in OBJECTIVES.built_in:
        raise ValueError(f"trainer.objective_options are for an objective of your own: {trainer.objective} has settings by name")
    wanted = ObjectiveConfig(
        name=trainer.objective,
        clip_low=trainer.clip_low,
        clip_high=trainer.clip_high,
        dual_clip=trainer.dual_clip or None,
        is_min=trainer.cispo_min,
        is_max=trainer.cispo_max,
        kl_coefficient=trainer.kl_coefficient,
        max_completion_tokens=config.generator.max_new_tokens,
        m2_threshold=trainer.m2_threshold,
        vespo_positive=trainer.vespo_positive,
        vespo_negative=trainer.vespo_negative,
        oapl_scale=trainer.oapl_scale,
        aggregation=trainer.aggregation,
        options=trainer.objective_options,
    )
    if wanted.objective.advantages == "leave_one_out" and trainer.advantage_scale == "batch":
        raise ValueError(
            f"trainer.objective {wanted.name} centres each group on the others' mean: use advantage_scale none or group"
        )
    return wanted
