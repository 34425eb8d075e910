"""Checks a node's task sources once, at the start, instead of failing at the first draw that uses
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from shared.config.section import SETS, entry_lines, sources_message
from shared.contracts.messages import TaskRef
from shared.registry import DEFAULT_VERIFIER
from shared.reward_files import has_rewards, is_judged, parts_of, reward_problems, verifier_words
from shared.tasks.derive import TaskConfigError, TaskError, dataset_size, derive_item, forget_derived, from_package
from shared.tasks.file_formats import FileSourceError, place_in
from shared.tasks.file_rows import FileQuestions, find_rows, register_rows
from shared.tasks.file_source import first_of, load_rows, with_row_name
from shared.tasks.held_out import check_share, held_out_of, shares
from shared.tasks.reference_checks import FILE_ROWS_CHECKED, VERIFIERS, left_out, left_out_lines, look
from shared.tasks.verifiers import load_verifier, scorer_of

if TYPE_CHECKING:
    from shared.config.task_sections import EvalSet, TaskSpec
    from shared.config.verifier_config import VerifierConfig

C = TypeVar("C", bound="VerifierConfig")

_TWO_VERIFIERS = (
    "an earlier entry has the same tasks and scores them by {}, which would score all of them: choose one for both, or "
    "remove this entry ({})"
)


def check_specs(specs: Sequence[TaskSpec], held_out: int = 0) -> list[TaskSpec]:
    """Read each file, derive one item of each source, or many of a file, and let its verifier
    accept it. Returns the sources with each file's `dataset` set to the name of its rows.

    `held_out`: number of questions that evaluation takes; a file must have at least as many left
    for training.

    Raises:
        TaskConfigError: with one line per problem of a source that names the dataset, the config
            key if there is one, the cause and the remedy.
    """
    named, found = _checked(specs, held_out)
    if found:
        reason = next((error.reason for _, error in reversed(found) if isinstance(error, TaskError)), "task_config")
        raise TaskConfigError(reason, sources_message(entry_lines((position, str(error)) for position, error in found)))
    return named


def checked_config(config: C) -> C:
    """`check_specs` for a whole configuration, with its evaluation sets.

    Raises:
        TaskConfigError: as `check_specs`.
    """
    tasks = check_specs(config.tasks, config.eval.tasks)
    if lines := set_problems(config.eval.sets):
        raise TaskConfigError("task_config", sources_message(lines))
    sets = [with_row_name(each) for each in config.eval.sets]
    return config.model_copy(update={"tasks": tasks, "eval": config.eval.model_copy(update={"sets": sets})})


def set_problems(sets: Sequence[EvalSet]) -> list[str]:
    """The mistakes of evaluation sets, a line for each. Two sets may ask the same questions and
    score them differently.
    """
    found = [(place, str(error)) for place, each in enumerate(sets) for _, error in _checked([each], 0)[1]]
    return entry_lines(found, SETS)


def rows_in_sets(specs: Sequence[TaskSpec], held_out: int, sets: Sequence[EvalSet]) -> tuple[int, list[str]]:
    """Count the rows of these sources' files that an evaluation set has too, and say if nothing is
    left to train on. All of them are without problems.
    """
    specs, sets = [with_row_name(spec) for spec in specs], [with_row_name(each) for each in sets]
    try:
        return held_out_of(specs, tasks=held_out, sets=sets).rows_of_sets(specs), []
    except TaskError as error:
        return 0, [str(error)]


def source_problems(specs: Sequence[TaskSpec], held_out: int = 0, places: Sequence[int] = ()) -> list[str]:
    """All that `check_specs` would refuse, a line for each mistake.

    `places`: each source's place in the user's list, if that has others too.
    """
    _, found = _checked(specs, held_out)
    return entry_lines((places[position] if places else position, str(error)) for position, error in found)


def file_questions(specs: Sequence[TaskSpec], held_out: int = 0, places: Sequence[int] = ()) -> list[FileQuestions]:
    """The counts of each file among sources without problems, together for entries with the same
    rows; the arguments are those of `source_problems`.
    """
    total = sum(spec.weight for spec in specs)
    counts: dict[str, FileQuestions] = {}
    for position, (spec, share) in enumerate(zip(specs, shares(specs, held_out), strict=True)):
        if spec.source != "file":
            continue
        rows, part = load_rows(spec), spec.weight / total
        if known := counts.get(rows.name):
            counts[rows.name] = replace(known, held_out=known.held_out + share, part=known.part + part)
        else:
            place = places[position] if places else position
            spec = spec.model_copy(update={"dataset": rows.name})
            lines, questions = tuple(left_out_lines(spec, len(rows))), rows.distinct_questions() - left_out(spec)
            counts[rows.name] = FileQuestions(place, spec.path, questions, share, part, lines, rows.note)
    return list(counts.values())


def _checked(specs: Sequence[TaskSpec], held_out: int) -> tuple[list[TaskSpec], list[tuple[int, Exception]]]:
    """The named sources, and each problem with its source's position. Rows with mistakes do not
    hide what is wrong with the others.
    """
    named: list[TaskSpec] = []
    found: list[tuple[int, Exception]] = []
    verifiers: dict[tuple[str, str], str] = {}
    asked: Counter[str] = Counter()
    """Of each file, by the name of its rows: several entries may have the same rows."""
    for position, (spec, share) in enumerate(zip(specs, shares(specs, held_out), strict=True)):
        unread = 0
        try:
            spec = with_row_name(spec)
        except FileSourceError as error:
            found.append((position, error))
            if error.rest is not None:
                register_rows(error.rest)
                spec, unread = spec.model_copy(update={"dataset": error.rest.name}), error.unread
            else:
                found += [(position, problem) for problem in _verifier_problems(spec)]
                continue
        named.append(spec)
        asked[spec.dataset] += share
        found += [(position, problem) for problem in _problems(spec, asked[spec.dataset], unread)]
        rule = verifier_words(spec.verifier) + ("" if spec.pass_at is None else f" with pass_at {spec.pass_at:g}")
        rule += f" and {spec.turns.title}" if spec.tools and spec.turns else ""
        scored_by = verifiers.setdefault((spec.dataset, spec.canonical_config), rule)
        if scored_by != rule:
            found.append((position, TaskError("task_config", _TWO_VERIFIERS.format(scored_by, rule))))
    return named, found


def _verifier_problems(spec: TaskSpec) -> Iterator[TaskError]:
    """List why a source's verifier or rewards cannot be used. A file's code is not run here."""
    rows = find_rows(spec.dataset)
    columns = {"question", "answer", *rows.columns.values(), *rows.names} if rows is not None else None
    yield from (TaskError("task_verifier", problem) for problem in reward_problems(spec.verifier, columns))
    if is_judged(spec.verifier) and not (spec.judge.url and spec.judge.model):
        asks = f"{verifier_words(spec.verifier)} asks a judge"
        yield TaskError("task_verifier", f'{asks}: name it, judge = {{ url = "http://HOST:PORT/v1", model = "NAME" }}')
    elif spec.judge.url and not is_judged(spec.verifier):
        yield TaskError(
            "task_verifier", f'{verifier_words(spec.verifier)} asks no judge: remove `judge`, or set verifier = "judge"'
        )
    yield from (TaskError("task_environment", problem) for problem in (spec.turns.problems() if spec.turns else ()))
    for part in parts_of(spec.verifier):
        try:
            if not part.file:
                load_verifier(part.use)
        except TaskError as error:
            yield error


def _problems(spec: TaskSpec, share: int, unread: int) -> Iterator[TaskError]:
    """List what is wrong with one source. A verifier that is not there does not hide a wrong
    dataset, nor the reverse. `unread`: a file's rows with mistakes, which may become questions.
    """
    verifies = refused = False
    if spec.source == "file" or spec.verifier != DEFAULT_VERIFIER or spec.turns is not None:
        problems = list(_verifier_problems(spec))
        verifies = not problems
        yield from problems
    try:
        size = dataset_size(spec.dataset, spec.canonical_config)
        if verifies and spec.verifier in VERIFIERS:
            refused = look(spec, size).mostly_left_out
            if refused:
                yield TaskError("task_verifier", "\n".join(left_out_lines(spec, size)))
        elif verifies and spec.source == "file" and not has_rewards(spec.verifier):
            yield from _row_problems(spec, size)
        if spec.source == "file":
            check_share(spec, share, unread - (0 if refused else left_out(spec)))
            return
        item = derive_item(TaskRef(dataset=spec.dataset, config=spec.canonical_config, seed=1, index=0))
        if verifies and not refused and not has_rewards(spec.verifier):
            scorer_of(spec.verifier, item)
        if from_package(spec.dataset):
            _try_package(spec, size)
    except TaskError as error:
        yield error


def _try_package(spec: TaskSpec, size: int) -> None:
    """Derive a few items of an installed source, each twice: other processes have to derive the
    same.

    Raises:
        TaskError: one of them cannot be derived, or differs the second time.
    """
    for index in sorted({0, 1 % size, size // 2, size - 1}):
        ref = TaskRef(dataset=spec.dataset, config=spec.canonical_config, seed=1, index=index)
        first = derive_item(ref).task
        forget_derived()
        second = derive_item(ref).task
        fields = ("prompt", "answer", "metadata")
        differing = [each for each in fields if getattr(first, each) != getattr(second, each)]
        if not differing and first.key != second.key:
            differing = ["key"]
        if differing:
            another = f"item {index} of seed 1 has another {' and another '.join(differing)} when it is derived again"
            remedy = "derive items from config, seed and index alone (`random.Random(seed)`, not `random`)"
            raise TaskError("task_underivable", f"{spec.dataset}: {another}, so that no other process can check it: {remedy}")


def _row_problems(spec: TaskSpec, size: int) -> Iterator[TaskError]:
    """The rows, of those that are tried, whose answers the verifier cannot judge."""
    rows = find_rows(spec.dataset)
    lines, reason = [], ""
    for number in range(min(size, FILE_ROWS_CHECKED)):
        index = number * size // min(size, FILE_ROWS_CHECKED)
        try:
            item = derive_item(TaskRef(dataset=spec.dataset, seed=1, index=index))
            scorer_of(spec.verifier, item)
        except TaskError as error:
            known = rows.places if rows else None
            lines.append(f"{place_in(*known.of(index)) if known else f'{spec.path}: row {index + 1}'}: {error}")
            reason = error.reason
    if lines:
        yield TaskError(reason, "\n".join(first_of(lines, at_least=size > FILE_ROWS_CHECKED)))
