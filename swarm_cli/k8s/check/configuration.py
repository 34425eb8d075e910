"""Each node's configuration as its pods will read it: the file in the ConfigMap, and the variables
that win over it, and tasks of rows that a pod has from a ConfigMap.

What only the pod has (model, keys, installed packages) is not looked at."""

from __future__ import annotations

import re
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from shared.config import ConfigError, NodeConfig, TaskSpec, load_config
from shared.config.load import CONFIG_FILE_VARIABLE
from shared.config.section import task_entry
from shared.roles import ROLES
from shared.runtime.exits import EXIT_CONFIG
from swarm_cli.chosen_config import LOOPBACK
from swarm_cli.config_checks import objective_problem
from swarm_cli.k8s.check.overlay import (
    NODE_LABEL,
    File,
    Finding,
    Object,
    Overlay,
    Variable,
    Workload,
    listed,
    mounted_file,
    probed_ports,
    variables,
)
from swarm_cli.risky_settings import left_out_rows, risky_settings, row_limit_warnings
from swarm_cli.task_probe import TaskProbe

if TYPE_CHECKING:
    from shared.tasks.file_rows import FileQuestions


READ_FILES = ("generator", "verifier")
_SMALLER = "make the sizes in the `config` of its [[tasks]] smaller; if this machine was busy, try again"
_PACKED = (".parquet", ".arrow")
"""They are read with a package that this machine may lack, and as text they are none."""

_ENDING = 10


@dataclass(frozen=True, slots=True)
class Checked:
    """problems: a sentence for each task source that cannot be used. files: of each file source the
    counts, unless there are problems or rows that are not here. unread: the places of those.
    """

    problems: tuple[str, ...] = ()
    files: tuple[FileQuestions, ...] = ()
    unread: frozenset[int] = frozenset()


Given = tuple[tuple[str, str | None], ...]
"""Of each task source its settings as JSON, and its file's text if the overlay has it."""


def given_tasks(overlay: Overlay, workload: Workload, container: Object, config: NodeConfig) -> tuple[Given, int]:
    """The task sources as the container has them, and how many questions evaluation takes."""

    def text(spec: TaskSpec) -> str | None:
        if spec.source != "file" or spec.path.endswith(_PACKED):
            return None
        file = mounted_file(overlay, workload, container, spec.path)
        return file.text if file and isinstance(file.text, str) else None

    return tuple((spec.model_dump_json(), text(spec)) for spec in config.tasks), config.eval.tasks


class Derived:
    """Derives tasks of several configurations, until those of one take too long."""

    def __init__(self, apart: TaskProbe) -> None:
        self._apart = apart
        self._ended = False

    def checked(self, tasks: Given, held_out: int) -> Checked:
        """Find faults of the sources, and count the rows of their files. Sources whose files are
        not here are left out, but keep their number.
        """
        specs = [TaskSpec.model_validate_json(settings) for settings, _ in tasks]
        unread = frozenset(number for number, spec in enumerate(specs) if spec.source == "file" and tasks[number][1] is None)
        places = [number for number in range(len(specs)) if number not in unread]
        if not places:
            return Checked(unread=unread)
        if self._ended:
            sentence = f"no task was derived, because deriving those of another configuration did not end: {_SMALLER}"
            return Checked((sentence,), unread=unread)
        with tempfile.TemporaryDirectory(prefix="swarm-check-") as folder:
            kept = [_with_file(specs[number], tasks[number][1], Path(folder) / str(number)) for number in places]
            problems = self._apart.problems(kept, 0 if unread else held_out, _SMALLER, places)
        self._ended = any(_SMALLER in each for each in problems)
        here = {spec.path: specs[number].path for number, spec in zip(places, kept, strict=True) if spec.path}
        # With sources left out the counts would be of other parts than the pod's.
        files = [] if unread else [replace(each, path=here[each.path]) for each in self._apart.files]
        return Checked(tuple(_as_in_pod(" ".join(each.split()), here) for each in problems), tuple(files), unread)


def _with_file(spec: TaskSpec, text: str | None, folder: Path) -> TaskSpec:
    """The source with its file in `folder`, which is made for it. The overlay may be somebody
    else's: of its path only the ending is used here, if it could be one.
    """
    if text is None:
        return spec
    folder.mkdir()
    ending = Path(spec.path).suffix[:_ENDING]
    file = folder / (f"rows{ending}" if re.fullmatch(r"\.\w+", ending, re.ASCII) else "rows")
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    return spec.model_copy(update={"path": str(file)})


def _as_in_pod(sentence: str, here: dict[str, str]) -> str:
    for path, in_pod in here.items():
        sentence = sentence.replace(path, in_pod)
    return sentence


_VARIABLE = re.compile(r"environment variable (\w+)")
_PREFIX = re.compile(r"^environment variable \w+(?: \([^)]*\))?: ")
_FIELD = re.compile(r"([\w-]+(?:\.[\w-]+)*): ")
_ENTRY = re.compile(r"\[\[tasks\]\] (\d+): (?:([\w-]+(?:\.[\w-]+)*)(?=: ))?")
_SETTING = re.compile(r"\b([a-z_]+(?:\.\w+)+)")
_UNHEARD = "never becomes ready and is restarted again and again"


@dataclass(frozen=True, slots=True)
class _Reader:
    """A container that reads a node's configuration when it starts."""

    workload: Workload
    container: Object
    variables: Mapping[str, Variable]
    file: File

    @property
    def node(self) -> str:
        return str(self.workload.labels.get(NODE_LABEL, ""))

    def place(self, sentence: str) -> str:
        """Where the first setting that a sentence names is set, for the user."""
        if entry := _ENTRY.match(_PREFIX.sub("", sentence)):
            name = ".".join(filter(None, ["tasks", str(int(entry[1]) - 1), entry[2]]))
        else:
            found = _FIELD.match(sentence) or _SETTING.search(sentence)
            name = found[1] if found else ""
        of_setting = f"SWARM_{name.replace('.', '__').upper()}"
        variable = named[1] if (named := _VARIABLE.match(sentence)) else of_setting
        if variable in self.variables:
            return f"{self.variables[variable].source}, {variable}"
        return f"ConfigMap {self.file.config_map}, {self.file.entry}"

    def remedy(self, place: str) -> str:
        """Which file of the repository to correct."""
        if self.file.config_map not in place:
            return "correct the kustomization that sets it"
        return f"correct {f'nodes/{self.node}' if self.node else 'the folder of its node'}/{self.file.entry}"


@dataclass(frozen=True, slots=True)
class _Problem:
    """A fault, and what becomes of a container that reads it: `would end with code ...`."""

    sentence: str
    effect: str = f"would end with code {EXIT_CONFIG}"
    stops: bool = True


def configuration_findings(overlay: Overlay, apart: TaskProbe) -> list[Finding]:
    """Findings about the configuration of every node: each once, with the workloads that read
    it.

    `apart`: the process that derives the nodes' tasks.
    """
    found: dict[tuple[str, str, _Problem], list[str]] = {}
    notes: list[Finding] = []
    checked = cache(Derived(apart).checked)
    for reader in _readers(overlay):
        config, problems = _loaded(reader)
        rows = Checked()
        if config is not None:
            rows = checked(*given_tasks(overlay, reader.workload, reader.container, config))
            problems += [*_setting_problems(config, rows), *_pod_problems(config, reader)]
        for problem in problems:
            place = reader.place(problem.sentence)
            found.setdefault((place, reader.remedy(place), problem), []).append(reader.workload.name)
        if config is not None and not problems:
            notes += [*_notes(config, reader), *_file_notes(config, reader, rows)]
    stopping = [
        Finding(problem.stops, f"{place}: {_PREFIX.sub('', problem.sentence)}; {listed(names)} {problem.effect}", remedy)
        for (place, remedy, problem), names in found.items()
    ]
    return list(dict.fromkeys([*stopping, *notes]))


def _readers(overlay: Overlay) -> Iterator[_Reader]:
    """The services' containers and init containers that are given a file by `SWARM_CONFIG`."""
    for workload in overlay.workloads():
        starting = workload.pod.get("initContainers", [])
        for container in [*starting, *(each for each in workload.pod.get("containers", []) if each["name"] in ROLES)]:
            told = variables(overlay, workload, container)
            path = told.get(CONFIG_FILE_VARIABLE)
            file = mounted_file(overlay, workload, container, path.value) if path else None
            if file is not None:
                yield _Reader(workload, container, told, file)


def _loaded(reader: _Reader) -> tuple[NodeConfig | None, list[_Problem]]:
    """The configuration, or None and its faults."""
    if reader.file.text is None:
        return None, [_Problem(f"there is no entry {reader.file.entry}, which {CONFIG_FILE_VARIABLE} names")]
    try:
        tomllib.loads(reader.file.text)
    except tomllib.TOMLDecodeError as error:
        return None, [_Problem(f"it is not valid TOML: {error}")]
    environment = {name: each.value for name, each in reader.variables.items()}
    with tempfile.TemporaryDirectory(prefix="swarm-check-") as folder:
        path = Path(folder) / "node.toml"
        path.write_text(reader.file.text)
        try:
            return load_config(path, environment=environment), []
        except ConfigError as error:
            return None, [_Problem(" ".join(fault.split())) for fault in error.faults]


def _setting_problems(config: NodeConfig, rows: Checked) -> list[_Problem]:
    """Return findings of `swarm config check` that are the same on every machine."""
    objective = objective_problem(config)
    return [_Problem(each) for each in [*([objective] if objective else []), *rows.problems]]


def _pod_problems(config: NodeConfig, reader: _Reader) -> Iterator[_Problem]:
    """Settings that do not fit the pod: the node's name, and where its probes ask."""
    if reader.node and config.node.id != reader.node:
        what = f"node.id is {config.node.id}, but the pods, volumes and keys are those of node {reader.node} (label {NODE_LABEL})"
        if any(name.endswith("_KEY_FILE") for name in reader.variables):
            yield _Problem(what, f"would be denied by the servers and end with code {EXIT_CONFIG}")
        else:
            yield _Problem(what, f"would run under that name, and end with code {EXIT_CONFIG} if another node has it", stops=False)
    role = reader.container["name"]
    asked = list(probed_ports(reader.container)) if role in ROLES else []
    if not asked:
        return
    port = config.http_port(role)
    setting = "http.port" if config.http.port is not None else "http.base_port"
    if wrong := [f"{probe} asks {number}" for probe, number in asked if number != port]:
        yield _Problem(f"{setting} makes the {role} listen on {port or 'any free port'}, but its {wrong[0]}", _UNHEARD)
    if config.http.host in LOOPBACK:
        yield _Problem(f"http.host is {config.http.host}, where no probe reaches the {role}: it must be 0.0.0.0", _UNHEARD)


def _notes(config: NodeConfig, reader: _Reader) -> Iterator[Finding]:
    for sentence in risky_settings(config):
        place = reader.place(sentence)
        yield Finding(False, f"{place}: {sentence}", reader.remedy(place))


def _file_notes(config: NodeConfig, reader: _Reader, rows: Checked) -> Iterator[Finding]:
    """Files whose rows were not checked, or are few. Sampler and trainer do not read them."""
    if reader.container["name"] not in READ_FILES:
        return
    for number, task in enumerate(config.tasks):
        if task.source == "file" and number in rows.unread:
            what = f"{reader.place(f'{task_entry(number)}: path: ')}: the rows of {task.path} were not checked"
            yield Finding(False, what, "run `swarm config check` where that file is")
    for sentence in left_out_rows(rows.files):
        yield Finding(
            False, f"{reader.place(sentence)}: {' '.join(sentence.split())}", "correct those rows in that file's ConfigMap"
        )
    for sentence in row_limit_warnings(config, rows.files):
        yield Finding(False, f"{reader.place(sentence)}: {sentence}", "add rows to that file's entry of its ConfigMap")
