"""Load a configuration, or a role's part of it: TOML file, then environment
(`SWARM_TRAINER__LEARNING_RATE=1e-5`), then explicit overrides; and say what is wrong with it, one
line per fault. A role reads and checks the sections that it uses; of the others it checks the
names.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator
from pydantic_core import ErrorDetails

from shared.config.section import setting_name
from shared.plain_files import read_named
from shared.roles import Role
from shared.suggestions import asked_for, closest, did_you_mean
from shared.text import error_text, visible

ENV_PREFIX = "SWARM_"
CONFIG_FILE_VARIABLE = "SWARM_CONFIG"
MAX_FILE_BYTES = 4 * 2**20
"""Of a file with settings or task sources: tens of thousands of entries."""
_LONGEST_VALUE = 200
"""Characters shown of a wrong value."""

SECTIONS = (
    *("node", "nats", "model", "tasks", "generator", "eval", "verifier", "sampler", "trainer"),
    *("policy_store", "tracking", "http", "log"),
)
"""All sections of a configuration, in the order in which people read them."""

Location = tuple[int | str, ...]
Entry = tuple[Role, str, str]
"""An entry that a configuration names: the role that uses it first, its registry (by `kind`) and
its name.
"""


class ConfigError(ValueError):
    """The configuration is invalid. The message names each field, its problem and where the value
    came from. `faults`: its lines, one for each problem; empty if the file could not be read.
    `places`: where the values at fault are; None if the file could not be read.
    """

    def __init__(self, message: str, faults: Sequence[str] = (), places: frozenset[Location] | None = None) -> None:
        super().__init__(message)
        self.faults = faults
        self.places = places


class Config(BaseModel):
    """Base of a node's configuration and of its roles' parts."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @model_validator(mode="after")
    def _combinations(self, info: ValidationInfo) -> Config:
        apart = info.context == _APART
        if not apart and (problems := list(self.problems())):
            raise ValueError("\n".join(problems))
        return self

    def problems(self) -> Iterator[str]:
        """Problems that involve several sections. Only what could never run is refused."""
        yield from ()

    def entries(self) -> Iterator[Entry]:
        """The entries that it names. A word that leaves the choice to the service, such as `auto`,
        is not among them.
        """
        yield from ()

    @classmethod
    def placed(cls, values: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The values of a file in `folder`, with whole paths where they depend on it."""
        return values


C = TypeVar("C", bound=Config)


_APART = "apart"
"""Context of a validation in which sections need not fit together."""


class Sources(NamedTuple):
    """The values of a file, and the variables that can be read."""

    file: dict[str, Any]
    variables: Mapping[str, str]


def load(
    kind: type[C],
    path: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> C:
    """Load and check a configuration.

    Args:
        kind: What is read of it.
        path: TOML file; None uses the file that `SWARM_CONFIG` names, if any.
        overrides: Nested values that override everything, e.g. `{"node": {"id": "beta"}}`.
        environment: Variables; None uses this process's.

    Raises:
        ConfigError: with one line per problem: field or environment variable, what is wrong, what
            was given.
    """
    chosen = _chosen_file(path, environment)
    try:
        sources, faults = read_sources(kind, path, environment)
    except ConfigError as error:
        sources, faults = _variables(kind, environment)
        _, further, _ = built(kind, sources, {})
        of_variables = [line for line in further if line.startswith("environment variable")]
        raise ConfigError("\n".join([str(error), *faults, *of_variables])) from None
    config, further, places = built(kind, sources, overrides or {})
    faults += further
    if config is None or faults:
        raise ConfigError(_together(faults, chosen), faults, frozenset(places))
    return config


def read_sources(kind: type[Config], path: Path | None, environment: Mapping[str, str] | None) -> tuple[Sources, list[str]]:
    """The file's values and the variables that can be read, and a line for each other variable.
    Raises ConfigError if the file cannot be read.
    """
    sources, faults = _variables(kind, environment)
    chosen = _chosen_file(path, environment)
    return (sources if chosen is None else sources._replace(file=kind.placed(_read_toml(chosen), chosen.parent))), faults


def _chosen_file(path: Path | None, environment: Mapping[str, str] | None) -> Path | None:
    named = (os.environ if environment is None else environment).get(CONFIG_FILE_VARIABLE)
    return path or (Path(named) if named else None)


def _variables(kind: type[Config], environment: Mapping[str, str] | None) -> tuple[Sources, list[str]]:
    given = os.environ if environment is None else environment
    misread = _variable_problems(kind, given)
    return Sources({}, {name: value for name, value in given.items() if name not in misread}), list(misread.values())


def built(
    kind: type[C], sources: Sources, overrides: Mapping[str, Any], *, apart: bool = False
) -> tuple[C | None, list[str], set[Location]]:
    """The configuration, or a line for each fault and the places of the faults. apart: sections
    need not fit together.
    """
    values = _merged(_merged(sources.file, _values_of(kind, sources.variables)), overrides)
    own = {name: value for name, value in values.items() if name in kind.model_fields or name not in SECTIONS}
    try:
        return kind.model_validate(own, context=_APART if apart else None), [], set()
    except ValidationError as error:
        return None, _faults_of(kind, error, sources.variables), {_without_kind(problem)[0] for problem in error.errors()}


def _merged(values: Any, stronger: Any) -> Any:
    """Nested values, of which the stronger ones win."""
    if not (isinstance(values, Mapping) and isinstance(stronger, Mapping)):
        return stronger
    return {**values, **{name: _merged(values.get(name), value) for name, value in stronger.items()}}


def _values_of(config: type[Config], variables: Mapping[str, str]) -> Any:
    """The nested values that the variables give. The one that names more of the path wins."""
    values: Any = {}
    for name in sorted(setting_variables(variables), key=lambda name: name.count("__")):
        path = _path_of(name)
        kinds = _kinds(config, path)
        structured = any(map(_is_structured, kinds)) and variables[name] not in _words(kinds)
        value = json.loads(variables[name]) if structured else variables[name]
        for part in reversed(path):
            value = {part: value}
        values = _merged(values, value)
    return values


def _path_of(variable: str) -> list[str]:
    return variable[len(ENV_PREFIX) :].lower().split("__")


def setting_variables(variables: Iterable[str]) -> list[str]:
    """The names of the `SWARM_` variables that are settings, sorted."""
    return sorted(name for name in variables if name.startswith(ENV_PREFIX) and name != CONFIG_FILE_VARIABLE)


def _together(lines: list[str], file: Path | None) -> str:
    from_environment = all(line.startswith("environment variable") for line in lines)
    if len(lines) == 1 and from_environment:
        return lines[0]
    source = "the environment" if from_environment or file is None else str(file)
    return f"configuration from {source} cannot be used:\n" + "\n".join(f"  {line}" for line in lines)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_named(path, MAX_FILE_BYTES).decode("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(
            f"configuration file {path} does not exist: give another with --config or {CONFIG_FILE_VARIABLE}"
        ) from None
    except RecursionError:
        raise ConfigError(f"configuration file {path} cannot be read (nested too deep): correct the file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"configuration file {path} cannot be read ({error_text(error)}): correct the path or the file") from None


# Variables are checked before pydantic reads them, because its messages do not name them.


def _variable_problems(kind: type[Config], variables: Mapping[str, str]) -> dict[str, str]:
    """Problems by variable name: variables that name no section, and plain text where JSON is
    needed.
    """
    problems = {}
    for name in setting_variables(variables):
        path = _path_of(name)
        if path[0] not in SECTIONS:
            names = ", ".join(sorted([*SECTIONS, "config"]))
            hint = did_you_mean(path[0], SECTIONS)
            problems[name] = (
                f"environment variable {visible(name, 120)}: no section {visible(repr(path[0]), 120)}; "
                f"{f'{hint} ' if hint else ''}sections are {names}"
            )
            continue
        kinds = _kinds(kind, path)
        structured = [each for each in kinds if _is_structured(each)]
        if structured and variables[name] not in _words(kinds) and not _is_json(variables[name]):
            form = _as_json(variables[name], structured[0])
            given = visible(repr(variables[name]), 200)
            problems[name] = f"environment variable {name} is {given}: give JSON, e.g. {visible(form, 200)}"
    return problems


def _kinds(config: type[Config], path: Iterable[int | str]) -> list[Any]:
    """The types that the setting at `path` may have; places in lists do not count. Empty for an
    unknown setting, because pydantic has the better message for it.
    """
    kinds: list[Any] = [config]
    for name in path:
        if isinstance(name, int):
            continue
        section = _section_in(*kinds)
        if section is None or name not in section.model_fields:
            return []
        annotation = section.model_fields[name].annotation
        kinds = list(get_args(annotation)) if get_origin(annotation) in (Union, UnionType) else [annotation]
    return [kind for kind in kinds if kind is not NoneType]


def _section_in(*kinds: Any) -> type[BaseModel] | None:
    """The section that a setting of one of these types is or, as a list, consists of."""
    return next((each for kind in kinds for each in (kind, *get_args(kind)) if _is_section(each)), None)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _is_structured(kind: Any) -> bool:
    return get_origin(kind) in (list, tuple, dict) or _is_section(kind)


def _words(kinds: list[Any]) -> set[Any]:
    return {word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _as_json(text: str, kind: Any) -> str:
    """The JSON that was probably meant: for `1.5,3.0` it is `[1.5, 3.0]`."""
    section = '{"setting": "value"}'
    if get_origin(kind) not in (list, tuple):
        return section
    if any(map(_is_section, get_args(kind))):
        return f"[{section}]"
    items = [item.strip().strip("'\"") for item in text.strip("[]() ").split(",")]
    return json.dumps([json.loads(item) if _is_json(item) else item for item in items])


_KIND = re.compile(r"(?:literal|list|tuple|dict)\[.*\]|int|float|bool|str|none", re.DOTALL)


def _faults_of(config: type[Config], error: ValidationError, variables: Mapping[str, str]) -> list[str]:
    """A line for each fault: several for a message of several lines, and one for a value that is
    none of several kinds.
    """
    found: dict[tuple[Location, str], list[str]] = {}
    for problem in error.errors():
        location, kind = _without_kind(problem)
        told = _message(config, problem)
        message, got, given = told.partition(", got ") if kind else (told, "", "")
        for line in message.splitlines():
            found.setdefault((location, got + given or line), []).append(line)
    return [
        _line(location, _either(lines) + (got if got != lines[0] else ""), variables) for (location, got), lines in found.items()
    ]


def _line(location: Location, message: str, variables: Mapping[str, str]) -> str:
    """The field, or the variable that sets it, and what is wrong."""
    name, variable = setting_name(location), variable_at(location, variables)
    where = f"environment variable {variable} ({name})" if variable else name
    return f"{where}: {message}" if name else message


def variable_at(location: Location, variables: Mapping[str, str]) -> str | None:
    """The environment variable that sets the value at `location`, either directly or as JSON for
    the section or list around it. None if no variable does.
    """
    paths = {tuple(_path_of(name)): name for name in setting_variables(variables)}
    for length in range(len(location), 0, -1):
        name = paths.get(tuple(str(part) for part in location[:length]))
        if name is not None and (length == len(location) or _reaches(variables[name], location[length:])):
            return name
    return None


def _reaches(text: str, location: Location) -> bool:
    """Say whether there is a value at `location` in JSON."""
    try:
        value = json.loads(text)
        for part in location:
            value = value[part]
    except (ValueError, KeyError, IndexError, TypeError):
        return False
    return True


def _message(config: type[Config], problem: ErrorDetails) -> str:
    """Say what is wrong, with what was meant where pydantic's own words do not lead there."""
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        if gone := _no_longer(config, problem["loc"]):
            return gone
        hint = meant_key(config, problem["loc"]) or "remove it or correct its spelling"
        if problem["loc"][0] == "tasks" and len(problem["loc"]) == 3 and "." in hint and "tasks." not in hint:
            hint += " A line after [[tasks]] belongs to that table: move it to its section, before [[tasks]];"
        return f"unknown key; {hint} (`swarm config show --all` lists all keys)"
    if problem["loc"] == ("tasks",) and isinstance(problem["input"], dict):
        return "is a single table, and must be a list of them: write [[tasks]] instead of [tasks]"
    if problem["loc"] and problem["type"] not in {"value_error", "missing"}:
        if problem["type"] == "string_pattern_mismatch":
            message = _in_words(str(problem.get("ctx", {}).get("pattern", ""))) or message
        message += f", got {visible(repr(problem['input']), _LONGEST_VALUE)}"
        if problem["type"] == "literal_error" and (hint := did_you_mean(str(problem["input"]), _choices(problem))):
            message += f"; {hint}"
        if problem["loc"][0] == "tasks" and problem["loc"][-1] == "dataset" and _is_path(problem["input"]):
            path = visible(json.dumps(problem["input"], ensure_ascii=False), _LONGEST_VALUE)
            message += f'; for a file write source = "file", path = {path} instead of dataset'
    return message


def _is_path(value: Any) -> bool:
    """Say whether it looks like the path of a file, such as `questions.jsonl`."""
    return isinstance(value, str) and ("/" in value or "." in value.strip("."))


def _without_kind(problem: ErrorDetails) -> tuple[Location, bool]:
    """Where the value is. For one that may be of several kinds, pydantic adds to the location which
    of them it is not; the second value says so.
    """
    location = problem["loc"]
    for place in (len(location) - 1, len(location) - 2):
        if place > 1 and problem["type"] != "extra_forbidden" and _KIND.fullmatch(str(location[place])):
            return (*location[:place], *location[place + 1 :]), True
    return location, False


def _either(lines: Sequence[str]) -> str:
    """Messages about one value as one: `Input should be A`, `Input should be B`."""
    first, *others = lines
    return " or ".join([first, *(line.removeprefix("Input should be ") for line in others)])


def _in_words(pattern: str) -> str:
    """Say what a name's pattern asks for; empty for other patterns."""
    if pattern.startswith("^(https?://"):
        return "must be an address that begins with http:// or https://"
    name = re.fullmatch(r"\^\(?\[[A-Za-z0-9-]+\]\[([^\]]+)\]\{0,(\d+)\}(?:\)\?)?\$", pattern)
    if name is None:
        return ""
    letters = "letters" if "A-Z" in name[1] else "small letters"
    signs = [sign for sign in "._-" if sign in re.sub(r"\w-\w", "", name[1])]
    return f"must be 1 to {int(name[2]) + 1} {letters}, digits or {' '.join(signs)}, beginning with a letter or digit"


def _choices(problem: ErrorDetails) -> list[str]:
    """The values that a field accepts. pydantic lists them only in a sentence, in quotes."""
    return re.findall(r"'([^']*)'", str(problem.get("ctx", {}).get("expected", "")))


OTHER_NAMES = {
    **dict.fromkeys(("group_size", "num_generations", "rollouts_per_prompt", "samples_per_prompt"), "generator.completions"),
    **dict.fromkeys(("max_tokens", "max_completion_length", "max_response_length"), "generator.max_new_tokens"),
    **dict.fromkeys(("batch_size", "train_batch_size"), "sampler.local and sampler.external"),
    **dict.fromkeys(("kl_coef", "kl_beta", "beta"), "trainer.kl_coefficient"),
    **dict.fromkeys(("steps", "total_steps"), "trainer.max_steps"),
    **dict.fromkeys(("micro_batch_size", "max_tokens_per_micro_batch"), "trainer.token_budget"),
    **dict.fromkeys(("loss", "loss_type", "algorithm", "algo"), "trainer.objective"),
    **dict.fromkeys(("max_grad_norm", "gradient_clipping"), "trainer.grad_clip"),
    **dict.fromkeys(("lora_rank", "r"), "trainer.lora.rank"),
    **dict.fromkeys(("prompt", "prompt_column", "question_column"), "tasks.question"),
    **dict.fromkeys(("answer_column", "solution", "ground_truth"), "tasks.answer"),
    "columns": "tasks.question and tasks.answer",
    "gpu_memory_utilization": "generator.gpu_memory_fraction",
    "tensor_parallel_size": "generator.tensor_parallel",
    "lr": "trainer.learning_rate",
    "model_name_or_path": "model.path",
    "eval_every": "eval.every_versions",
}
"""What other trainers call these settings. The names are too different for a spelling suggestion,
but may be misspelt themselves.
"""


def _no_longer(config: type[Config], location: Location) -> str:
    """Say that a former setting is fixed now; empty if the key was never one."""
    *path, key = location
    section = _section_in(*_kinds(config, path))
    if section is None or str(key) not in section.__class_vars__:
        return ""
    return f"no longer a setting: it is fixed at {getattr(section, str(key))!r}; remove it"


def meant_key(config: type[Config], location: Location) -> str:
    """A question to ask about the unknown key at `location`; empty if there is no good guess.

    Example: for `("trainer", "learing_rate")` it is `did you mean trainer.learning_rate?`; for
    `("trainer", "top_p")`, a key of another section, `did you mean generator.top_p?`; for
    `("generator", "groups_size")`, close to what others say, `did you mean
    generator.completions?`; for `("tasks", 0, "temprature")`, close to one of another section,
    `did you mean generator.temperature?`.
    """
    *path, key = location
    if usual := OTHER_NAMES.get(str(key)):
        return asked_for([usual])
    section = _section_in(*_kinds(config, path))
    name = str(key)
    elsewhere = [found for found in _keys(config) if found.rpartition(".")[2] == name]
    if elsewhere:
        return asked_for(sorted(elsewhere)[:3])
    close = closest(name, [*(section.model_fields if section else ()), *OTHER_NAMES])
    if not close:
        keys = list(_keys(config))
        near = closest(name, {found.rpartition(".")[2] for found in keys})
        return asked_for(sorted(found for found in keys if found.rpartition(".")[2] in near)[:3])
    # A key of a list's entry is called by its own name.
    prefix = "" if any(isinstance(part, int) for part in path) else "".join(f"{part}." for part in path)
    return asked_for(dict.fromkeys(OTHER_NAMES.get(each, f"{prefix}{each}") for each in close))


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in section.model_fields.items():
        inner = _section_in(info.annotation)
        if inner is None:
            yield f"{prefix}{name}"
        elif name not in ("tasks", "sets"):
            yield from _keys(inner, f"{prefix}{name}.")
