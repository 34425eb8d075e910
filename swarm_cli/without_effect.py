"""Settings that have no effect given the others: left over, or of another objective. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from services.trainer.objectives.base import Objective
from services.trainer.objectives.config import configured_objective
from shared.config.load import NodeConfig
from shared.config.sampler_section import SamplerSection
from shared.config.trainer_section import TrainerSection
from shared.registry import OBJECTIVES

_FOREIGN_WEIGHTS = ("foreign_weight_level", "foreign_weight_positive", "foreign_weight_negative")
_FOREIGN_GROUP_SETTINGS = (
    *_FOREIGN_WEIGHTS,
    "foreign_negative_divergence",
    "foreign_capability_window",
    "foreign_capability_bounds",
    "drop_foreign_negatives",
    "policy_check_fraction",
    "foreign_logprob_slack",
    "min_foreign_logprob",
    "external_weight",
    "max_foreign_advantage",
    "foreign_cost_factor",
    "foreign_share_factor",
    "foreign_norm_factor",
    "foreign_norm_proportion",
)
_EXTERNAL_DRAW_SETTINGS = (
    "strategy",
    "oversample",
    "adapt",
    "adapt_period",
    "adapt_informative",
    "shortage",
    "shortage_wait_s",
    "max_share_per_node",
    "newcomer_share",
)

Reasons = Iterator[tuple[str, tuple[str, ...]]]
"""A reason, and the section's keys that have no effect because of it."""


def settings_without_effect(config: NodeConfig) -> list[str]:
    """A sentence for each setting that differs from its default and changes nothing in training.

    If the objective cannot be used, nothing is said of settings that depend on it.

    Example: `trainer.m2_threshold = 0.05 has no effect: trainer.objective is dapo, not m2po`.
    """
    reasons: dict[str, str] = {}
    for section, found in (("sampler", _sampler_reasons(config.sampler)), ("trainer", _trainer_reasons(config))):
        for reason, keys in found:
            for key in keys:
                reasons.setdefault(f"{section}.{key}", reason)
    changed = {name: value for name in reasons if (value := _value(config, name)) != _value(_DEFAULTS, name)}
    return [f"{name} = {_written(value)} has no effect: {reasons[name]}" for name, value in changed.items()]


_DEFAULTS = NodeConfig.model_construct()


def _sampler_reasons(sampler: SamplerSection) -> Reasons:
    if not sampler.external:
        yield "sampler.external is 0", _EXTERNAL_DRAW_SETTINGS
    if not sampler.replay:
        yield "sampler.replay is 0", ("replay_batches",)
    if not sampler.strategy.startswith("likelihood_"):
        yield f"sampler.strategy is {sampler.strategy}, not likelihood_near", ("oversample",)
    if sampler.adapt == "off":
        yield "sampler.adapt is off", ("adapt_period", "adapt_informative")
    if sampler.shortage == "wait":
        yield "sampler.shortage is wait", ("shortage_wait_s",)


def _trainer_reasons(config: NodeConfig) -> Reasons:
    trainer = config.trainer
    if not config.sampler.external:
        yield "sampler.external is 0", tuple(key for key in _FOREIGN_GROUP_SETTINGS if _is_free(trainer, key))
    try:
        objective = configured_objective(config).objective
    except (ValueError, TypeError):  # `swarm_cli.config_checks.objective_problem` says why
        pass
    else:
        yield from _objective_reasons(trainer, objective)
        yield from _clipping_reasons(trainer, objective)
    yield from _foreign_text_reasons(trainer)
    if trainer.schedule == "constant":
        yield "trainer.schedule is constant", ("schedule_steps",)
    if not trainer.lora.rank:
        yield "trainer.lora.rank is 0", ("lora.alpha", "lora.dropout", "lora.target_modules", "lora.publish")
    elif trainer.lora.publish == "adapters":
        yield "trainer.lora.publish is adapters, which are published in float32", ("publish_dtype",)


def _objective_reasons(trainer: TrainerSection, objective: Objective) -> Reasons:
    """Each objective declares what it uses (`Objective`'s attributes), so that a new one needs no
    line here.
    """
    chosen = f"trainer.objective is {trainer.objective}"
    for name in OBJECTIVES.built_in:
        if trainer.objective != name:
            yield f"{chosen}, not {name}", OBJECTIVES.load(name).settings
    if not objective.clips:
        yield f"{chosen}, which does not clip", ("clip_low", "clip_high")
    if objective.uses_behaviour:
        why = f"{chosen}, which has no importance weights"
        yield why, ("importance_cap", "unknown_behaviour_logprob", *_FOREIGN_WEIGHTS)
    if not objective.divides_by_deviation:
        yield (
            f"{chosen}, which does not divide by a deviation",
            ("advantage_scale", "advantage_std_ddof", "advantage_std_floor"),
        )
    elif (trainer.advantage_scale or objective.scale) == "none":
        scale = "trainer.advantage_scale is none" if trainer.advantage_scale else f"{chosen}, which does not divide by a deviation"
        yield scale, ("advantage_std_ddof", "advantage_std_floor")
    if (trainer.aggregation or objective.aggregation) == "sequence_mean":
        yield "the loss is a mean over sequences, whatever their tokens", ("foreign_share_factor",)


def _clipping_reasons(trainer: TrainerSection, objective: Objective) -> Reasons:
    """With one update per batch the ratio is 1. It is exactly 1 only if no logprobs are computed
    beforehand to decide which text to drop.
    """
    drops_by_likelihood = trainer.sequence_mask is not None or trainer.foreign_negative_divergence is not None
    if trainer.updates_per_batch > 1 or drops_by_likelihood:
        return
    reason = "trainer.updates_per_batch is 1, so the clipped ratio is 1"
    if not objective.moves_at_once:
        yield reason, ("clip_low", "clip_high", "dual_clip")
    if trainer.cispo_min <= 1.0 <= trainer.cispo_max:
        yield reason, ("cispo_min", "cispo_max")


def _foreign_text_reasons(trainer: TrainerSection) -> Reasons:
    """The order matters: if several settings switch another one off, only the first reason is
    shown.
    """
    no_negatives = "trainer.drop_foreign_negatives is true"
    if trainer.drop_foreign_negatives:
        keys = ("foreign_weight_negative", "foreign_negative_divergence")
        yield no_negatives, tuple(key for key in keys if _is_free(trainer, key))
    if trainer.foreign_weight_positive == "one":
        positive = "trainer.foreign_weight_positive is one"
        if trainer.drop_foreign_negatives:
            yield f"{positive} and {no_negatives}", ("foreign_weight_level", "unknown_behaviour_logprob")
        if trainer.foreign_weight_negative == "one":
            yield f"{positive} and so is foreign_weight_negative", ("foreign_weight_level", "unknown_behaviour_logprob")
    if not trainer.foreign_capability_window:
        yield "trainer.foreign_capability_window is 0", ("foreign_capability_bounds",)
    if not trainer.policy_check_fraction:
        yield "trainer.policy_check_fraction is 0", ("foreign_logprob_slack", "min_foreign_logprob")
    if not trainer.foreign_norm_factor:
        yield "trainer.foreign_norm_factor is 0", ("foreign_norm_proportion",)


def _is_free(trainer: TrainerSection, key: str) -> bool:
    """Whether setting a key changes nothing. A divergence needs logprobs without the adapters'
    dropout, which differ from those of a single update."""
    dropout = trainer.lora.rank and trainer.lora.dropout and trainer.updates_per_batch == 1
    return key != "foreign_negative_divergence" or not dropout


def _value(config: NodeConfig, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _written(value: Any) -> str:
    return "none" if value is None else json.dumps(value).strip('"')
