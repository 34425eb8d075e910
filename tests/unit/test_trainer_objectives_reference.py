"""The tensor objectives against loops in float64 NumPy, over random ragged batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from services.trainer.gradient.importance import ImportanceConfig, importance_weights
from services.trainer.objectives.config import ConfiguredObjective
from services.trainer.objectives.token_loss import Normaliser, token_loss
from tests.objectives import configured, step_loss

CONFIGS = [
    configured("grpo"),
    configured("grpo", dual_clip=1.5, kl_coefficient=0.1),
    configured("dr_grpo", max_completion_tokens=17),
    configured("dapo", kl_coefficient=0.02),
    configured("gspo", clip_low=0.02, clip_high=0.03),
    configured("cispo", objective_options={"min": 0.7, "max": 1.4}),
    configured("reinforce"),
    configured("reinforce", aggregation="sequence_mean"),
]
IMPORTANCE = ImportanceConfig(cap=1.5, sequence_bounds=(0.6, 1.6))


def numpy_loss(config: ConfiguredObjective, batch: list[dict[str, np.ndarray]]) -> float:
    """One sequence after the other, one token after the other, straight from the formulas."""
    kept = [kept_tokens_of(sequence) for sequence in batch]
    tokens, sequences = sum(map(len, kept)), sum(map(bool, kept))
    loss = 0.0
    for sequence, kept_tokens in zip(batch, kept, strict=True):
        policy, proximal, reference = sequence["policy"], sequence["proximal"], sequence["reference"]
        behaviour, advantage = sequence["behaviour"], float(sequence["advantage"])
        sequence_ratio = math.exp(sum(policy - proximal) / len(policy))
        for t in kept_tokens:
            ratio = sequence_ratio if config.name == "gspo" else math.exp(policy[t] - proximal[t])
            if config.name == "cispo":
                value = (
                    -min(max(ratio, config.settings.objective_options["min"]), config.settings.objective_options["max"])
                    * advantage
                    * policy[t]
                )
            elif config.name == "reinforce":
                value = -advantage * policy[t]
            else:
                bounded = min(max(ratio, 1 - config.settings.clip_low), 1 + config.settings.clip_high)
                gain = min(ratio * advantage, bounded * advantage)
                dual_clip = float(config.settings.objective_options.get("dual_clip", 0.0))
                if dual_clip and advantage < 0:
                    gain = max(gain, dual_clip * advantage)
                value = -gain
            value *= min(1.0 if behaviour is None else math.exp(proximal[t] - behaviour[t]), IMPORTANCE.cap)
            difference = reference[t] - policy[t]
            value += config.settings.kl_coefficient * (math.exp(difference) - difference - 1)
            if config.aggregated_by == "sequence_mean":
                loss += value / len(kept_tokens) / sequences
            elif config.aggregated_by == "fixed_length":
                loss += value / (sequences * config.max_completion_tokens)
            elif config.aggregated_by == "sequence_sum":
                loss += value / sequences
            else:
                loss += value / tokens
    return loss


def kept_tokens_of(sequence: dict[str, np.ndarray]) -> list[int]:
    """Tokens that nothing drops: a finite likelihood, in a sequence within the mask's bounds."""
    length = len(sequence["policy"])
    if sequence["behaviour"] is None:
        return list(range(length))
    log_weights = sequence["proximal"] - sequence["behaviour"]
    finite = [t for t in range(length) if math.isfinite(log_weights[t])]
    mean = sum(log_weights[t] for t in finite) / max(len(finite), 1)
    low, high = IMPORTANCE.sequence_bounds
    return finite if low <= math.exp(mean) <= high else []


def random_batch(seed: int) -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(seed)
    batch = []
    for index in range(12):
        length = int(generator.integers(1, 14))
        policy = -generator.exponential(1.0, length)
        behaviour = policy + generator.normal(0.1 * (index % 5), 0.4, length)
        if index % 4 == 1:
            behaviour[0] = -np.inf
        batch.append(
            {
                "policy": policy,
                "proximal": policy + generator.normal(0, 0.3, length),
                "reference": policy + generator.normal(0, 0.3, length),
                "behaviour": None if index % 3 == 2 else behaviour,
                "advantage": generator.normal(),
            }
        )
    return batch


def tensor_loss(config: ConfiguredObjective, batch: list[dict[str, np.ndarray]], dtype: torch.dtype) -> float:
    longest = max(len(sequence["policy"]) for sequence in batch)

    def padded(name: str) -> torch.Tensor:
        rows = torch.full((len(batch), longest), math.nan, dtype=dtype)
        for row, sequence in enumerate(batch):
            if sequence[name] is not None:
                rows[row, : len(sequence[name])] = torch.tensor(sequence[name], dtype=dtype)
        return rows

    lengths = [len(sequence["policy"]) for sequence in batch]
    mask = torch.arange(longest) < torch.tensor(lengths).unsqueeze(1)
    correction = importance_weights(
        IMPORTANCE,
        proximal_logprobs=padded("proximal"),
        behaviour_logprobs=padded("behaviour"),
        has_behaviour=torch.tensor([sequence["behaviour"] is not None for sequence in batch]),
        mask=mask,
    )
    outcome = token_loss(
        config,
        logprobs=padded("policy"),
        proximal_logprobs=padded("proximal"),
        advantages=torch.tensor([sequence["advantage"] for sequence in batch], dtype=dtype),
        mask=mask,
        importance_weights=correction.weights,
        keep=correction.keep,
        reference_logprobs=padded("reference"),
    )
    assert 0 < int((mask & ~correction.keep).sum()) < int(mask.sum()) / 2, "the batch must try rejection"
    counts = Normaliser.count(correction.keep.sum(dim=1).tolist())
    return float(step_loss(config, outcome, correction.keep, counts))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.name}-{config.aggregated_by}")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_objectives_equal_a_numpy_reference_on_ragged_batches(
    config: ConfiguredObjective, dtype: torch.dtype, tolerance: float
) -> None:
    for seed in range(5):
        batch = random_batch(seed)
        assert tensor_loss(config, batch, dtype) == pytest.approx(numpy_loss(config, batch), abs=tolerance)
