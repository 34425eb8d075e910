"""Derives the tasks of the nodes' configurations, as the nodes' pods would: with the rows of those
files that a pod has from a ConfigMap of the overlay.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shared.config import NodeConfig, TaskSpec
from swarm_cli.k8s.check.overlay import Object, Overlay, Workload
from swarm_cli.k8s.check.told import mounted_file
from swarm_cli.task_probe import TasksApart

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

    def __init__(self, apart: TasksApart) -> None:
        self._apart = apart
        self._ended = False

    def checked(self, tasks: Given, held_out: int) -> Checked:
        """What is wrong with the sources, and how many rows their files have. Sources whose files
        are not here are left out, but keep their number.
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
