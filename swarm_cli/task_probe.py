"""Derives a task from each source in a separate process, with a deadline and a memory limit. The
tasks and their settings may come from somebody else (a token, a configuration, an overlay), and
some settings would take hours or all memory.

`python -m swarm_cli.task_probe` is that process: it reads sources from standard input, a line for
each configuration, and writes their problems to standard output, how many questions their files
have, and what reference answers earn."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from shared.importing import without_collection
from shared.runtime.process_limits import ending_with_parent
from swarm_cli.installation import own_modules

if TYPE_CHECKING:
    from shared.config import TaskSpec
    from shared.config.task_sections import EvalSet
    from shared.config.verifier_section import VerifierSection
    from shared.tasks.file_rows import FileQuestions


DEADLINE_S = 60.0
"""All of reasoning-gym's datasets with their default settings take a tenth of it."""
LATE_S, CALLS = 15.0, 3
"""More for each source: its scorer may never return. So many calls of one that takes nearly its
whole time are tried at least.
"""
LOADING_S = 600.0
"""More if a reward runs outside the sandbox: it may load a model."""
FILE_S, FILE_S_PER_MIB = 120.0, 1.0
"""More for each file, whose rows are read and of which some are shown to the verifier."""
MEMORY_BYTES = 2**30
"""What deriving may take beyond the modules. Usual settings take a few MiB."""
SMALLER = "try each dataset alone, and make the sizes in its `config` smaller; if this machine was busy, try again"
"""A remedy for whoever can change the settings."""
IN_SETS = "are also in [[eval.sets]], so they are left out of training"
_READY = b"ready\n"
_GONE_S = 10.0
"""What a process that has closed its output may take to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """Findings about task sources.

    problems: as `source_problems`, or one line if finding them took too long or too much memory.
    files: of sources that had no problem. rewards: what references earn, a line for each source
    whose reward is the user's choice. awaiting_pass: a line for each source whose reward does not
    say what passes. rows_in_sets: rows of the sources' files that an evaluation set has too, so
    that they are not trained on.
    """

    problems: Sequence[str]
    files: Sequence[FileQuestions] = ()
    rewards: Sequence[str] = ()
    reward_warnings: Sequence[str] = ()
    awaiting_pass: Sequence[str] = ()
    rows_in_sets: int = 0


class TaskProbe:
    """The process, which begins with `begin` or the first question, and answers one after another:
    importing what it needs takes a second. Use as a context manager; it ends with the context.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False

    def __enter__(self) -> TaskProbe:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def begin(self) -> None:
        """Start the process unless it runs. It imports what it needs meanwhile."""
        if self._process is None:
            self._is_ready = False
            self._process = subprocess.Popen(
                [sys.executable, "-m", "swarm_cli.task_probe"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env=os.environ | own_modules() | {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"},
                preexec_fn=ending_with_parent(),
            )

    def derive(
        self,
        tasks: Sequence[TaskSpec],
        held_out: int,
        remedy: str,
        places: Sequence[int] = (),
        deadline_s: float | None = None,
        sets: Sequence[EvalSet] = (),
        scoring: VerifierSection | None = None,
    ) -> Derived:
        """Derive a task of each source.

        `held_out`, `places`: as in `source_problems`; `sets`: evaluation sets, which are looked at
        too; `remedy`: what to do if the settings of a source demand too much; `scoring`: the limits
        under which rewards are tried. The deadline starts once the process has imported what it
        needs; by default it depends on these limits and on the files to read.
        """
        from shared.config.verifier_section import VerifierSection

        scoring = scoring or VerifierSection()
        names = ", ".join(dict.fromkeys(spec.dataset or spec.path for spec in (*tasks, *sets)))
        why = f"({names}; the settings of one may demand too much): {remedy}"
        asked = {"tasks": [spec.model_dump(mode="json") for spec in tasks], "held_out": held_out, "places": list(places)}
        asked["sets"] = [each.model_dump(mode="json") for each in sets]
        asked["scoring"] = scoring.model_dump(mode="json")
        if deadline_s is None:
            late_s = max(LATE_S, CALLS * scoring.answer_timeout_s)
            deadline_s = DEADLINE_S + sum(_file_s(spec) + late_s for spec in (*tasks, *sets))
            deadline_s += 0.0 if all(spec.sandbox for spec in (*tasks, *sets)) else LOADING_S
        if not self._ready():
            return Derived(
                problems=["the process that derives the tasks does not start: `python -m swarm_cli.task_probe` says why"]
            )
        told = self._answer(json.dumps(asked).encode() + b"\n", deadline_s)
        if told is None:
            self._end()
            return Derived(problems=[f"deriving one task from each source took longer than {deadline_s:.0f} s {why}"])
        if not told.endswith(b"\n"):
            code = self._end(_GONE_S)
            return Derived(problems=[f"the process that derived one task from each source ended with code {code} {why}"])
        answer = json.loads(told)
        if answer["files"]:
            # Imports numpy, which commands without a file do without.
            from shared.tasks.file_rows import FileQuestions

            answer["files"] = [FileQuestions(**{**each, "left_out": tuple(each["left_out"])}) for each in answer["files"]]
        return Derived(**answer)

    def _ready(self) -> bool:
        """Return whether the process has imported what it needs, for which it has no deadline: a
        machine may be slow, and nothing of the tasks is read yet.
        """
        self.begin()
        assert self._process is not None and self._process.stdout is not None
        if not self._is_ready:
            self._is_ready = self._process.stdout.readline() == _READY
        if not self._is_ready:
            self._end()
        return self._is_ready

    def _answer(self, question: bytes, deadline_s: float) -> bytes | None:
        """A line; less than a line if the process has ended, None if the deadline has passed."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        until, told = time.monotonic() + deadline_s, b""
        answers = select.poll()
        answers.register(self._process.stdout, select.POLLIN)
        with suppress(BrokenPipeError):
            self._process.stdin.write(question)
        while not told.endswith(b"\n"):
            if not answers.poll(max(0.0, until - time.monotonic()) * 1000):
                return None
            part = self._process.stdout.read(2**16)
            if not part:
                break
            told += part
        return told

    def _end(self, patience_s: float = 0.0) -> int | None:
        """Kills the process unless it ends by itself; its code."""
        process, self._process = self._process, None
        if process is None:
            return None
        with process:
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
            process.kill()
        return process.returncode


def begin_deriving(
    tasks: Sequence[TaskSpec],
    held_out: int,
    remedy: str,
    places: Sequence[int] = (),
    deadline_s: float | None = None,
    sets: Sequence[EvalSet] = (),
    scoring: VerifierSection | None = None,
) -> Callable[[], Derived]:
    """Start a process for this question alone, which imports what it needs meanwhile. The returned
    function asks it, as `TaskProbe.derive` does.
    """
    begun = TaskProbe()
    begun.begin()

    def derive() -> Derived:
        with begun as apart:
            return apart.derive(tasks, held_out, remedy, places, deadline_s, sets, scoring)

    return derive


def _file_s(spec: TaskSpec) -> float:
    """Seconds that a source's files may take; 0 if it has none, or none that can be read."""
    if spec.source != "file":
        return 0.0
    from shared.tasks.file_formats import FileSourceError
    from shared.tasks.file_source import MAX_BYTES
    from shared.tasks.hub_files import source_files

    try:
        # Those of the hub are fetched here, where there is no deadline.
        size_bytes = sum(file.stat().st_size for file in source_files(spec.path, spec.revision))
    except (FileSourceError, OSError):
        return 0.0
    return FILE_S + min(size_bytes, MAX_BYTES) / 2**20 * FILE_S_PER_MIB


def main() -> None:
    """Write `ready`; for each line with sources write one with their problems."""
    with without_collection():
        from shared.config import TaskSpec
        from shared.config.section import SETS
        from shared.config.task_sections import EvalSet
        from shared.runtime.process_limits import MappedMemory, limit_data
        from shared.tasks.derive import dataset_names, forget_derived
        from shared.tasks.reference_checks import worth_trying
        from shared.tasks.specs import file_questions, rows_in_sets, set_problems, source_problems

        dataset_names()
    # A dataset that prints must not write into the answer.
    answer = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    # Rows of files are mapped, and do not count.
    limit_data((MappedMemory().data_bytes() or 0) + MEMORY_BYTES, soft=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer.write(_READY)
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        tasks = [TaskSpec.model_validate(spec) for spec in asked["tasks"]]
        about = (tasks, asked["held_out"], asked["places"])
        sets = [EvalSet.model_validate(each) for each in asked["sets"]]
        problems = [*source_problems(*about), *set_problems(sets)]
        files = [] if problems else [asdict(each) for each in file_questions(*about)]
        told: dict[str, list[str]] = {"problems": problems, "rewards": [], "reward_warnings": [], "awaiting_pass": []}
        if not problems and any(map(worth_trying, tasks)):
            told |= _tried(tasks, asked["places"], asked["scoring"])
        common = 0
        if sets and not problems:
            common, nothing_left = rows_in_sets(tasks, asked["held_out"], sets)
            tried = [_tried([each], [place], asked["scoring"], SETS) for place, each in enumerate(sets) if worth_trying(each)]
            for name in ("problems", "rewards", "reward_warnings"):
                told[name] = told[name] + [line for of_set in tried for line in of_set.get(name, [])]
            told["problems"] = told["problems"] + nothing_left
        answer.write(json.dumps({**told, "files": files, "rows_in_sets": common}).encode() + b"\n")
        forget_derived()


def _tried(
    tasks: Sequence[TaskSpec], places: Sequence[int], scoring: dict[str, object], table: tuple[str, ...] = ("tasks",)
) -> dict[str, list[str]]:
    """Try the rewards in the sandbox that a run uses, under the limits of its section `scoring`:
    mistakes of built-in verifiers, what was earned, warnings about the user's own, and which of
    these wait for a pass.
    """
    from shared.config.section import entry_lines
    from shared.config.verifier_section import VerifierSection
    from shared.reward_files import not_given
    from shared.tasks.evaluation import PassRules
    from shared.tasks.file_source import with_row_name
    from shared.tasks.reference_checks import Trial, try_rewards, worth_trying
    from shared.tasks.sandbox import SandboxError, ScorerPool

    named = [with_row_name(spec) for spec in tasks]

    async def trials() -> list[tuple[int, Trial]]:
        rules = PassRules(named)
        async with ScorerPool.from_config(VerifierSection.model_validate(scoring), tasks=named, workers=1) as pool:
            return [
                (places[position] if places else position, trial)
                for position, spec in enumerate(named)
                if worth_trying(spec)
                for trial in await try_rewards(pool, [spec], rules, every_row=True)
            ]

    try:
        found = asyncio.run(trials())
    except SandboxError as error:
        return {"problems": [str(error)]}
    wrong = [(place, trial.problem) for place, trial in found if trial.problem and (trial.built_in or trial.unusable)]
    doubtful = [(place, trial) for place, trial in found if trial.problem and not (trial.built_in or trial.unusable)]
    without = [(places[at] if places else at, line) for at, spec in enumerate(named) for line in not_given(spec.verifier)]
    warnings = [*without, *((place, f"{trial.problem} ({trial.figures})") for place, trial in doubtful)]
    waiting = [(place, f"groups of other nodes are refused, as {trial.no_pass}") for place, trial in found if trial.awaits_pass]
    return {
        "problems": entry_lines(wrong, table),
        "rewards": [trial.figures for _, trial in found],
        "reward_warnings": entry_lines(warnings, table),
        "awaiting_pass": entry_lines(waiting),
    }


if __name__ == "__main__":
    main()
