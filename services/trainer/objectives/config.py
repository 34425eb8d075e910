"""Builds the configured objective with its settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast, get_args

from services.trainer.objectives.base import AdvantageKind, AdvantageScale, Aggregation, Objective
from shared.config import NodeConfig
from shared.config.trainer_section import COMMON_OPTIONS, ObjectiveSection, TrainerSection
from shared.registry import OBJECTIVES
from shared.text import visible

_COMMON_VALUES: dict[str, tuple[Any, ...]] = {
    "aggregation": get_args(Aggregation),
    "advantage_scale": get_args(AdvantageScale),
    "count_uninformative": (True, False),
}


@dataclass(frozen=True, slots=True)
class ConfiguredObjective:
    """An objective with its settings.

    settings: the part of `[trainer]` that an objective reads; each objective's file describes its
    settings. Clip bounds that it does not say become those of the objective.
    max_completion_tokens: `generator.max_new_tokens`, the constant length that `fixed_length`
    divides by; it must not change between steps.
    """

    settings: ObjectiveSection = field(default_factory=ObjectiveSection)
    max_completion_tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuse settings that do not apply to the objective, and one that declares what does not
        exist.
        """
        given = self.settings
        clip = {
            name: published
            for name, published in zip(("clip_low", "clip_high"), self.objective.clip, strict=True)
            if getattr(given, name) is None
        }
        if faults := list(_faults(self.objective)):
            raise ValueError(
                f"{OBJECTIVES.described(self.name)} has {' and '.join(faults)}: correct that, or change {OBJECTIVES.setting}"
            )
        options = {"objective_options": {**self.objective.options, **given.objective_options}}
        object.__setattr__(self, "settings", given.model_copy(update=clip | options))
        if problems := list(self._problems(given.objective_options)):
            raise ValueError("\n".join(problems))

    def _problems(self, options: Mapping[str, Any]) -> Iterator[str]:
        """Settings that do not apply to the objective. options: those that were given."""
        known = self.objective.options
        yield from self._common_problems(options)
        if self.aggregated_by == "fixed_length" and (self.max_completion_tokens or 0) < 1:
            yield f"{self.name} divides by a constant length: set max_completion_tokens to 1 or more"
        for option, value in options.items() if known or self.name in OBJECTIVES.built_in else ():
            if option in COMMON_OPTIONS:
                continue
            if option not in known:
                names = f"it has {', '.join((*known, *COMMON_OPTIONS))}"
                yield f"trainer.objective_options.{visible(option, 80)} is no constant of {self.name}: {names}"
            elif not _is_number(value, known[option]):
                yield f"trainer.objective_options.{option} is {value!r}: it must be a number above 0"
        low, high = (self.settings.objective_options.get(name) for name in ("min", "max"))
        if known and isinstance(low, int | float) and isinstance(high, int | float) and low >= high:
            yield f"trainer.objective_options.min is {low} and max {high}: min must be below max"

    def _common_problems(self, options: Mapping[str, Any]) -> Iterator[str]:
        for name, values in _COMMON_VALUES.items():
            if name in options and options[name] not in values:
                listed = ", ".join(str(value).lower() for value in values)
                yield f"trainer.objective_options.{name} is {visible(repr(options[name]), 80)}: it must be one of {listed}"
        dual_clip, option = options.get("dual_clip", 0), "trainer.objective_options.dual_clip"
        if not _is_number(dual_clip):
            yield f"{option} is {visible(repr(dual_clip), 80)}: it must be a number of at least 0"
        elif dual_clip and not self.objective.clips:
            yield f"{option} is for objectives that clip, and {self.name} does not: set it to 0 or choose another objective"
        elif dual_clip and dual_clip <= (most := 1 + (self.settings.clip_high or 0.0)):
            yield f"{option} {dual_clip} must be above 1 + clip_high = {most}; 0 turns it off"

    @property
    def name(self) -> str:
        """The objective's name in the configuration."""
        return self.settings.objective

    @property
    def objective(self) -> Objective:
        """The objective itself.

        Raises:
            ValueError: see `shared.registry.Registry.load`.
            TypeError: what an installed package registered under this name is not an `Objective`.
        """
        found: Any = OBJECTIVES.load(self.name)
        if not isinstance(found, Objective):
            raise TypeError(
                f"{OBJECTIVES.described(self.name)} is a {type(found).__name__}: its entry point must name an Objective"
            )
        return found

    @property
    def aggregated_by(self) -> Aggregation:
        chosen: Any = self.settings.objective_options.get("aggregation", self.objective.aggregation)
        return cast(Aggregation, chosen)

    @property
    def scale(self) -> AdvantageScale:
        """The advantages' divisor in force."""
        return cast(AdvantageScale, self.settings.objective_options.get("advantage_scale", self.objective.scale))

    @property
    def counts_uninformative(self) -> bool:
        """Say whether groups whose rewards are all equal count in the mean of the loss."""
        return bool(self.settings.objective_options.get("count_uninformative", self.objective.counts_uninformative))

    @property
    def needs_reference(self) -> bool:
        return self.settings.kl_coefficient > 0.0


def configured_objective(config: NodeConfig) -> ConfiguredObjective:
    """The objective of a node's configuration.

    Raises:
        ValueError: it cannot be loaded, or conflicts with other settings; the message names them as
            the configuration does, one line per conflict.
    """
    trainer = config.trainer
    # Its __post_init__ checks too, but what may not be combined with it is told together.
    problems = list(_conflicts(trainer))
    try:
        wanted = ConfiguredObjective(trainer, config.generator.max_new_tokens)
    except ValueError as error:
        raise ValueError("\n".join([*problems, str(error)])) from None
    if problems:
        raise ValueError("\n".join(problems))
    return wanted


def departures(trainer: TrainerSection, objective: Objective) -> list[str]:
    """A sentence for each setting that makes the loss another than the one that the objective's
    source publishes under its name. Settings without an effect are left out.
    """
    published: dict[str, Any] = {
        "objective_options.aggregation": objective.aggregation,
        "objective_options.count_uninformative": objective.counts_uninformative,
    }
    given = dict(trainer) | {f"objective_options.{name}": value for name, value in trainer.objective_options.items()}
    if objective.divides_by_deviation:
        published["objective_options.advantage_scale"] = objective.scale
    if objective.clips and (trainer.updates_per_batch > 1 or objective.moves_at_once):
        published["clip_low"], published["clip_high"] = objective.clip
    return [
        f"trainer.{name} = {_written(value)}: {trainer.objective} as published has {_written(wanted)}"
        for name, wanted in published.items()
        if (value := given.get(name)) is not None and value != wanted
    ]


def _written(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def _faults(objective: Objective) -> Iterator[str]:
    """Find what an objective of a package declares wrongly. Its types forbid it, but nothing
    has checked them.
    """
    if objective.aggregation not in get_args(Aggregation):
        yield f"the unknown aggregation {objective.aggregation!r} (there are {', '.join(get_args(Aggregation))})"
    if not callable(objective.advantages) and objective.advantages not in get_args(AdvantageKind):
        known = f"there are {', '.join(get_args(AdvantageKind))}, or a function of a group's rewards"
        yield f"the unknown advantages {objective.advantages!r} ({known})"
    if objective.scale not in get_args(AdvantageScale):
        yield f"the unknown scale {objective.scale!r} (there are {', '.join(get_args(AdvantageScale))})"
    for name in ("clips", "moves_at_once", "uses_behaviour", "uses_group_likelihood", "counts_uninformative"):
        if not isinstance(declared := getattr(objective, name), bool):
            yield f"the unknown {name} {declared!r} (there are True and False)"
    if objective.keeps is not None and not callable(objective.keeps):
        yield f"the unknown keeps {objective.keeps!r} (there are functions and None)"
    options: Any = objective.options
    if not isinstance(options, Mapping) or not all(isinstance(name, str) and _is_number(value) for name, value in options.items()):
        yield f"the unknown options {options!r} (there are mappings of names to numbers)"


def _is_number(value: Any, least: float = 0.0) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and (value > 0 or value == 0 == least)


def _conflicts(trainer: TrainerSection) -> Iterator[str]:
    name = trainer.objective
    objective: Any = OBJECTIVES.load(name)
    if getattr(objective, "advantages", "") == "leave_one_out" and trainer.objective_options.get("advantage_scale") == "batch":
        yield f"trainer.objective {name} centres each reward on the mean of the others: use advantage_scale none or group"
