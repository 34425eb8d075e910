"""`swarm rollouts --refused`: the groups that a node's verifier refused last, and why
(`services.verifier.refused_messages` writes them).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from shared.run_records import RefusedGroup, refused_files
from shared.text import cut_text, visible, visible_json
from swarm_cli.console import indented, question_line, terminal
from swarm_cli.file_names import UNNAMED, FileNames
from swarm_cli.rollouts.judge import Choice
from swarm_cli.rollouts.records import clock, decoded, lines_of


def read_refusals(folder: Path | None) -> list[RefusedGroup]:
    """The last refusals of all replicas of a node's verifier, oldest first."""
    lines = [line for path in (refused_files(folder) if folder is not None else []) for line in lines_of(path)]
    found = [refusal for line in lines if (refusal := decoded(line, RefusedGroup)) is not None]
    return sorted(found, key=lambda refusal: refusal.time)


def chosen(
    refusals: Iterable[RefusedGroup], *, sender: str | None, datasets: Collection[str] | None, group: str, limit: int
) -> list[RefusedGroup]:
    """The newest matching refusals, oldest first. A refusal without the group's text matches no
    dataset.
    """
    found = [
        each
        for each in refusals
        if sender in (None, each.sender)
        and (datasets is None or (each.group is not None and each.group.dataset in datasets))
        and (each.id or each.claimed_id).startswith(group)
    ]
    return found[-limit:]


def show_refusal(refusal: RefusedGroup, console: Console, characters: int, names: FileNames = UNNAMED) -> None:
    """Print why a group was refused and, if it could be read, how it begins."""
    group = refusal.group
    of = (
        f" · {names.shown(group.dataset)} seed {group.seed} index {group.index} · policy version {group.policy_version}"
        if group
        else ""
    )
    named = f"group {refusal.id[:16]}" if refusal.id else f"claims to be group {refusal.claimed_id or '?'}"
    heading = f"{clock(refusal.time)} · from {refusal.sender or 'an unknown sender'}{of} · {named} · message {refusal.swarm_seq}"
    console.print(Text(visible(heading), style="bold"))
    console.print(Text("refused:   " + visible(f"{refusal.reason}: {refusal.detail}" if refusal.detail else refusal.reason)))
    if group is None:
        why = "refused before anything in it was decoded" if not refusal.id else "refused before its text was decoded"
        console.print(Text(f"text:      not kept, {why}"))
        return
    console.print(Text(question_line(cut_text(group.question, characters))))
    for place, answer in enumerate(group.answers):
        console.print(Text(f"answer {place}:  " + indented(cut_text(answer, characters))))
    if group.completions > len(group.answers):
        console.print(Text(f"           ({group.completions - len(group.answers)} more, not kept)"))


def show_refused(folder: Path | None, choice: Choice, limit: int, characters: int, names: FileNames, *, as_json: bool) -> bool:
    """Print the chosen refusals on record in `folder`. Returns whether there is one."""
    found = chosen(read_refusals(folder), sender=choice.sender, datasets=choice.datasets, group=choice.group, limit=limit)
    for refused in found:
        if as_json:
            typer.echo(visible_json(msgspec.to_builtins(refused)))
        else:
            show_refusal(refused, terminal(), characters, names)
    return bool(found)
