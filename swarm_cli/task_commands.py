"""`swarm task list`, `show`, `score` and `audit`: inspect tasks and rewards."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from shared.contracts.messages import Task, TaskRef
from shared.registry import DEFAULT_VERIFIER
from shared.reward_files import has_rewards, is_given_groups, not_given, verifier_words
from shared.runtime.exits import EXIT_CONFIG
from shared.text import visible_json
from swarm_cli.asked_tasks import ALL_NAMES, NO_TASK, asked_sources, canonical_settings, is_file
from swarm_cli.chosen_config import load_chosen
from swarm_cli.console import indented, note, say
from swarm_cli.errors import CommandError
from swarm_cli.file_names import FileNames, file_names

if TYPE_CHECKING:
    from shared.config import TaskSpec
    from shared.tasks.audit.run import Finding
    from shared.tasks.sandbox import JobResult, ScorerPool, ScoringJob

Result = TypeVar("Result")

task_app = typer.Typer(name="task", help="Inspect the tasks that policies are trained and evaluated on.", no_args_is_help=True)

Dataset = Annotated[str, typer.Argument(metavar="DATASET", help="A dataset's name, or your own file: x.jsonl, x.csv, ./folder.")]
Columns = Annotated[str, typer.Option(help="For a file: question and answer, as `problem,solution`; empty: the usual names.")]
Settings = Annotated[str, typer.Option(help="The dataset's settings as JSON, e.g. '{\"max_terms\": 3}'.")]
Seed = Annotated[int, typer.Option(min=0)]
Judge = Annotated[
    str, typer.Option(help="How answers are scored: reasoning_gym, exact, final_number, math, judge, or an installed verifier.")
]
JudgeServer = Annotated[
    tuple[str, str] | None, typer.Option("--judge", metavar="URL MODEL", help="The judge that the reward asks, without a key.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@task_app.command("list")
def list_tasks(
    contains: Annotated[str, typer.Argument(metavar="CONTAINS", help="Only names that contain this.")] = "",
    as_json: AsJson = False,
) -> None:
    """Print the names of all datasets."""
    from shared.tasks.derive import dataset_names

    names = [name for name in dataset_names() if contains in name]
    if not names:
        raise CommandError(f"no dataset's name contains {contains!r}: `swarm task list` shows all")
    if as_json:
        typer.echo(json.dumps(names))
        return
    for name in names:
        typer.echo(name)


@task_app.command()
def show(
    dataset: Dataset,
    settings: Settings = "{}",
    seed: Seed = 0,
    index: Annotated[int, typer.Option(min=0, help="First task.")] = 0,
    count: Annotated[int, typer.Option(min=1, max=1000)] = 1,
    columns: Columns = "",
    as_json: AsJson = False,
) -> None:
    """Print tasks of a dataset: question and reference answer."""
    from shared.tasks.sandbox import ScoringJob

    (source,) = asked_sources([dataset], DEFAULT_VERIFIER, columns, settings)
    refs = [_ref(source.dataset, settings, seed, position) for position in range(index, index + count)]
    for result in _run([ScoringJob(ref=ref, want_task=True) for ref in refs], source):
        if result.task is None:
            raise CommandError(result.detail)
        say(visible_json(_as_object(result.task)) if as_json else _as_text(result.task, file_names(None, [source])))


@task_app.command()
def score(
    dataset: Dataset,
    answer: Annotated[str, typer.Option(help="A completion's text; - reads standard input.")],
    settings: Settings = "{}",
    seed: Seed = 0,
    index: Annotated[int, typer.Option(min=0)] = 0,
    verifier: Judge = DEFAULT_VERIFIER,
    reward_file: Annotated[
        str, typer.Option("--reward", metavar="FILE.py:FUNCTION", help="Instead of a verifier, your function.")
    ] = "",
    sandbox: Annotated[bool, typer.Option("--sandbox/--no-sandbox", help="As `sandbox` in [[tasks]], for --reward.")] = True,
    judge: JudgeServer = None,
    pass_at: Annotated[float | None, typer.Option(help="The reward from which on an answer passes.")] = None,
    columns: Columns = "",
    as_json: AsJson = False,
) -> None:
    """Print the reward that the verifier gives to an answer, in the sandbox that a run uses; then
    what references earn.

    Exits with code 78 if a reward of your own cannot be used.
    """
    from shared.tasks.evaluation import PassRules
    from shared.tasks.reference_checks import FAILURES, WHY, Trial, Tried, try_rewards
    from shared.tasks.sandbox import ScoringJob

    # Not in text mode, because an answer need not be valid UTF-8.
    text = sys.stdin.buffer.read().decode(errors="replace") if answer == "-" else answer
    (source,) = asked_sources([dataset], verifier, columns, settings, reward_file, sandbox=sandbox, judge=judge)
    settled = {} if source.source == "file" else {"config": json.loads(canonical_settings(settings))}
    source = source.model_copy(update={"pass_at": pass_at, **settled})
    ref, rules = _ref(source.dataset, settings, seed, index), PassRules([source])

    async def scored(pool: ScorerPool) -> tuple[JobResult, list[Trial]]:
        trials = await try_rewards(pool, [source], rules, every_row=True)
        (result,) = await pool.run([ScoringJob(ref=ref, texts=[text])])
        return result, trials

    result, trials = _with_pool(scored, source)
    unusable = [trial.problem for trial in trials if trial.unusable]
    if result.reason is not None:
        raise CommandError(result.detail, EXIT_CONFIG if unusable else 1)
    (reward,), (mark,) = result.rewards, result.marks
    if not trials and mark in FAILURES and has_rewards(source.verifier):
        unusable.append(f"{verifier_words(source.verifier)} cannot be used: the only call that was tried failed")
    passed = None if reward is None else rules.settled_pass(ref, reward, mark)
    if as_json:
        facts = {"reward": reward, "passed": passed, "unknown": mark.cause or None}
        typer.echo(json.dumps(facts | {"seconds": round(result.seconds, 3)}))
    elif reward is None or not unusable:
        typer.echo(f"unknown ({mark.cause})" if reward is None else f"{reward:g}")
    if result.printed:
        note(f"it prints:\n{indented(result.printed)}" if "\n" in result.printed else f"it prints: {result.printed}")
    if reward is None:
        leaves, why = "this answer leaves its group", WHY.get(mark, result.detail)
        if mark in FAILURES and is_given_groups(source.verifier):
            leaves = "all answers of its group leave it, as one call scores all of them"
        below = any(why in trial.problem for trial in trials)
        note(f"in a run, {leaves}: see below" if below else f"{verifier_words(source.verifier)} {why}: in a run, {leaves}")
    elif not unusable:
        note(f"this answer earns {Tried(reward, passed, mark, result.detail, result.seconds)}")
    for sentence in not_given(source.verifier):
        note(f"warning: {sentence}")
    for trial in trials:
        note(trial.figures)
        if trial.problem and not trial.unusable:
            note(f"warning: {trial.problem}")
    if unusable:
        raise CommandError("\n".join(unusable), EXIT_CONFIG)


@task_app.command()
def audit(
    datasets: Annotated[list[str] | None, typer.Argument(metavar="DATASET", help="Names of datasets; all if omitted.")] = None,
    count: Annotated[int, typer.Option(min=1, max=200, help="Tasks of each dataset.")] = 3,
    settings: Settings = "{}",
    seed: Seed = 0,
    verifier: Judge = DEFAULT_VERIFIER,
    judge: JudgeServer = None,
    columns: Columns = "",
    as_json: AsJson = False,
) -> None:
    """Search for wrong answers that a verifier gives full marks: constants, echoes, right answers
    with text added or one thing changed.

    Exits with code 1 if it finds any, or if no right answer to a dataset's tasks is paid.
    """
    from shared.tasks.audit.run import audit as run_audit
    from shared.tasks.derive import dataset_names

    names = datasets or dataset_names()
    sources = asked_sources(names, verifier, columns, settings, judge=judge)
    unknown = sorted({name for name in names if not is_file(name)} - set(dataset_names()))
    if unknown:
        raise CommandError(f"no dataset is called {', '.join(unknown)}: `swarm task list` lists them")
    failed = False
    for name, source in zip(names, sources, strict=True):
        refs = [_ref(source.dataset, settings, seed, index) for index in range(count)]
        found = _with_pool(partial(run_audit, refs=refs), source)
        if source.dataset not in found:
            raise CommandError(f"{name}: none of its first {count} tasks can be derived; `swarm task show {name}` says why")
        failed = _report(found[source.dataset], as_json, file_names(None, [source])) or failed
    if failed:
        raise typer.Exit(1)


def _report(finding: Finding, as_json: bool, names: FileNames) -> bool:
    # Prints one dataset's result; True if a wrong answer got full marks, or no right one did.
    constant, mean = finding.best_constant()
    no_right_paid = not finding.right_paid and finding.unanswered < finding.tasks
    paid = [
        {"index": ref.index, "kind": candidate.kind, "name": candidate.name, "answer": candidate.text}
        for ref, candidate, _ in finding.paid
    ]
    if as_json:
        counts = {"tasks": finding.tasks, "right_paid": finding.right_paid, "wrong": finding.wrong, "wrong_paid": paid}
        best = {"best_constant": constant, "best_constant_mean": round(mean, 4)}
        typer.echo(json.dumps({"dataset": finding.dataset, **counts, **best, "timeouts": finding.timeouts}))
        return bool(paid) or no_right_paid
    right, wrong = f"{finding.right_paid}/{finding.tasks}", f"{len(paid)}/{finding.wrong}"
    lost = f", timeouts {finding.timeouts}" if finding.timeouts else ""
    found = f"right answers paid {right}, wrong answers paid {wrong}, best constant {constant} {mean:.2f}{lost}"
    typer.echo(f"{names.shown(finding.dataset)}: {found}")
    for one in paid:
        typer.echo(f"  task {one['index']}, {one['kind']}, {one['name']}: {str(one['answer'])[:200]!r}")
    if no_right_paid:
        typer.echo("  no right answer is paid: `swarm task score` with one shows what the verifier does with it", err=True)
    return bool(paid) or no_right_paid


def _run(jobs: list[ScoringJob], source: TaskSpec) -> list[JobResult]:
    return _with_pool(lambda pool: pool.run(jobs), source)


def _with_pool(work: Callable[[ScorerPool], Awaitable[Result]], source: TaskSpec) -> Result:
    from shared.config.verifier_section import ViewConfig
    from shared.tasks.sandbox import SandboxError, ScorerPool

    scoring = load_chosen(None, ViewConfig).verifier

    async def run() -> Result:
        async with ScorerPool.from_config(scoring, tasks=[source], workers=1) as pool:
            return await work(pool)

    try:
        return asyncio.run(run())
    except SandboxError as error:
        raise CommandError(str(error)) from None


def _ref(dataset: str, settings: str, seed: int, index: int) -> TaskRef:
    named = {"dataset": dataset, "config": canonical_settings(settings), "seed": seed, "index": index}
    try:
        return msgspec.convert(named, TaskRef)
    except msgspec.ValidationError as error:
        raise CommandError(f"{NO_TASK} ({error}): {ALL_NAMES}") from None


def _as_object(task: Task) -> dict[str, Any]:
    ref = task.ref
    named = {"dataset": ref.dataset, "config": json.loads(ref.config), "seed": ref.seed, "index": ref.index}
    return {**named, "question": task.text, "answer": task.answer, "metadata": json.loads(task.metadata)}


def _as_text(task: Task, names: FileNames) -> str:
    answer = task.answer if task.answer is not None else "(none; any right answer scores)"
    place = f"{names.shown(task.ref.dataset)} seed {task.ref.seed} index {task.ref.index}"
    return f"--- {place}\n{task.text}\nreference answer: {answer}"
