"""`swarm eval`: score any policy on held-out tasks, by default with greedy sampling."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from shared.cancelling import cancel_and_wait
from shared.config import NodeConfig, TaskSpec, scorers_id
from shared.config.load import CONFIG_FILE_VARIABLE
from shared.config.model_section import ModelSection
from shared.config.task_sections import EvalSet
from shared.contracts.control import EvalReport, TaskScore
from shared.contracts.messages import Task, TaskRef
from shared.run_records import CHECKPOINTS, EVAL_FILE, EVAL_SETS_FILE, added_words, eval_lines, eval_report
from shared.text import visible
from swarm_cli.asked_tasks import task_sources
from swarm_cli.chosen_config import ConfigOption, load_chosen
from swarm_cli.console import count, note, show_table
from swarm_cli.errors import CommandError
from swarm_cli.file_names import FileNames, file_names
from swarm_cli.local.base_model import model_problem
from swarm_cli.model.commands import export_node, tell_of_checkpoint
from swarm_cli.observe.run_files import NO_PASS_SHOWN
from swarm_cli.runs import started_with

if TYPE_CHECKING:
    from services.generator.engines import Sample
    from services.generator.engines.base import Engine
    from services.generator.tasks import PromptedTask
    from shared.tasks import HeldOut
    from shared.tasks.sandbox import JobResult

_COMPLETIONS_A_CALL = {"transformers": 32}
"""Completions of one call of an engine that works on a CPU, so that progress is told early."""
_MANY_COMPLETIONS = 1024
_TOLD_EVERY_S, _LOOK_EVERY_S = 10.0, 1.0
_LONGEST_CELL = 400


@dataclass(frozen=True, slots=True)
class Answered:
    """A held-out question, the policy's answer with what an environment said between its turns, its
    reward (None: unknown), and whether it passes (None: no pass is defined).
    """

    dataset: str
    question: str
    reference: str | None
    answer: str
    reward: float | None
    passed: bool | None
    turns: int = 1


def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model folder, hub name, or a node's folder in a run (var/runs/RUN/NODE).")
    ],
    tasks: Annotated[str, typer.Option(help="TOML file with [[tasks]], or dataset names.  [default: the config's]")] = "",
    n: Annotated[
        int | None,
        typer.Option("--n", min=1, max=100_000, help="How many tasks.  [default: as many as the node, or eval.tasks, holds out]"),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, max=10.0, help="0: greedy.  [default: 0, or 1 with --k]", show_default=False)
    ] = None,
    k: Annotated[
        int | None,
        typer.Option("--k", min=1, max=1024, help="Answers to each question; above 1: avg@k and pass@k.  [default: 1]"),
    ] = None,
    set_name: Annotated[
        str, typer.Option("--set", metavar="NAME", help="Ask an evaluation set ([[eval.sets]]), with its k and temperature.")
    ] = "",
    engine: Annotated[str, typer.Option(help="auto, transformers or vllm.")] = "auto",
    revision: Annotated[str, typer.Option(help="Commit of a hub name.  [default: model.revision, if MODEL is model.path]")] = "",
    answers: Annotated[
        int,
        typer.Option(min=0, max=1000, help="Show the answers to this many questions per dataset, with their rewards."),
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    config: ConfigOption = None,
) -> None:
    """Score a policy on the fixed held-out tasks; of a node's folder, on those that it held out, by
    the configuration that its run was started with.

    With --n, and where the configuration is not the node's, it is said how many of the tasks may
    have been trained on (not_held_out; null: not known).
    """
    if engine not in {"auto", "transformers", "vllm"}:
        raise CommandError(f"--engine {engine}: use auto, transformers or vllm")
    node_config = load_chosen(config or _configuration_of(Path(model)), NodeConfig)
    chosen = _chosen_set(node_config, set_name, tasks) if set_name else None
    sources: Sequence[TaskSpec] = [chosen] if chosen else task_sources(tasks) if tasks else node_config.tasks
    k = k or (chosen.k if chosen else 1)
    if temperature is None:
        temperature = chosen.temperature if chosen else 1.0 if k > 1 else 0.0
    if k > 1 and not temperature:
        raise CommandError(f"--k {k} with --temperature 0: greedy answers to a question are all the same: give a temperature")
    note(f"checking {model} and its held-out tasks")
    with tempfile.TemporaryDirectory(prefix="swarm-eval-") as scratch:
        commit = revision or (node_config.model.revision if model == node_config.model.path else "")
        folder, step = _model_folder(model, commit, Path(scratch))
        node_config = node_config.model_copy(update={"model": _section(node_config, folder, commit)})
        asked, prompted = _prompted_tasks(node_config, model, sources, n)
        drawn = f"sampled at temperature {temperature:g}" if temperature else "greedy"
        answers_in_all = f"{count(len(asked.tasks), 'question')}, {count(k, 'answer')} to each, {drawn}"
        note(f"{answers_in_all}, of at most {node_config.generator.max_new_tokens:,} tokens (generator.max_new_tokens)")
        report, answered = asyncio.run(_evaluate(node_config, asked, prompted, temperature, engine, k))
    shown, several = _first_per_dataset(answered, answers * k), rates_at_k(answered, k)
    if as_json:
        found = {"model": model, "step": step, "temperature": temperature, "k": k, **_as_object(report, several)}
        found["not_held_out"] = asked.not_held_out
        typer.echo(json.dumps({**found, **({"answers": [asdict(each) for each in shown]} if answers else {})}, indent=2))
    else:
        of_step = "," if step is None else f", step {step},"
        where = f"set {set_name}" if set_name else "held-out tasks"
        _show(f"{model}{of_step} on {where}, {drawn}", report, shown, several, k, file_names(None, asked.sources))


def _chosen_set(config: NodeConfig, name: str, tasks: str) -> EvalSet:
    if tasks:
        raise CommandError("--set and --tasks are both given: keep one")
    found = next((each for each in config.eval.sets if each.name == name), None)
    if found is None:
        known = ", ".join(each.name for each in config.eval.sets)
        raise CommandError(f"--set {name}: the configuration has {f'the sets {known}' if known else 'no [[eval.sets]]'}")
    return found


def _configuration_of(model: Path) -> Path | None:
    """The configuration of the run that `model`, a node's folder or a checkpoint, is in; None for
    another folder, or if the environment names one.
    """
    folder = _node_folder(model)
    return started_with(folder.resolve().parent) if folder is not None and not os.environ.get(CONFIG_FILE_VARIABLE) else None


def _model_folder(model: str, revision: str, scratch: Path) -> tuple[str, int | None]:
    """The model's folder or name, and its step if it is a checkpoint's."""
    folder = Path(model)
    if (folder / "checkpoints").is_dir() or (folder / "manifest.json").is_file():
        exported = export_node(folder, scratch / "policy")
        tell_of_checkpoint(exported)
        return str(exported.folder), exported.step
    problem = model_problem(model, revision)
    if problem:
        raise CommandError(problem)
    return model, None


def _section(config: NodeConfig, folder: str, revision: str) -> ModelSection:
    """The configuration's model section, of the model that is asked."""
    same = {"system_prompt": config.model.system_prompt, "max_length": config.model.max_length}
    return ModelSection(path=folder, revision=revision, device=config.model.device, dtype=config.model.dtype, **same)


def _prompted_tasks(
    config: NodeConfig, model: str, sources: Sequence[TaskSpec], n: int | None
) -> tuple[EvalTasks, list[PromptedTask]]:
    """The tasks alone, and with their prompts. Tells how many may have been trained on."""
    from services.generator.tasks import PromptedTask
    from shared.model.configuration import ModelLoadError
    from shared.model.prompts import PromptError, render_prompt
    from shared.model.reading import load_tokenizer, model_max_length
    from shared.tasks import check_specs
    from shared.tasks.verifiers import VerifierChoice

    try:
        tokenizer, longest = load_tokenizer(config.model), model_max_length(config.model) - config.generator.max_new_tokens
    except ModelLoadError as error:
        raise CommandError(str(error)) from None
    with _task_errors():
        choice = VerifierChoice(check_specs(sources))
    known: dict[tuple[TaskRef, str], PromptedTask] = {}
    unwritable: dict[str, PromptError] = {}

    def fits(task: Task) -> bool:
        key = (task.ref, task.text)
        if key not in known and task.text not in unwritable:
            turns = choice.turns_for(task.ref)
            try:
                ids = render_prompt(tokenizer, task.prompt, config.model.system_prompt, turns.tools_json if turns else "")
                known[key] = PromptedTask(task, ids, turns)
            except PromptError as error:
                unwritable[task.text] = error
        return task.text not in unwritable and len(known[key].prompt_ids) <= longest

    try:
        asked = eval_tasks(config, sources, n, recorded_set(Path(model)), fits)
    except CommandError:
        if unwritable and not known:
            raise CommandError(str(next(iter(unwritable.values())))) from None
        raise
    if isinstance(sources[0], EvalSet) and (trained_on := _set_note(Path(model), sources[0].name)):
        asked = replace(asked, not_held_out=None, note=trained_on)
    if asked.note:
        note(asked.note)
    if unwritable:
        note(f"{len(unwritable)} questions are left out: {next(iter(unwritable.values()))}")
    return asked, [known[task.ref, task.text] for task in asked.tasks]


async def _evaluate(
    config: NodeConfig,
    asked: EvalTasks,
    prompted: Sequence[PromptedTask],
    temperature: float,
    engine_name: str,
    k: int,
) -> tuple[EvalReport, list[Answered]]:
    """Sample and score a few questions at a time, so that progress is told. With a temperature
    above 0 a call's seed is the number of its first question, so that the same command gives the
    same answers.
    """
    from services.generator.engines import EngineError, SamplingParams, create_engine
    from services.generator.episodes import Episodes
    from services.generator.evaluation import said_by
    from shared.contracts.messages import transcript
    from shared.model.prompts import PromptError
    from shared.tasks.evaluation import PassRules, judged_answers, summarise
    from shared.tasks.reference_checks import try_rewards, worth_trying
    from shared.tasks.sandbox import SandboxError, ScorerPool

    tasks = asked.tasks
    started = time.monotonic()
    params = SamplingParams(temperature=temperature, max_new_tokens=config.generator.max_new_tokens)
    kind: Any = engine_name
    answers: list[Sample] = []
    results: list[JobResult] = []
    rules = PassRules(asked.sources)
    rules.merge(asked.values)
    try:
        # As a generator of `swarm up`: more wait for each other where the cores are shared.
        threads = config.model.threads or (None if os.environ.get("OMP_NUM_THREADS") else 1)
        model = config.model
        engine = create_engine(kind, model.path, revision=model.revision, device=model.device, dtype=model.dtype, threads=threads)
        note("loading the model")
        await engine.start()
    except EngineError as error:
        raise CommandError(str(error)) from None
    episodes: Episodes | None = None
    try:
        episodes = Episodes(engine, config, asked.sources)
        async with ScorerPool.from_config(config.verifier, tasks=asked.sources, workers=1) as scorers:
            note("trying the rewards")
            await try_rewards(scorers, [spec for spec in asked.sources if worth_trying(spec)], rules)
            size = max(1, _COMPLETIONS_A_CALL.get(engine.name, _MANY_COMPLETIONS) // k)
            with _progress(len(tasks)) as tell:
                for first in range(0, len(tasks), size):
                    part = tasks[first : first + size]
                    async with _watched(engine, tell, first, 0 if episodes.several_turns else k):
                        samples = await episodes.sampled(prompted[first : first + size], k, params, seed=first)
                    said = [[said_by(each) for each in of_task] for of_task in samples]
                    results += await scorers.score(list(zip(part, said, strict=True)))
                    answers += [each for of_task in samples for each in of_task]
                    tell(len(results))
    except (EngineError, PromptError, SandboxError) as error:
        raise CommandError(str(error)) from None
    finally:
        if episodes is not None:
            await episodes.close()
        await engine.close()
    scores = judged_answers(rules, [task.ref for task in tasks], results)
    asked_of = [task for task in tasks for _ in range(k)]
    answered = [
        Answered(task.ref.dataset, task.text, task.answer, transcript(each.turns, each.replies), *score, len(each.turns))
        for task, each, score in zip(asked_of, answers, scores, strict=True)
    ]
    if all(each.reward is None for each in answered):
        detail = next((result.detail for result in results if result.detail), "did not return in time, or ended its process")
        raise CommandError(f"no answer has a reward: the verifier {detail}: `swarm config check` tries it")
    summed = [(each.dataset, each.reward, each.passed) for each in answered]
    seconds = round(time.monotonic() - started, 3)
    return summarise(summed, k=k, node="eval", policy_version=0, created_at=time.time(), seconds=seconds), answered


class AtK(NamedTuple):
    """Of a dataset: pass@k, and the 95 % interval of avg@k; None if no pass is defined."""

    passed: float | None
    interval: tuple[float, float] | None


def rates_at_k(answered: Sequence[Answered], k: int) -> dict[str, AtK]:
    """What several answers to a question say, of each dataset and of all together (""). answered:
    the k answers to a question are next to each other.
    """
    from shared.tasks.evaluation import Score, pass_at_k, rate_interval, standard_error

    found: dict[str, list[list[Score]]] = {}
    for first in range(0, len(answered), k):
        scores: list[Score] = [(each.reward, each.passed) for each in answered[first : first + k] if each.reward is not None]
        for name in ("", answered[first].dataset) if scores else ():
            found.setdefault(name, []).append(scores)
    rates = {}
    for name, questions in found.items():
        passed, interval = pass_at_k(questions, k), None
        if passed is not None:
            mean = fmean(fmean(bool(each) for _, each in scores) for scores in questions)
            interval = rate_interval(mean, len(questions), standard_error(questions, passes=True) if k > 1 else 0.0)
        rates[name] = AtK(passed, interval)
    return rates


def _first_per_dataset(answered: Sequence[Answered], count: int) -> list[Answered]:
    """The first `count` answers of each dataset, ordered by the dataset's name."""
    by_dataset: dict[str, list[Answered]] = {}
    for each in answered:
        by_dataset.setdefault(each.dataset, []).append(each)
    return [each for _, some in sorted(by_dataset.items()) for each in some[:count]]


@contextlib.asynccontextmanager
async def _watched(engine: Engine, tell: Callable[[int], None], answered: int, k: int) -> AsyncIterator[None]:
    """Tell about once a second how many questions have their k answers, if the engine counts: one
    call may take minutes. answered: those of earlier calls. k 0: only the calls count, as an answer
    has several turns.
    """
    before = engine.completions_ended

    async def watch() -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            tell(answered + ((engine.completions_ended - before) // k if k else 0))

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        await cancel_and_wait(watching)


@contextlib.contextmanager
def _progress(questions: int) -> Iterator[Callable[[int], None]]:
    """Give a function that tells how many questions are answered: by a bar in a terminal, else by a
    line every `_TOLD_EVERY_S` seconds.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("questions", total=questions)
            yield lambda done: progress.update(bar, completed=done)
        return
    began = told = time.monotonic()
    all_told = False

    def tell(done: int) -> None:
        nonlocal told, all_told
        now = time.monotonic()
        if now - told >= _TOLD_EVERY_S or (done == questions and not all_told):
            told, all_told = now, done == questions
            left = f", about {(now - began) / done * (questions - done):.0f} s left" if 0 < done < questions else ""
            note(f"{done} of {count(questions, 'question')} answered after {now - began:.0f} s{left}")

    yield tell


def _as_object(report: EvalReport, several: Mapping[str, AtK]) -> dict[str, Any]:
    def figures(score: EvalReport | TaskScore, at_k: AtK) -> dict[str, Any]:
        rates = {"pass_rate": score.pass_rate, "interval": at_k.interval, "pass_at_k": at_k.passed}
        return {"n": score.n, **rates, "mean_reward": score.mean_reward}

    scores = {name: figures(score, several[name]) for name, score in report.per_task.items()}
    overall = {**figures(report, several[""]), "unknown": report.unknown}
    return {**overall, "seconds": report.seconds, "per_task": scores}


def _rate(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:.3f}"


def _show(title: str, report: EvalReport, shown: Sequence[Answered], several: Mapping[str, AtK], k: int, names: FileNames) -> None:
    rates = ("pass rate", "95 % interval") if k == 1 else (f"avg@{k}", "95 % interval", f"pass@{k}")
    asked = "tasks" if k == 1 else "answers"
    table = Table("dataset", asked, *rates, "mean reward", title=title, title_justify="left")
    overall = TaskScore(n=report.n, pass_rate=report.pass_rate, mean_reward=report.mean_reward)
    for name, score in [*report.per_task.items(), ("all", overall)]:
        at_k = several["" if name == "all" else name]
        span = "–" if at_k.interval is None else "{:.3f} to {:.3f}".format(*at_k.interval)
        shown_rates = [_rate(score.pass_rate), span, _rate(at_k.passed)][: len(rates)]
        table.add_row(names.shown(name), str(score.n), *shown_rates, f"{score.mean_reward:.3f}")
    show_table(table)
    if report.pass_rate is None:
        note(NO_PASS_SHOWN)
    if report.unknown:
        note(f"{count(report.unknown, 'answer')} left out: the reward is unknown (`swarm config check` tries the verifier)")
    if shown:
        answers = Table("dataset", "question", "reference", "answer", "reward", show_lines=True)
        for each in shown:
            # Text of unknown origin is shown as plain text: no markup, no control characters.
            texts = (names.shown(each.dataset), each.question, each.reference or "", each.answer)
            cells = [visible(text, _LONGEST_CELL) for text in texts]
            answers.add_row(*map(Text, cells), "unknown" if each.reward is None else f"{each.reward:g}")
        show_table(answers)


def _set_note(model: Path, name: str) -> str:
    """Why the node that trained `model` may have trained on questions of a set; empty if it did
    not, or if that is no node's folder.
    """
    if (folder := _node_folder(model)) is None:
        return ""
    lines = [line for line in eval_lines(folder / EVAL_SETS_FILE) if line.get("set") == name]
    return added_words(lines[-1]) if lines else "the node's record has no such set, so it may have trained on its questions"


def _node_folder(model: Path) -> Path | None:
    """The node's folder in a run, if `model` is one or one of its checkpoints."""
    node = model.parent.parent if (model / "manifest.json").is_file() else model
    return node if (node / CHECKPOINTS).is_dir() else None


MOST_TASKS = 100_000
Fits = Callable[[Task], bool]
"""Whether a task's prompt leaves room for an answer."""


@dataclass(frozen=True, slots=True)
class RecordedSet:
    """A node's held-out set as its newest evaluation names it, which asked `n` tasks. held_out: its
    id; None in records of earlier versions. changed: an earlier evaluation asked other tasks.
    scorer, values: the scorers and the distinct rewards that they have given.
    """

    n: int
    held_out: str | None
    changed: bool
    scorer: str | None = None
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvalTasks:
    """sources: with their files read. not_held_out: how many of the tasks may have been trained on;
    None: not known. note: a sentence about that; empty if all are held out. values: the distinct
    rewards that the node's scorers gave, on which its rule of what passes may depend.
    """

    sources: list[TaskSpec]
    tasks: list[Task]
    not_held_out: int | None
    note: str
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)


def recorded_set(model: Path) -> RecordedSet | None:
    """The set of the newest evaluation, if `model` is a node's folder in a run, or one of its
    checkpoints, and the node has been evaluated.
    """
    folder = _node_folder(model)
    lines = eval_lines(folder / EVAL_FILE) if folder is not None else []
    reports = [report for line in lines if (report := eval_report("node", line)) and 0 < report.n + report.unknown <= MOST_TASKS]
    if not reports:
        return None
    # Before evaluations named their scorers, the id was of the questions and their verifiers.
    sets = [(report.n + report.unknown, report.held_out if report.scorer else None) for report in reports]
    newest = reports[-1]
    return RecordedSet(*sets[-1], changed=len(set(sets)) > 1, scorer=newest.scorer, values=newest.reward_values)


def eval_tasks(
    config: NodeConfig, sources: Sequence[TaskSpec], n: int | None, recorded: RecordedSet | None, fits: Fits
) -> EvalTasks:
    """The held-out tasks of `sources` that fit the model: `n` of them, or as many as are held out,
    by the node whose record is given, else by `eval.tasks`.

    Raises:
        CommandError: a source cannot be used, nothing is held out and `n` is None, or no task fits.
    """
    from shared.tasks import HeldOut, check_specs
    from shared.tasks.held_out import set_tasks

    of_set = sources[0] if len(sources) == 1 and isinstance(sources[0], EvalSet) else None
    held: HeldOut | None
    with _task_errors():
        read = check_specs(sources)
        if of_set is not None:
            size, held = of_set.questions, HeldOut(())
        elif recorded:
            found = _run_held_out(config, sources, recorded, fits)
            size, held = found or (recorded.n, None)
        else:
            size, held = config.eval.tasks, HeldOut(_tasks(read, config.eval.tasks, config))
        if not (count := n or size):
            raise CommandError("eval.tasks is 0, so no task is held out: say with --n how many to ask")
        of_read = [each.model_copy(update={"questions": count}) for each in read if isinstance(each, EvalSet)]
        drawn = set_tasks(of_read[0]) if of_read else _tasks(read, count, config)
    tasks = [task for task in drawn if fits(task)]
    if not tasks:
        raise CommandError(
            f"none of the {len(drawn)} tasks leaves room for an answer of generator.max_new_tokens "
            f"{config.generator.max_new_tokens}: lower that, or choose tasks with shorter questions"
        )
    if of_set is not None:
        return EvalTasks(read, tasks, 0, "")
    beyond = None if held is None else sum(not held.contains(task) for task in tasks)
    told = _note(beyond, len(tasks), len(held.tasks) if held else 0, recorded)
    if recorded is None or sources is not config.tasks:
        return EvalTasks(read, tasks, beyond, told)
    if recorded.scorer not in (None, scorers_id(read)):
        changed = "the node's newest evaluation was scored with another reward: do not compare this score with it"
        return EvalTasks(read, tasks, beyond, "; ".join(filter(None, [told, changed])))
    return EvalTasks(read, tasks, beyond, told, recorded.values)


def _run_held_out(config: NodeConfig, sources: Sequence[TaskSpec], recorded: RecordedSet, fits: Fits) -> tuple[int, HeldOut] | None:
    """The set that the node's record names, with the number of tasks that gives it, if the
    configuration's sources, or those asked for, give it with `eval.tasks` or the recorded number.
    Its id is that of the tasks that fit. None: they do not, or the node did not always have it.
    """
    from shared.tasks import HeldOut, TaskConfigError, check_specs
    from shared.tasks.held_out import held_out_id

    if recorded.changed:
        return None
    for specs in (config.tasks, sources) if config.tasks != sources else (sources,):
        with contextlib.suppress(TaskConfigError):  # such as a file that is not there any more
            read = check_specs(specs)
            for size in dict.fromkeys((config.eval.tasks, recorded.n)):
                tasks = _tasks(read, size, config)
                fitting = [task for task in tasks if fits(task)]
                if recorded.held_out in (None, held_out_id(fitting)) and len(fitting) == recorded.n:
                    return size, HeldOut(tasks)
    return None


def _note(beyond: int | None, asked: int, held: int, recorded: RecordedSet | None) -> str:
    """Whose set it is not, as the remedies differ; `held` tasks are in that set."""
    if beyond is None and recorded and recorded.changed:
        return "the node's held-out set changed during its run, so it may have trained on some of these tasks"
    if beyond is None:
        return (
            "the node's record names another held-out set, so it may have trained on some of these tasks: give the configuration "
            "that it ran with (--config, and its environment variables), without --tasks"
        )
    if not beyond:
        return ""
    them = "it" if beyond == 1 else "them"
    those = f"{beyond} of these {asked} tasks {'is' if beyond == 1 else 'are'} not among the {held} that"
    if recorded:
        return f"{those} the node held out: it may have trained on {them}"
    return f"{those} eval.tasks holds out: a node with this configuration may train on {them}"


def _tasks(specs: Sequence[TaskSpec], n: int, config: NodeConfig) -> list[Task]:
    from shared.tasks import held_out_tasks

    return held_out_tasks(specs, n, draw=config.eval.draw)


@contextlib.contextmanager
def _task_errors() -> Iterator[None]:
    """Some datasets print while they derive a task (`bf` does). Standard output is for the
    report.
    """
    from shared.tasks import TaskConfigError

    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except TaskConfigError as error:
        raise CommandError(str(error)) from None
