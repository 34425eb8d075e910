"""Prints the groups that a node's verifier refused last."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from shared.text import cut_text, visible
from swarm_cli.console import indented
from swarm_cli.file_names import UNNAMED, FileNames
from swarm_cli.rollouts.fates import clock
from swarm_cli.rollouts.records import Refusal


def asked_for(
    refusals: Iterable[Refusal], *, sender: str | None, datasets: Collection[str] | None, group: str, limit: int
) -> list[Refusal]:
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


def show_refusal(refusal: Refusal, console: Console, characters: int, names: FileNames = UNNAMED) -> None:
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
    console.print(Text("question:  " + indented(cut_text(group.question, characters))))
    for place, answer in enumerate(group.answers):
        console.print(Text(f"answer {place}:  " + indented(cut_text(answer, characters))))
    if group.completions > len(group.answers):
        console.print(Text(f"           ({group.completions - len(group.answers)} more, not kept)"))


def refusal_object(refusal: Refusal) -> dict[str, Any]:
    """The refusal as JSON."""
    found: dict[str, Any] = msgspec.to_builtins(refusal)
    return found
