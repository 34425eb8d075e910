"""Groups and held-out answers as text for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shared.contracts.messages import Batch, BatchItem, Completion, ScoredGroup
from shared.rewards import differ
from shared.text import cut_text, visible
from swarm_cli.console import count, indented, question_line, show_table
from swarm_cli.errors import CommandError
from swarm_cli.file_names import UNNAMED, FileNames, with_digits
from swarm_cli.observe.run_files import thinned
from swarm_cli.rollouts.judge import Choice, Judge, ScoredAgain, marks, passes
from swarm_cli.rollouts.records import BatchedGroup, HeldOutSample, Samples, TrainingOutcome


@dataclass(frozen=True, slots=True)
class View:
    """The console, the judge that explains rewards, and the length at which texts are cut."""

    console: Console
    judge: Judge
    characters: int


def show(found: BatchedGroup, fate: TrainingOutcome, choice: Choice, view: View) -> None:
    """Print the question, the reference answer, how the trainer used the group, and its completions
    with their rewards.
    """
    console, item = view.console, found.item
    task = item.scored.group.task
    console.print(Text(visible(_heading(found, view.judge)), style="bold"))
    console.print(Text(visible(f"trainer:   {fate.sentence()}")))
    console.print(Text(question_line(cut_text(task.text, view.characters))))
    if task.answer is not None:
        console.print(Text("reference: " + indented(cut_text(task.answer, view.characters))))
    answers = choice.completions(item)
    console.print(Text("judged by: " + visible(view.judge.rules(item.scored))))
    if not answers:
        cause = item.scored.failure or "it has no rewards"
        console.print(Text(visible(f"not scored: {cause}")))
        return
    table = Table("#", "reward", "completion", show_lines=True)
    for place, completion, reward in answers:
        facts = "\n".join(f"{name}: {value}" for name, value in _facts(found, fate, view, place, completion, reward))
        table.add_row(str(place), Text(facts), Text(cut_text(found.item.scored.shown(place), view.characters)))
    show_table(table, console)
    if left := left_words(item.scored):
        console.print(Text(visible(left)))


def show_again(found: BatchedGroup, again: ScoredAgain, choice: Choice, view: View) -> None:
    """Print the question, the reference answer, and its completions with their rewards before and
    now.
    """
    console, task = view.console, found.item.scored.group.task
    console.print(Text(visible(_heading(found, view.judge)), style="bold"))
    console.print(Text(question_line(cut_text(task.text, view.characters))))
    if task.answer is not None:
        console.print(Text("reference: " + indented(cut_text(task.answer, view.characters))))
    if again.rewards and again.reference is not None and again.reference != task.answer:
        console.print(Text("now:       " + indented(cut_text(again.reference, view.characters))))
    console.print(Text("judged by: " + visible(view.judge.rules(found.item.scored))))
    if again.problem:
        console.print(Text(visible(f"{'one answer' if again.rewards else 'not scored'}: {again.problem}")))
    table = Table("#", "before", "now", "completion", show_lines=True)
    for place, _, reward in choice.completions(found.item):
        now = again.rewards[place] if again.rewards else None
        told = f"{now:.3g}" if now is not None else f"unknown ({again.causes[place]})" if again.rewards else "not scored"
        table.add_row(str(place), f"{reward:.3g}", told, Text(cut_text(found.item.scored.shown(place), view.characters)))
    show_table(table, console)


def again_words(pairs: Sequence[tuple[float, float | None]]) -> str:
    """Sum up rewards before and now, None where they are unknown."""
    known = [(before, now) for before, now in pairs if now is not None]
    unknown = f"; {count(len(pairs) - len(known), 'answer')} of {len(pairs):,} not known now" if len(known) < len(pairs) else ""
    if not known:
        return f"no answer has a reward now{unknown}"
    before, now = (sum(rewards) / len(known) for rewards in zip(*known, strict=True))
    changed = [now > before for before, now in known if differ(before, now)]
    moved = f" ({sum(changed):,} higher, {len(changed) - sum(changed):,} lower)" if changed else ""
    means = f"mean reward of {count(len(known), 'answer')}: {before:.3g} before, {now:.3g} now"
    return f"{means}; {len(changed):,} changed{moved}{unknown}"


def as_object(found: BatchedGroup, fate: TrainingOutcome, choice: Choice, judge: Judge) -> dict[str, Any]:
    """The group as JSON, texts in full."""
    batch, item, scored = found.batch, found.item, found.item.scored
    group, step, trained = scored.group, fate.step, fate.group
    training = None
    if step is not None and trained is not None:
        training = {
            "step": step.step,
            "time": step.time,
            "updated": step.updated,
            "updates": step.updates,
            "fate": trained.fate,
            "factor": trained.factor,
            "bounded": trained.bounded,
        }
    return {
        "step": batch.number,
        "group_id": scored.group_id,
        "origin": "local" if scored.origin == "local" else "foreign",
        "sender": group.node,
        "dataset": group.task.ref.dataset,
        "file": judge.file(scored) or None,
        "config": json.loads(group.task.ref.config),
        "seed": group.task.ref.seed,
        "index": group.task.ref.index,
        "question": group.task.text,
        "reference": group.task.answer,
        "model": group.model.name,
        "policy_version": group.policy_version,
        "staleness": item.staleness,
        "age_s": round(item.age_s, 3),
        "strategy": batch.strategy,
        "draw_weight": item.weight,
        "replayed": item.replayed,
        "candidate": batch.places is not None and scored.origin != "local",
        "why": why(batch, item),
        "training": training,
        "failure": scored.failure,
        "unknown": scored.unknown,
        "completions": [
            {
                "place": place,
                "reward": reward,
                "passed": passes(scored, place),
                "parts": {name: values[place] for name, values in scored.parts.items()},
                "judged": asdict(judge.of(scored, place, completion.turns[-1], reward)),
                "tokens": completion.token_count,
                "finish_reason": completion.finish_reason,
                "training": msgspec.to_builtins(used) if trained is not None and (used := trained.answer(place)) else None,
                "text": scored.shown(place),
                "turns": len(completion.turns),
            }
            for place, completion, reward in choice.completions(item)
        ],
    }


def _facts(
    found: BatchedGroup, fate: TrainingOutcome, view: View, place: int, completion: Completion, reward: float
) -> list[tuple[str, str]]:
    judged = view.judge.of(found.item.scored, place, completion.turns[-1], reward)
    facts = [("reward", judged.marks if judged.replaced else f"{reward:.3g} ({judged.marks})")]
    facts += part_words({name: values[place] for name, values in found.item.scored.parts.items()})
    facts.append(("judged", "the whole text" if judged.read_as is None else visible(judged.read_as, 60)))
    facts.append(("ended by", f"{completion.finish_reason} ({completion.token_count} tokens)"))
    return [*facts, *_training(fate, place)]


def part_words(parts: Mapping[str, float | None]) -> list[tuple[str, str]]:
    """Each of several rewards by name, with the value that it gave an answer."""
    return [(visible(name, 60), "does not apply" if value is None else f"{value:.3g}") for name, value in parts.items()]


def _training(fate: TrainingOutcome, place: int) -> list[tuple[str, str]]:
    """Facts about a step's use of one answer; empty if nothing is on record."""
    used = fate.group.answer(place) if fate.group is not None else None
    if used is None:
        return []
    advantage = "?" if used.advantage is None else f"{used.advantage:+.3g}"
    if used.left_out is not None:
        return [("advantage", f"{advantage}, left out: {used.left_out}")]
    facts = [("advantage", advantage)]
    if used.kept is not None:
        weight = "by the objective" if used.weight is None else f"{used.weight:.3g}"
        cut = [f"{used.truncated} cut"] if used.truncated else []
        cut += [f"{used.tokens - used.kept} dropped"] if used.tokens is not None and used.tokens > used.kept else []
        cut += [f"{used.clipped:g} clipped"] if used.clipped else []
        facts.append(("weight", f"{weight} ({', '.join(cut)} of {used.tokens} tokens)" if cut else weight))
    return facts


def _heading(found: BatchedGroup, judge: Judge) -> str:
    batch, item, scored = found.batch, found.item, found.item.scored
    ref = scored.group.task.ref
    whose = "local" if scored.origin == "local" else f"foreign, from {scored.group.node}"
    dataset = with_digits(judge.file(scored), ref.dataset)
    return (
        f"step {batch.number} · {whose} · {dataset} seed {ref.seed} index {ref.index} · "
        f"policy version {scored.group.policy_version} · {_lag(item)} · {why(batch, item)} · group {scored.group_id[:16]}"
    )


def left_words(scored: ScoredGroup) -> str:
    """Say how many answers left the group because their reward is unknown, and for which causes;
    empty if none did. A group without any known reward keeps its answers.
    """
    if not scored.unknown or not scored.rewards:
        return ""
    causes = ", ".join(f"{cause} {answers:,}" for cause, answers in scored.unknown.items())
    return f"{sum(scored.unknown.values()):,} more left the group: {causes}"


def why(batch: Batch, item: BatchItem) -> str:
    """Why this group is in the batch, as far as the batch says."""
    if item.replayed:
        return "replayed"
    if item.pass_rate is not None:
        return f"a demonstration: a reward counts as far as it is above the local pass rate, {item.pass_rate:.2f}"
    if item.scored.origin == "local":
        return "the next group of this node"
    drawn = f"drawn by {batch.strategy}"
    if item.weight is not None:
        drawn += f" with {item.weight:.2f} of the mean weight"
    drawn += f" from {batch.pool_external} in the pool"
    if batch.places is not None:
        drawn += f"; a candidate for {count(batch.places.keep, 'place')}"
    return drawn


def _lag(item: BatchItem) -> str:
    if item.staleness is None:
        return f"{item.age_s:.0f} s old"
    return f"staleness {item.staleness}"


def by_question(
    evaluations: Sequence[Samples], task: str, where: str, names: FileNames = UNNAMED
) -> dict[tuple[str, int, int], list[tuple[int, HeldOutSample]]]:
    """The answers to each question of a dataset, with their policy versions, in order. where: the
    evaluations' source, for the error.

    Raises:
        CommandError: there are none.
    """
    meant = names.meant(task)
    found: dict[tuple[str, int, int], list[tuple[int, HeldOutSample]]] = {}
    for evaluation in evaluations:
        for sample in evaluation.samples:
            if sample.dataset in meant:
                found.setdefault(sample.key, []).append((evaluation.policy_version, sample))
    if found:
        return found
    known = sorted({sample.dataset for evaluation in evaluations for sample in evaluation.samples})
    if not known:
        raise CommandError(f"{where} holds no held-out answers: wait for the first evaluation, or name another run with --run")
    raise CommandError(f"{where} holds no held-out answers of {task[:80]!r}: choose among {', '.join(map(names.shown, known))}")


def show_question(
    answers: Sequence[tuple[int, HeldOutSample]], most: int, console: Console, characters: int, names: FileNames = UNNAMED
) -> None:
    """Print one question and its answers, version by version."""
    _, first = answers[0]
    console.print(Text(visible(f"held out · {names.shown(first.dataset)} seed {first.seed} index {first.index}"), style="bold"))
    console.print(Text(question_line(cut_text(first.question, characters))))
    if first.reference is not None:
        console.print(Text("reference: " + indented(cut_text(first.reference, characters))))
    table = Table("version", "reward", "tokens", "ended by", "answer", show_lines=True)
    shown = thinned(answers, most)
    for version, sample in shown:
        reward = "" if sample.reward is None else f"{sample.reward:.3g} "
        parts = "".join(f"\n{name}: {value}" for name, value in part_words(sample.parts))
        cells = (
            str(version),
            f"{reward}({marks(sample.reward, sample.passed, sample.parts)}){parts}",
            str(sample.tokens),
            visible(sample.finish_reason),
        )
        table.add_row(*cells, Text(cut_text(sample.text, characters)))
    show_table(table, console)
    if len(answers) > len(shown):
        left = count(len(answers) - len(shown), "version")
        where = "in between " if most > 1 else "before "
        verb = "is" if left.startswith("1 ") else "are"
        console.print(Text(f"{left} {where}{verb} left out: --limit {len(answers)} shows all"))
