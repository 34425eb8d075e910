"""Advantages of a batch of rollout groups, from rewards alone.

The divisor differs between published systems; this one (sample standard deviation plus 1e-4) is the
convention of TRL's GRPO trainer. Unlike in most systems, a group of one has advantage 0, not its
raw reward, and a group whose rewards are all equal has advantage exactly 0, not a rounding error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.trainer.objectives.base import AdvantageKind, AdvantageScale, GroupAdvantages, unusable
from services.trainer.objectives.config import configured_objective
from shared.config import NodeConfig
from shared.registry import finite_numbers
from shared.rewards import is_informative

ADVANTAGES = "function advantages"
"""How messages name what an installed objective gives as `kind`."""
_SHOWN_REWARDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig:
    """Rules by which rewards become advantages.

    kind: `group_normalised` (GRPO), `leave_one_out` (RLOO) or `soft_value` (OAPL), or a function of
    the rewards of a group, which are not all equal. The other fields except `value_beta` apply to
    the first. scale: divide by the standard deviation of the `group`, of the whole `batch`, or by
    nothing (`none`, Dr. GRPO). std_ddof: 1 for the sample standard deviation, 0 for the
    population's. std_eps: added to the standard deviation. value_beta: temperature of the soft
    value. objective: whose function `kind` is.
    """

    kind: AdvantageKind | GroupAdvantages = "group_normalised"
    scale: AdvantageScale = "group"
    std_ddof: int = 1
    std_eps: float = 1e-4
    value_beta: float = 1.0
    objective: str = ""

    @classmethod
    def of(cls, config: NodeConfig) -> AdvantageConfig:
        """The advantages that a node's configuration asks for."""
        trainer, configured = config.trainer, configured_objective(config)
        objective = configured.objective
        return cls(
            kind=objective.advantages,
            scale=configured.scale,
            std_ddof=trainer.constants.advantage_std_ddof,
            value_beta=float(configured.settings.objective_options.get("value_beta", 1.0)),
            objective=trainer.objective,
        )

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        if not callable(self.kind) and self.kind not in ("group_normalised", "leave_one_out", "soft_value"):
            raise ValueError(f"advantage kind {self.kind!r} is unknown: use group_normalised, leave_one_out or soft_value")
        if self.scale not in ("group", "batch", "none"):
            raise ValueError(f"advantage scale {self.scale!r} is unknown: use group, batch or none")
        if self.std_ddof not in (0, 1):
            raise ValueError(f"std_ddof is {self.std_ddof}: use 1 (sample) or 0 (population)")
        if not self.std_eps >= 0.0:
            raise ValueError(f"std_eps is {self.std_eps}: it must be 0 or more")
        if not self.value_beta > 0.0:
            raise ValueError(f"value_beta is {self.value_beta}: it must be more than 0")


def batch_advantages(group_rewards: Sequence[Sequence[float]], config: AdvantageConfig) -> list[list[float]]:
    """Advantages of every completion of every group; groups may differ in size.

    Raises ValueError if a reward is not finite, and ObjectiveError if a function returns anything
    but one finite number for each reward.

    Example: `batch_advantages([[1.0, 0.0], [1.0]], AdvantageConfig(scale="none"))` is `[[0.5,
    -0.5], [0.0]]`.
    """
    _check_finite(group_rewards)
    if callable(config.kind):
        return [
            _checked(config.kind(rewards), rewards, config.objective) if is_informative(rewards) else [0.0] * len(rewards)
            for rewards in group_rewards
        ]
    if config.kind == "leave_one_out":
        return [leave_one_out(rewards) for rewards in group_rewards]
    if config.kind == "soft_value":
        return [soft_value(rewards, config.value_beta) for rewards in group_rewards]
    assert config.kind == "group_normalised", "`AdvantageConfig` refuses other names"
    return group_normalised(group_rewards, scale=config.scale, std_ddof=config.std_ddof, std_eps=config.std_eps)


def group_normalised(
    group_rewards: Sequence[Sequence[float]],
    *,
    scale: AdvantageScale = "group",
    std_ddof: int = 1,
    std_eps: float = 1e-4,
) -> list[list[float]]:
    """`(r - mean of the group) / (std + std_eps)`, with the std that `scale` names (arXiv
    2402.03300, eq. 3).
    """
    batch_std = 0.0
    if scale == "batch":
        batch_std = _standard_deviation([reward for rewards in group_rewards for reward in rewards], std_ddof)
    advantages: list[list[float]] = []
    for rewards in group_rewards:
        if not is_informative(rewards):
            advantages.append([0.0] * len(rewards))
            continue
        mean = math.fsum(rewards) / len(rewards)
        divisor = 1.0
        if scale == "group":
            divisor = _standard_deviation(rewards, std_ddof) + std_eps
        elif scale == "batch":
            divisor = batch_std + std_eps
        advantages.append([(reward - mean) / divisor for reward in rewards])
    return advantages


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """`r_i - mean of the others' rewards`: an unbiased baseline (RLOO, arXiv 2402.14740)."""
    if not is_informative(rewards):
        return [0.0] * len(rewards)
    total = math.fsum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


def soft_value(rewards: Sequence[float], beta: float) -> list[float]:
    """`r_i - beta ln( mean of exp(r_j / beta) )`: the difference from the group's soft value (arXiv
    2602.19362).

    Exactly 0 if all rewards are equal, as for the other kinds.
    """
    if not is_informative(rewards):
        return [0.0] * len(rewards)
    largest = max(rewards)
    mean = math.fsum(math.exp((reward - largest) / beta) for reward in rewards) / len(rewards)
    return [reward - largest - beta * math.log(mean) for reward in rewards]


def _checked(found: Any, rewards: Sequence[float], objective: str) -> list[float]:
    """The advantages from an installed objective's function, refused if they would make the
    gradient invalid.
    """
    try:
        return finite_numbers(found, len(rewards))
    except ValueError as error:
        shown = f"{list(rewards[:_SHOWN_REWARDS])}{'...' if len(rewards) > _SHOWN_REWARDS else ''}"
        raise unusable(objective, f"returned, for the rewards {shown}, {error}", ADVANTAGES) from None


def _standard_deviation(values: Sequence[float], ddof: int) -> float:
    if len(values) <= ddof:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - ddof))


def _check_finite(group_rewards: Sequence[Sequence[float]]) -> None:
    for index, rewards in enumerate(group_rewards):
        if not all(math.isfinite(reward) for reward in rewards):
            raise ValueError(
                f"group {index} has a reward that is not finite ({list(rewards)}): "
                "the verifier must refuse such rewards before they reach the trainer"
            )
