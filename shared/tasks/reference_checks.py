"""Leaves out questions whose own reference answer earns nothing: no answer would, for ever.

`exact`, `final_number` and `math` are asked about the reference answer as the documentation asks
for answers, `<answer>...</answer>`; as references are read as answers are, of a text such as
`... #### 72` that is the 72. Of a file, the start looks at many rows, and a draw at each of the
others before its first use. What another verifier pays is its author's to decide.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from shared.contracts.messages import Task, TaskRef
from shared.environment_files import EnvironmentSpec
from shared.registry import DEFAULT_VERIFIER
from shared.reward_files import has_rewards, is_judged, parts_of, verifier_words
from shared.rewards import SANDBOXED, LocalOnly, Mark, differ
from shared.tasks.answers import CLOSING_TAG, OPENING_TAG, extract_answer
from shared.tasks.derive import Item, TaskError, dataset_size, derive_item, from_package
from shared.tasks.evaluation import MANY, PassRules, pass_words
from shared.tasks.file_formats import place_in
from shared.tasks.file_rows import find_rows, is_file_name
from shared.tasks.verifiers import is_built_in, scorer_of

if TYPE_CHECKING:
    from shared.config.task_sections import TaskSpec
    from shared.tasks.sandbox import JobResult, ScorerPool

VERIFIERS = frozenset({"exact", "final_number", "math"})
FILE_ROWS_CHECKED, ITEMS_CHECKED = 1000, 10
"""Rows of a file, spread over it, that are looked at in any case, and items of another source."""
CHECK_S, MORE_ROWS_S = 60.0, 2.0
"""Time for these rows, and for the file's others."""
_ROWS_AT_ONCE = 8
_PLACES_TOLD, _REFERENCE_TOLD_CHARS = 5, 60


class LeftOut(NamedTuple):
    """Why no answer earns full marks. `cause`: the same for rows with the same mistake."""

    cause: str
    why: str


class Looked(NamedTuple):
    """Number of rows looked at, and those of them that are left out, by index."""

    rows: int
    left_out: dict[int, LeftOut]

    @property
    def mostly_left_out(self) -> bool:
        """Check whether the verifier is not one for this file."""
        return 2 * len(self.left_out) > self.rows


def problem_of(verifier: str, item: Item) -> LeftOut | None:
    """Why the item's reference answer earns nothing; None if it does, or for another verifier."""
    if verifier not in VERIFIERS:
        return None
    try:
        score = scorer_of(verifier, item)
    except TaskError as error:
        return LeftOut("unreadable", str(error).removeprefix(f"{item.task.ref.dataset}: "))
    reference = item.task.answer or ""
    own = extract_answer(reference)
    given = None if own is None else extract_answer(f"{OPENING_TAG}{own}{CLOSING_TAG}")
    if given is not None and float(score(given)) == 1.0:
        return None
    said = f"the reference answer {_shortened(reference)!r}"
    if own is None:
        return LeftOut("no answer", f"{said} is only a thought, or mostly white space: write the answer alone")
    if own != reference.strip():
        remedy = "use final_number or math, which read references the same way, or keep only that"
        return LeftOut("read otherwise", f"of {said}, {_shortened(own)!r} is read as the answer and earns nothing: {remedy}")
    return LeftOut("unpaid", f"{said} earns nothing when it is given as an answer: write it as an answer is written, or remove it")


def is_left_out(spec: TaskSpec, ref: TaskRef) -> bool:
    """Check whether no answer to this question of the source earns full marks. A row of a file is
    looked at once.
    """
    if spec.verifier not in VERIFIERS:
        return False
    known = _known(spec.dataset, spec.canonical_config, spec.verifier)
    if not is_file_name(ref.dataset):
        # Each is another item, so that only their number is kept.
        is_left_out = problem_of(spec.verifier, derive_item(ref)) is not None
        known.items += 1
        known.items_left_out += is_left_out
        return is_left_out
    if ref.index not in known.looked_at:
        known.look(ref.index, derive_item(ref))
    return ref.index in known.left_out


def look(spec: TaskSpec, size: int) -> Looked:
    """Look at the references of many of a source's items.

    Raises:
        TaskError: an item cannot be derived.
    """
    known, started = _known(spec.dataset, spec.canonical_config, spec.verifier), time.monotonic()
    first = min(size, FILE_ROWS_CHECKED if spec.source == "file" else ITEMS_CHECKED)
    spread = dict.fromkeys(number * size // first for number in range(first))
    for count, index in enumerate((*spread, *(range(size) if spec.source == "file" and first < size else ()))):
        if time.monotonic() - started > (CHECK_S if count < first else MORE_ROWS_S):
            break
        if index in known.looked_at:
            continue
        try:
            known.look(index, derive_item(TaskRef(dataset=spec.dataset, config=spec.canonical_config, seed=1, index=index)))
        except TaskError as error:
            if not index or not error.only_this_item:
                raise
    return Looked(len(known.looked_at), known.left_out)


def left_out(spec: TaskSpec) -> int:
    """Number of rows (of a file) or draws (of another source) that were left out so far."""
    if spec.verifier not in VERIFIERS:
        return 0
    known = _known(spec.dataset, spec.canonical_config, spec.verifier)
    return len(known.left_out) if spec.source == "file" else known.items_left_out


def looked_at(spec: TaskSpec) -> int:
    """Number of rows or draws whose reference was looked at so far."""
    if spec.verifier not in VERIFIERS:
        return 0
    known = _known(spec.dataset, spec.canonical_config, spec.verifier)
    return len(known.looked_at) if spec.source == "file" else known.items


def left_out_lines(spec: TaskSpec, size: int) -> list[str]:
    """Count a source's rows that were left out so far, and for each cause name the first ones;
    empty for none.
    """
    known = _known(spec.dataset, spec.canonical_config, spec.verifier)
    looked = Looked(len(known.looked_at), known.left_out)
    if not looked.left_out:
        return []
    of = f"its {size:,} rows" if looked.rows == size else f"the {looked.rows:,} rows looked at, of {size:,},"
    lines = [f"{spec.path or spec.dataset}: {len(looked.left_out):,} of {of} cannot earn full marks from verifier {spec.verifier}"]
    causes = Counter(each.cause for each in looked.left_out.values())
    for cause, count in causes.most_common():
        places = sorted(index for index, each in looked.left_out.items() if each.cause == cause)
        more = f" and {count - _PLACES_TOLD:,} more" if count > _PLACES_TOLD else ""
        lines.append(f"{_places(spec, places[:_PLACES_TOLD])}{more}: {looked.left_out[places[0]].why}")
    return lines


def _places(spec: TaskSpec, indexes: Iterable[int]) -> str:
    rows = find_rows(spec.dataset)
    if rows is None or rows.places is None:
        return "items " + ", ".join(map(str, indexes))
    (file, number), *others = (rows.places.of(index) for index in indexes)
    begin = place_in(file, number)
    if others:
        begin = begin.removesuffix(f" {number}") + f"s {number}"
    return ", ".join([begin, *(str(place) if there == file else place_in(there, place) for there, place in others)])


def _shortened(text: str) -> str:
    """Its end, which is where answers are."""
    return text if len(text) <= _REFERENCE_TOLD_CHARS else f"...{text[-_REFERENCE_TOLD_CHARS:]}"


class _Known:
    """Findings about the rows of one source in this process."""

    def __init__(self, verifier: str) -> None:
        self._verifier = verifier
        self.looked_at: set[int] = set()
        self.left_out: dict[int, LeftOut] = {}
        self.items = self.items_left_out = 0

    def look(self, index: int, item: Item) -> None:
        problem = problem_of(self._verifier, item)
        if problem is not None:
            self.left_out[index] = problem
        self.looked_at.add(index)


@lru_cache(maxsize=64)
def _known(dataset: str, config: str, verifier: str) -> _Known:
    return _Known(verifier)


# Tries the rewards of task sources in the sandbox that scores a run's answers: what a task's own
# reference earns there, and what the references of other tasks earn on it.


OTHERS = 4
"""References of other tasks that are tried: one may be the same value in another form."""
LOOKED_AT = 24
"""Tasks, spread over a source, among which such references are looked for."""


FORMS = (r"\boxed{{{}}}", "#### {}", "The answer is {}", "<answer>{}</answer>")
"""Usual endings of answers, in which a reference is tried where none passes as it is."""
_LONG = " and so on" * 200


WHY = {
    Mark.TIMEOUT: "does not return in time (raise verifier.answer_timeout_s, or make it faster)",
    Mark.KILLED: "ends its process",
    Mark.NOT_APPLICABLE: "says by None that it does not apply",
}


FAILURES = frozenset({Mark.RAISED, Mark.NOT_A_NUMBER, Mark.TIMEOUT, Mark.KILLED})
"""Marks of calls that failed; a reward file of which every tried call did is an error."""
TIMEOUTS = 2
"""Calls that do not return in time, after which no further one is tried."""


@dataclass(frozen=True, slots=True)
class Tried:
    """Reward of one text. `detail`: why its reward is unknown. `refused`: the whole task is, by a
    verifier or reward that cannot be used for it.
    """

    reward: float | None
    passed: bool | None
    mark: Mark
    detail: str
    seconds: float
    refused: bool = False

    def __str__(self) -> str:
        earned = f"unknown ({self.mark.cause})" if self.reward is None else f"{self.reward:g}"
        passes = "" if self.reward is None or self.passed is None else f", {pass_words(self.passed)}"
        return f"{earned}{passes}, {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class Trial:
    """Rewards that a source's task paid its own reference (`own`) and those of other tasks.
    `rewards`: the distinct ones of these and of further texts, at most `MANY`, where only the
    rewards of a run tell what passes.
    """

    spec: TaskSpec
    own: Tried
    others: Sequence[Tried]
    rewards: Sequence[float] = ()
    local_only: bool = False
    """An answer's reward alone is not its reward in a group, so that it depends on the others that
    a sender chooses: no group of another node is taken in."""
    group_failure: str = ""
    """What a call with a group raised or returned, where each answer alone has a reward."""
    forms: Sequence[str] = ()
    """The reference as it was tried in further forms. If one of them earned more than the reference
    as it is, `own` and `others` are of references in the first of these."""
    form_paid: bool = False
    """Whether one of `forms` earned more; it is the first."""
    rows: Sequence[tuple[int, Tried]] = ()
    """Of further rows, the index and what the reward pays their own reference."""
    reference: str = ""

    @property
    def built_in(self) -> bool:
        """Check whether the project's own rule was tried, and not a user's or a package's."""
        return is_built_in(self.spec.verifier, self.spec.dataset)

    @property
    def unusable(self) -> bool:
        """Check whether an environment cannot be played, or a reward's file cannot be loaded, or
        every tried call of its function, or the one with a group, fails.
        """
        if self.spec.turns is not None and self.own.refused:
            return True
        if not has_rewards(self.spec.verifier):
            return False
        return self.own.refused or bool(self.group_failure) or all(each.mark in FAILURES for each in (self.own, *self.others))

    @property
    def figures(self) -> str:
        name = self.spec.file_name if self.spec.source == "file" else self.spec.dataset
        others = f"; another task's: {self.others[-1]}" if self.others else ""
        rule = f"; {self.no_pass}" if self.no_pass else ""
        if why := self.why_local_only:
            rule += f"; no group of another node is taken, as {why.words}"
        given = f", given as {_shortened(self.forms[0])}," if self.form_paid else ""
        return f"{name}, {verifier_words(self.spec.verifier)}: the reference{given} earns {self.own}{others}{rule}"

    @property
    def why_local_only(self) -> LocalOnly | None:
        """Why no group of another node is taken of the source; None if nothing is against it."""
        if not self.spec.sandbox:
            return LocalOnly.OUTSIDE_SANDBOX
        if is_judged(self.spec.verifier):
            return LocalOnly.JUDGED
        return LocalOnly.GROUP_DEPENDENT if self.local_only else None

    @property
    def awaits_pass(self) -> bool:
        """Check whether the reward takes too many values for one of them to be the pass."""
        return len(self.rewards) >= MANY

    @property
    def no_pass(self) -> str:
        """Say why only a run tells what passes, or that no run does; empty: an answer passes or
        does not, by the configuration or by its scorer.
        """
        if self.own.reward is None or self.own.passed is not None:
            return ""
        if self.awaits_pass:
            return f"the reward takes more than two values, so scores are mean rewards and {pass_words(None)}{self._suggested_pass}"
        seen = {*self.rewards, *(tried.reward for tried in (self.own, *self.others))} - {None}
        if len(parts_of(self.spec.verifier)) < 2:
            return "" if seen <= {0.0, 1.0} else "the higher of two rewards passes"
        return f"the higher of two rewards passes; if a third appears, {pass_words(None)}{self._suggested_pass}"

    @property
    def _suggested_pass(self) -> str:
        """A value for `pass_at` of a sum of rewards; empty for one reward."""
        parts = parts_of(self.spec.verifier)
        if len(parts) < 2:
            return ""
        heaviest = max(parts, key=lambda part: part.weight)
        return f" (for example {heaviest.weight:g}, what full marks of {heaviest.title} alone earn)"

    @property
    def problem(self) -> str:
        """Say what is wrong with these rewards, and what that means for the run; empty: nothing."""
        for tried in (self.own, *self.others):
            if tried.reward is None:
                if tried.refused and self.unusable:
                    return tried.detail
                why = WHY.get(tried.mark, tried.detail)
                if tried.mark is Mark.KILLED and self.spec.sandbox and not self.built_in:
                    why += f" in the sandbox ({SANDBOXED})"
                where = "for a reference answer" + ("" if self.spec.sandbox else ", outside the sandbox")
                becomes = "" if self.built_in else ": in a run such answers have no known reward, so they count for nothing"
                if self.others and all(each.mark is Mark.NOT_APPLICABLE for each in (self.own, *self.others)):
                    becomes = ", nor for those of other tasks: nothing can be learnt from it (without `return` it is None)"
                if "ModuleNotFoundError" in tried.detail:
                    becomes += "; install the module in the environment that runs the node"
                return f"{verifier_words(self.spec.verifier)} {why} {where}{becomes}"
        if failed := [(index, tried) for index, tried in self.rows if tried.mark in FAILURES]:
            told = WHY.get(failed[0][1].mark, failed[0][1].detail)
            places = _places(self.spec, [index for index, _ in failed[:_PLACES_TOLD]])
            more = f" and {len(failed) - _PLACES_TOLD} more" if len(failed) > _PLACES_TOLD else ""
            where = f"for the reference of {places}{more} ({len(self.rows)} further rows were tried)"
            return f"{verifier_words(self.spec.verifier)} {told} {where}: in a run such answers have no known reward"
        if self.group_failure:
            how = "a run calls it with all answers to a question at once"
            return f"{verifier_words(self.spec.verifier)} {self.group_failure}: {how}"
        if self.others and not any(differ(self.own.reward or 0.0, tried.reward or 0.0) for tried in self.others):
            right = f"gives {self.own.reward:g} to the right answer ({_shortened(self.reference)!r}), as to every other text tried"
            tried_too = f"the right answers of {len(self.others)} other tasks"
            return (
                f"{verifier_words(self.spec.verifier)} {right}: {tried_too}{self._forms_tried or '. Nothing can be learnt from it'}"
            )
        best = max(tried.reward or 0.0 for tried in (self.own, *self.others))
        if self.spec.pass_at is not None and best < self.spec.pass_at:
            earned = f"pass_at is {self.spec.pass_at:g}, and the best that was tried, a reference answer, earns {best:g}"
            return f"{verifier_words(self.spec.verifier)}: {earned}{self._forms_tried or ': no answer would pass; lower pass_at'}"
        return ""

    @property
    def _forms_tried(self) -> str:
        """Name the forms in vain; empty if none was tried, or one earned more."""
        if not self.forms or self.form_paid:
            return ""
        return (
            f", and this one as {', '.join(form.format('...') for form in FORMS)}. Nothing can be learnt from it, unless it wants "
            "another form: try that with `swarm task score --answer '...'`"
        )


def worth_trying(spec: TaskSpec) -> bool:
    """Check whether a source's reward, or what passes, is the user's choice. Those of
    reasoning-gym's own datasets are tried by this project's tests.
    """
    chosen = spec.source == "file" or spec.pass_at is not None or spec.verifier != DEFAULT_VERIFIER
    return chosen or spec.turns is not None or from_package(spec.dataset)


async def try_rewards(pool: ScorerPool, specs: Sequence[TaskSpec], rules: PassRules, *, every_row: bool = False) -> list[Trial]:
    """Try the sources, which must have been found usable (`check_specs`). A source whose tasks have
    no references is left out. `rules` note the rewards. every_row: try a user's reward on the
    references of as many rows as `MORE_ROWS_S` allows.

    Raises:
        SandboxError: as `ScorerPool.run`.
    """
    return [trial for spec in specs if (trial := await _tried(pool, spec, rules, every_row=every_row)) is not None]


async def _tried(pool: ScorerPool, spec: TaskSpec, rules: PassRules, *, every_row: bool) -> Trial | None:
    from shared.tasks.sandbox.jobs import ScoringJob

    try:
        size = dataset_size(spec.dataset, spec.canonical_config)
    except TaskError:
        return None
    count = min(size, LOOKED_AT)
    places = [number * size // count for number in range(count)]
    refs = [TaskRef(dataset=spec.dataset, config=spec.canonical_config, seed=1, index=place) for place in places]
    derived = [each.task for each in await pool.run([ScoringJob(ref=ref, want_task=True) for ref in refs])]
    if spec.turns is not None:
        fault = await _fault_in_play(pool, spec.turns, next((task for task in derived if task is not None), None))
        if fault:
            return Trial(spec, Tried(None, None, Mark.RAISED, f"{spec.turns.title}: {fault}", 0.0, True), ())
        if spec.environment:
            return None
    known = [task for task in derived if task is not None and task.answer is not None and not is_left_out(spec, task.ref)]
    tasks = [(task.ref, task.answer or "") for task in known]
    if not tasks:
        return None
    (ref, reference), *rest = tasks
    others = list(dict.fromkeys(answer for _, answer in rest if answer.strip().casefold() != reference.strip().casefold()))
    found = [await _scored(pool, rules, ref, reference)]
    for other in others[:OTHERS]:
        if _is_settled(found, has_rewards(spec.verifier)):
            break
        found.append(await _scored(pool, rules, ref, other))
    # Of a reward that says nothing, only the rewards of a run tell what passes.
    own, *tried = (replace(each, passed=rules.settled_pass(ref, each.reward, each.mark)) for each in found)
    trial = Trial(spec, own, tried, reference=reference)
    if is_judged(spec.verifier):
        return trial  # each answer is judged by itself, and every further one costs a request
    if not (trial.built_in or trial.unusable) and _is_unpaid(trial):
        trial = await _in_forms(pool, rules, trial, ref, reference, others[:OTHERS])
        own = trial.own
    if has_rewards(spec.verifier) and not trial.unusable:
        local_only, failure = await _in_a_group(pool, ref, [reference, *others[:OTHERS]])
        shapes = {_shape(task): task for task in reversed(known)}
        shapes.pop(_shape(known[0]))
        other_shapes = [*shapes.values()][-OTHERS:]
        rows = [(task.ref.index, await _scored(pool, rules, task.ref, task.answer or "")) for task in other_shapes]
        if every_row and spec.sandbox and spec.source == "file":
            rows += await _further_rows(pool, spec, size, {ref.index, *(index for index, _ in rows)})
        trial = replace(trial, local_only=local_only, group_failure=failure, rows=rows)
    if own.reward is None or own.passed is not None or trial.unusable:
        return trial
    rewards = await _distinct_rewards(pool, spec, ref, [reference, *others[:OTHERS]])
    if len(rewards) >= MANY:
        # What a trial says of a pass holds from the first evaluation on.
        rules.note(ref, rewards, [Mark.UNSAID] * len(rewards))
    return replace(trial, rewards=rewards)


def _is_unpaid(trial: Trial) -> bool:
    """Check whether no reference earns more than others, or none earns what passes."""
    tried = (trial.own, *trial.others)
    if trial.spec.pass_at is not None and max(each.reward or 0.0 for each in tried) < trial.spec.pass_at:
        return True
    return bool(trial.others) and not any(differ(trial.own.reward or 0.0, each.reward or 0.0) for each in trial.others)


async def _in_forms(pool: ScorerPool, rules: PassRules, trial: Trial, ref: TaskRef, reference: str, others: Sequence[str]) -> Trial:
    """Try references in usual endings of answers: many a reward pays a form too."""

    async def scored(text: str) -> Tried:
        tried = await _scored(pool, rules, ref, text)
        return replace(tried, passed=rules.settled_pass(ref, tried.reward, tried.mark))

    texts = [form.format(reference) for form in FORMS]
    for form, text in zip(FORMS, texts, strict=True):
        own = await scored(text)
        if own.reward is None or (trial.own.reward is not None and own.reward <= trial.own.reward):
            continue
        found: list[Tried] = []
        for other in others:
            found.append(await scored(form.format(other)))
            if differ(own.reward, found[-1].reward or 0.0):
                break
        given = replace(trial, own=own, others=found, forms=[text], form_paid=True)
        if not _is_unpaid(given):
            return given
    return replace(trial, forms=[reference, *texts])


async def _fault_in_play(pool: ScorerPool, spec: EnvironmentSpec, task: Task | None) -> str:
    """Why an environment cannot be played; empty if it can. It is played twice: what it says may
    depend on the task and the turns alone, or no other process could derive it.
    """
    from shared.tasks.sandbox.jobs import ScoringJob

    if task is None:
        return ""
    calls = [
        json.dumps({"name": each["name"], "arguments": _any_arguments(each)}) for each in (s["function"] for s in spec.schemas())
    ]
    turns = [*(f"<tool_call>{call}</tool_call>" for call in calls), "1", task.answer or "2"][: spec.max_turns]
    jobs = [ScoringJob(ref=task.ref, texts=[turns[:said] for said in range(1, len(turns) + 1)], urgent=True)] * 2
    first, again = [(await pool.run([job]))[0] for job in jobs]
    if first.reason is not None:
        return first.detail
    if any(mark in (Mark.RAISED, Mark.TIMEOUT, Mark.KILLED, Mark.NOT_A_NUMBER) for mark in first.marks):
        return first.detail or f"it takes too long, or ends its process, at the turns {turns}"
    if (first.said, first.rewards) != (again.said, again.rewards):
        return (
            "it says or pays something else when the same turns are played again: let that depend on the task and the turns alone "
            "(no clock, no files, nothing kept between episodes)"
        )
    return ""


def _any_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    values = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
    properties = function["parameters"]["properties"]
    return {name: kind["enum"][0] if "enum" in kind else values.get(kind.get("type"), "1") for name, kind in properties.items()}


def _shape(task: Task) -> tuple[Any, ...]:
    """Describe how a reward reads a row: whether its prompt is messages, and the columns with
    their types.
    """
    rows = find_rows(task.ref.dataset)
    columns = {} if rows is None else rows.given_columns(task.ref.index, task.text)
    is_messages = len(task.prompt) > 1 if rows is None else rows.is_messages(task.ref.index)
    return is_messages, *((name, type(columns[name]).__name__) for name in sorted(columns))


async def _further_rows(pool: ScorerPool, spec: TaskSpec, size: int, tried: Collection[int]) -> list[tuple[int, Tried]]:
    """Try the references of a file's other rows, in order, as many as `MORE_ROWS_S` allows."""
    from shared.tasks.sandbox.jobs import ScoringJob

    refs = [TaskRef(dataset=spec.dataset, config=spec.canonical_config, seed=1, index=place) for place in range(size)]
    refs, found, started = [ref for ref in refs if ref.index not in tried], list[tuple[int, Tried]](), time.monotonic()
    for begin in range(0, len(refs), _ROWS_AT_ONCE):
        if time.monotonic() - started > MORE_ROWS_S:
            break
        derived = await pool.run([ScoringJob(ref=ref, want_task=True) for ref in refs[begin : begin + _ROWS_AT_ONCE]])
        tasks = [each.task for each in derived if each.task is not None and each.task.answer is not None]
        results = await pool.run([ScoringJob(ref=task.ref, texts=[task.answer or ""], urgent=True) for task in tasks])
        for task, result in zip(tasks, results, strict=True):
            if result.reason is None:
                earned = Tried(result.rewards[0], None, result.marks[0], result.detail, result.seconds)
                found.append((task.ref.index, earned))
        if sum(each.mark in (Mark.TIMEOUT, Mark.KILLED) for _, each in found) >= TIMEOUTS:
            break
    return found


def _is_settled(found: Sequence[Tried], is_file: bool) -> bool:
    """Check whether no other reference need be tried: two earn differently, or a call failed. Of a
    file's reward, all must fail, or several not return in time, before it counts as unusable. One
    that does not apply says nothing of the others.
    """
    *former, newest = found
    if newest.mark is Mark.NOT_APPLICABLE:
        return False
    if newest.reward is not None:
        return bool(former) and (former[0].reward is None or differ(former[0].reward, newest.reward))
    fails_alike = is_file and not newest.refused and all(each.mark in FAILURES for each in found)
    return not fails_alike or sum(each.mark is Mark.TIMEOUT for each in found) >= TIMEOUTS


async def _in_a_group(pool: ScorerPool, ref: TaskRef, texts: Sequence[str]) -> tuple[bool, str]:
    """Check whether an answer earns otherwise alone than in a group; or say why the call with the
    group fails, if each alone has a reward. The first text comes twice, for rewards that look for
    copies. `texts`: references. In a second group are others, for rewards that compare lengths.
    """
    from shared.tasks.sandbox.jobs import ScoringJob

    async def scored(groups: Sequence[Sequence[str]]) -> list[JobResult]:
        return await pool.run([ScoringJob(ref=ref, texts=[*group], urgent=True) for group in groups])

    first = texts[0]
    endings = (form.format(first) for form in FORMS)
    further = dict.fromkeys(["", "no", f"{first} {first}", f"{first}{_LONG}", *endings])
    every = list(dict.fromkeys([*texts, *further]))
    alone = dict(zip(every, await scored([[text] for text in every]), strict=True))
    # A text that fails alone would fail its whole group, which says nothing of the others.
    mixed = [text for text in every if not FAILURES & {*alone[text].marks}]
    for group in ([*texts, first], [*mixed, *mixed[:1]]):
        (together,) = await scored([group])
        by_itself = [reward for text in group for reward in alone[text].rewards]
        if None not in by_itself and {*together.marks} in ({Mark.RAISED}, {Mark.NOT_A_NUMBER}):
            return False, together.detail
        if any(
            (one is None) != (other is None) or (one is not None and other is not None and differ(one, other))
            for one, other in zip(together.rewards, by_itself, strict=False)
        ):
            return True, ""
    return False, ""


async def _distinct_rewards(pool: ScorerPool, spec: TaskSpec, ref: TaskRef, references: Sequence[str]) -> list[float]:
    """The distinct rewards, at most `MANY`, of references and of texts that earn parts."""
    from shared.tasks.sandbox.jobs import ScoringJob

    texts = dict.fromkeys([*references, f"The answer is {references[0]}.", f"{references[0]} {references[0]}", ""])
    results = await pool.run([ScoringJob(ref=ref, texts=[text], urgent=True) for text in texts])
    rules = PassRules([spec])
    for result in results:
        if result.reason is None:
            rules.note(ref, result.rewards, result.marks)
    return [reward for rewards in rules.values.values() for reward in rewards]


async def _scored(pool: ScorerPool, rules: PassRules, ref: TaskRef, text: str) -> Tried:
    from shared.tasks.sandbox.jobs import ScoringJob

    (result,) = await pool.run([ScoringJob(ref=ref, texts=[text], urgent=True)])
    if result.reason is not None:
        return Tried(None, None, Mark.TIMEOUT if result.timeouts else Mark.RAISED, result.detail, result.seconds, True)
    rules.note(ref, result.rewards, result.marks)
    return Tried(result.rewards[0], None, result.marks[0], result.detail, result.seconds)
