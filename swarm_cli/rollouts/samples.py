"""How a node's held-out answers change from policy version to policy version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shared.text import cut_text, visible
from swarm_cli.console import count, indented, show_table
from swarm_cli.errors import CommandError
from swarm_cli.file_names import UNNAMED, FileNames
from swarm_cli.rollouts.records import HeldOutSample, Samples
from swarm_cli.rollouts.rewards import marks

Question = tuple[str, int, int]
"""Dataset, seed, index."""


def by_question(
    evaluations: Sequence[Samples], task: str, where: str, names: FileNames = UNNAMED
) -> dict[Question, list[tuple[int, HeldOutSample]]]:
    """The answers to each question of a dataset, with their policy versions, in order. where: the
    evaluations' source, for the error.

    Raises:
        CommandError: there are none.
    """
    meant = names.meant(task)
    found: dict[Question, list[tuple[int, HeldOutSample]]] = {}
    for evaluation in evaluations:
        for sample in evaluation.samples:
            if sample.dataset in meant:
                question = (sample.dataset, sample.seed, sample.index)
                found.setdefault(question, []).append((evaluation.policy_version, sample))
    if found:
        return found
    known = sorted({sample.dataset for evaluation in evaluations for sample in evaluation.samples})
    if not known:
        raise CommandError(f"{where} holds no held-out answers: wait for the first evaluation, or name another run with --run")
    raise CommandError(f"{where} holds no held-out answers of {task[:80]!r}: choose among {', '.join(map(names.shown, known))}")


def spread(answers: Sequence[tuple[int, HeldOutSample]], most: int) -> list[tuple[int, HeldOutSample]]:
    """At most `most` answers, evenly spread, including the first and the last. Pure."""
    if len(answers) <= most:
        return list(answers)
    if most == 1:
        return [answers[-1]]
    return [answers[round(place * (len(answers) - 1) / (most - 1))] for place in range(most)]


def show_question(
    answers: Sequence[tuple[int, HeldOutSample]], most: int, console: Console, characters: int, names: FileNames = UNNAMED
) -> None:
    """Print one question and its answers, version by version."""
    _, first = answers[0]
    console.print(Text(visible(f"held out · {names.shown(first.dataset)} seed {first.seed} index {first.index}"), style="bold"))
    console.print(Text("question:  " + indented(cut_text(first.question, characters))))
    if first.reference is not None:
        console.print(Text("reference: " + indented(cut_text(first.reference, characters))))
    table = Table("version", "reward", "tokens", "ended by", "answer", show_lines=True)
    shown = spread(answers, most)
    for version, sample in shown:
        reward = "" if sample.reward is None else f"{sample.reward:.3g} "
        cells = (
            str(version),
            f"{reward}({marks(sample.reward, sample.passed)})",
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


def sample_object(version: int, sample: HeldOutSample) -> dict[str, Any]:
    """One answer as JSON."""
    return {"policy_version": version, **msgspec.to_builtins(sample)}
