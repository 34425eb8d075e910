"""Which objective, with which constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ObjectiveName = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce", "rloo", "m2po", "gepo", "vespo", "oapl"]
Aggregation = Literal["sequence_mean", "token_mean", "fixed_length"]

_AGGREGATION: dict[str, Aggregation] = {
    "grpo": "sequence_mean",
    "gspo": "sequence_mean",
    "dr_grpo": "fixed_length",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "reinforce": "token_mean",
    "rloo": "token_mean",
    "m2po": "token_mean",
    "gepo": "sequence_mean",
    "vespo": "token_mean",
    "oapl": "sequence_mean",
}
_CLIPPED = ("grpo", "dr_grpo", "dapo", "gspo", "m2po", "gepo")
_WITH_BEHAVIOUR = ("gepo", "vespo", "oapl")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig:
    """Constants of an objective. With r the ratio of the policy to the proximal policy and A the advantage:

    | name | loss of a token | aggregated by default over |
    |---|---|---|
    | grpo (arXiv 2402.03300) | `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` | mean of sequence means |
    | dr_grpo (2503.20783) | the same | sum / (sequences x max_completion_tokens) |
    | dapo (2503.14476) | the same | mean over all tokens of the batch |
    | gspo (2507.18071) | the same, r the geometric mean over the sequence | mean of sequence means |
    | cispo (2506.13585) | `-sg[clamp(r, is_min, is_max)] A lp` | mean over all tokens of the batch |
    | reinforce, rloo | `-A lp` (rloo: with leave-one-out advantages) | mean over all tokens of the batch |
    | m2po (2510.01161) | dapo's, of the tokens whose mean (log b - log prox)^2 is below m2_threshold | the same |
    | gepo (2508.17850) | gspo's, r = exp(mean lp) / (sum q^2 / sum q) over the group, q = exp(mean log b) | sequence means |
    | vespo (2602.10693) | `-sg[e^l w^k e^(-l w)] A lp`, w = exp(sum (lp - log b)) | mean over all tokens of the batch |
    | oapl (2602.19362) | `(oapl_scale sum (lp - log b) - A)^2` of the sequence, A above the soft value | mean over sequences |

    b is the policy that sampled. gepo, vespo and oapl compare with it themselves, so that no importance weights act; m2po's
    threshold acts before, over the whole step (`services.trainer.gradient.behaviour`).
    clip_low, clip_high: for gspo the ratio hardly moves, its authors use 3e-4 and 4e-4.
    dual_clip: at most this multiple of |A| is lost where A < 0 (arXiv 1912.09729); more than 1 + clip_high; None: off.
    is_min, is_max: cispo's bounds of the ratio itself, not distances from 1 (peers differ in this).
    kl_coefficient: weight of the k3 divergence to the reference policy; 0: no reference is needed.
    max_completion_tokens: dr_grpo's constant length; must not change between steps.
    log_ratio_bound: log ratios are clamped to +- this before exp.
    m2_threshold: m2po's tau. vespo_positive, vespo_negative: (k, l) by the advantage's sign. oapl_scale: its second beta.
    aggregation: overrides the default named above.
    """

    name: ObjectiveName = "grpo"
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

    def __post_init__(self) -> None:
        """Refuse combinations that have no meaning."""
        if self.name not in _AGGREGATION:
            raise ValueError(f"objective {self.name!r} is unknown: use one of {', '.join(_AGGREGATION)}")
        if self.aggregation not in (None, "sequence_mean", "token_mean", "fixed_length"):
            raise ValueError(f"aggregation {self.aggregation!r} is unknown: use sequence_mean, token_mean or fixed_length")
        if not 0.0 <= self.clip_low <= 1.0:
            raise ValueError(f"clip_low is {self.clip_low}: 1 - clip_low bounds a ratio, so use a value from 0 to 1")
        if not self.clip_high >= 0.0:
            raise ValueError(f"clip_high is {self.clip_high}: it must be 0 or more")
        if self.dual_clip is not None and self.name not in _CLIPPED:
            raise ValueError(f"dual_clip acts on clipped objectives only ({', '.join(_CLIPPED)}), not on {self.name}")
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
    def aggregated_by(self) -> Aggregation:
        """The aggregation in force."""
        return self.aggregation or _AGGREGATION[self.name]

    @property
    def is_clipped(self) -> bool:
        """Whether the objective is one of the clipped surrogates."""
        return self.name in _CLIPPED

    @property
    def uses_behaviour(self) -> bool:
        """Whether the objective itself compares with the policy that sampled, instead of importance weights."""
        return self.name in _WITH_BEHAVIOUR

    @property
    def needs_reference(self) -> bool:
        """Whether logprobs of a reference policy are needed."""
        return self.kl_coefficient > 0.0
