"""Reads an experiment's spec, one TOML file, into types. A node's settings are `NodeConfig`'s own
sections, so nothing is defined twice.

An arm is a set of values merged over the base; a `[[nodes]]` table is a set of values merged over
the arm for `count` nodes.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from shared.config import TaskSpec
from shared.config.load import MAX_FILE_BYTES
from shared.config.section import setting_name
from shared.plain_files import read_named
from shared.tasks.file_source import with_row_name
from shared.text import error_text

NODE_SECTIONS = ("model", "generator", "eval", "verifier", "sampler", "trainer")
"""Sections of a node's configuration that a spec may set: for all nodes, for one arm or for some
nodes.
"""

_SPEC_KEYS = frozenset({"name", "question", "seeds", "round_s", "baseline", "settings", "confirm", "compare", "held_out"})
"""Keys that describe the whole experiment; all others belong to the arms."""

_KEYS = "experiments/README.md lists a spec's own keys, `swarm config show` a node's sections"

Role = Literal["honest", "informed", "opposed", "shortcut", "starve"]
Overrides = dict[str, Any]
Sources = list[Annotated[TaskSpec, AfterValidator(with_row_name)]]
"""Sources that are files are read with the spec, so that they have names as datasets do."""


class SpecError(ValueError):
    """A spec cannot be used; the message names the first arm with a mistake, its fields, and what
    is wrong with them.
    """

    @classmethod
    def of(cls, error: ValidationError, arm: str = "", keys: str = _KEYS) -> SpecError:
        """The error of an arm or of the spec. `keys` says where known keys are listed."""
        lines = []
        for problem in error.errors():
            message = problem["msg"].removeprefix("Value error, ")
            if problem["type"] == "extra_forbidden":
                message = f"unknown key; remove it or correct its spelling ({keys})"
            elif problem["type"] == "missing":
                message = "is missing"
            elif problem["loc"] and problem["type"] != "value_error":
                message += f", got {problem['input']!r}"
            lines.append(": ".join(filter(None, [arm and f"arm {arm}", setting_name(problem["loc"]), message])))
        return cls("\n".join(lines))


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Attack(_Table):
    """How hostile nodes attack; each role uses the settings that apply to it."""

    right_share: float = Field(0.5, gt=0, lt=1, description="Share of a group's answers that a verifier calls right.")
    filler_words: int = Field(12, ge=1, description="informed, opposed: most words of nonsense before a right answer.")
    max_length: float = Field(2.0, gt=0, description="Longest answer, as a multiple of generator.max_new_tokens.")
    names: int = Field(1, ge=1, le=64, description="Names and keys of one node, each as busy as an honest node.")
    start_round: int = Field(0, ge=0, description="Honest before this round.")
    target: str = Field("", description="shortcut, starve: the dataset of all its groups; empty: the datasets that it draws.")
    rate: int = Field(1, ge=1, le=64, description="starve: groups sent for each one that an honest node sends.")
    margin: float = Field(0.05, description="Nats per token that an attack stays above the policy check's bound.")


class NodeGroup(_Table):
    """Some of the swarm's nodes: how many, their role, and where they differ from the arm."""

    count: int = Field(1, ge=1, le=1024)
    role: Role = "honest"
    tasks: Sources | None = Field(None, description="Sources instead of the arm's: a specialist.")
    overrides: Overrides = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, values: Any) -> Any:
        return _with_overrides(values)


class Arm(_Table):
    """One arm: the complete settings of a swarm, with everything merged."""

    nodes: list[NodeGroup]
    rounds: int = Field(ge=1, le=1_000_000)
    tasks: Sources = Field(min_length=1)
    attack: Attack = Attack()
    baseline: str = Field("", description="The arm that this one is compared with; empty: the spec's.")
    delay_rounds: tuple[int, int] = Field(
        (0, 0), description="Rounds until other nodes see a shared group: minimum and maximum, drawn for each group."
    )
    overrides: Overrides = Field(default_factory=dict)

    @field_validator("delay_rounds")
    @classmethod
    def _forward(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not 0 <= value[0] <= value[1]:
            raise ValueError("give the minimum and maximum rounds of delay, such as [1, 20]")
        return value

    @field_validator("nodes", mode="before")
    @classmethod
    def _count(cls, value: Any) -> Any:
        return [{"count": value}] if isinstance(value, int) else value

    @model_validator(mode="after")
    def _target(self) -> Arm:
        asked = [task.dataset for each in [self.tasks, *(node.tasks or [] for node in self.nodes)] for task in each]
        if self.attack.target and self.attack.target not in asked:
            raise ValueError(f"attack.target {self.attack.target!r} is not a dataset of the arm: {', '.join(dict.fromkeys(asked))}")
        return self

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, values: Any) -> Any:
        return _with_overrides(values)


class Spec(_Table):
    """An experiment. `arms` are complete; `source` is the file's own content, which the manifest
    keeps.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    question: str = Field("", description="The question that it answers; shown at the top of the report.")
    seeds: list[int] = Field(min_length=1, description="One run of each arm is made for each.")
    round_s: float = Field(60.0, gt=0, description="Simulated seconds per round, by which foreign groups age.")
    baseline: str = Field("", description="The arm that the others are compared with; empty: the first.")
    settings: Literal["bare", "shipped"] = Field(
        "bare",
        description="What applies if an arm does not set a value. shipped: a node's defaults, all defences included; "
        "bare: no newer defence, and fixed I and J.",
    )
    confirm: list[str] = Field(
        default_factory=list,
        description="Comparisons stated before any run, ARM (with its baseline) or ARM/OTHER: reports correct these for "
        "their number, and call all others exploratory.",
    )
    compare: Literal["whole runs", "equal completions"] = Field(
        "whole runs",
        description="equal completions: two arms are compared up to the total of the arm that generated less, seed by seed.",
    )
    held_out: Literal["one", "per seed"] = Field(
        "one", description="per seed: each seed is evaluated on its own questions, so that the interval over seeds covers both."
    )
    arms: dict[str, Arm]
    source: dict[str, Any]

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, value: list[int]) -> list[int]:
        if problem := seeds_problem(value):
            raise ValueError(problem)
        return value

    @property
    def base_arm(self) -> str:
        """Name of the arm that the others are compared with."""
        return self.baseline or next(iter(self.arms))

    def digest(self, arm: str) -> str:
        """Sixteen hex digits: a digest of everything in the file that an arm's runs depend on."""
        arm_source = merged(_common(self.source), self.source.get("arms", {}).get(arm, {})) | {
            "baseline": "",
            "round_s": self.round_s,
        }
        if self.settings != "bare":
            arm_source |= {"settings": self.settings}
        if self.held_out != "one":
            arm_source |= {"held_out": self.held_out}
        return hashlib.sha256(json.dumps(arm_source, sort_keys=True).encode()).hexdigest()[:16]


def load_spec(path: Path) -> Spec:
    """Read and check a spec.

    Raises:
        SpecError: it cannot be read, or a field is wrong.
    """
    try:
        source = tomllib.loads(read_named(path, MAX_FILE_BYTES).decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SpecError(f"spec {path} cannot be read ({error_text(error)}): correct the path or the file") from None
    try:
        return parse_spec(source)
    except SpecError as error:
        raise SpecError(f"spec {path} cannot be used:\n{error}") from None


def parse_spec(source: Mapping[str, Any]) -> Spec:
    """Check a spec's content.

    Raises:
        SpecError: a field is wrong.
    """
    base = _common(source)
    arms = source.get("arms") or {"base": {}}
    if not isinstance(arms, Mapping) or not all(isinstance(arm, Mapping) for arm in arms.values()):
        raise SpecError("arms: give each arm a table, [arms.NAME]")
    complete: dict[str, Arm] = {}
    for name, values in arms.items():
        try:
            complete[name] = Arm(**merged(base, values))
        except ValidationError as error:
            raise SpecError.of(error, name) from None
    head = {key: source[key] for key in _SPEC_KEYS if key in source}
    try:
        spec = Spec(**head, arms=complete, source=dict(source))
    except ValidationError as error:
        raise SpecError.of(error) from None
    named = [("baseline", spec.baseline), *(("confirm", arm) for pair in spec.confirm for arm in pair.split("/", 1))]
    for field, arm in [*named, *((f"arms.{name}.baseline", arm.baseline) for name, arm in spec.arms.items())]:
        if arm and arm not in spec.arms:
            raise SpecError(f"{field}: no arm is called {arm!r}; there are {', '.join(spec.arms)}")
    return spec


def seeds_problem(seeds: Sequence[int]) -> str | None:
    """What is wrong with a list of seeds; None if nothing is."""
    for seed, count in Counter(seeds).items():
        if seed < 0:
            return f"{seed} is below 0"
        if count > 1:
            return f"{seed} is listed {'twice' if count == 2 else f'{count} times'}"
    return None


def _common(source: Mapping[str, Any]) -> dict[str, Any]:
    """A spec's values for all arms."""
    return {key: value for key, value in source.items() if key not in _SPEC_KEYS | {"arms"}}


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`, table by table; lists and plain values are replaced."""
    result = dict(base)
    for key, value in over.items():
        before = result.get(key)
        result[key] = merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return result


def _with_overrides(values: Any) -> Any:
    """Move the node's sections into `overrides`; everything else stays at the level that refuses
    unknown names.
    """
    if not isinstance(values, Mapping):
        return values
    sections = {key: values[key] for key in NODE_SECTIONS if key in values}
    rest = {key: value for key, value in values.items() if key not in NODE_SECTIONS}
    return {**rest, "overrides": merged(rest.get("overrides", {}), sections)}
