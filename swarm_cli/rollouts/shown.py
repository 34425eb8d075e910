"""A group of a batch as a person reads it, and as a program does."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shared.contracts.messages import BatchItem
from shared.text import visible, visible_lines
from swarm_cli.console import indented
from swarm_cli.rollouts.batches import BatchedGroup
from swarm_cli.rollouts.choice import Choice


def show(found: BatchedGroup, choice: Choice, console: Console, characters: int) -> None:
    """Question, reference answer, and the completions below each other with what each earned. Texts
    are cut after so many characters.
    """
    item = found.item
    task = item.scored.group.task
    console.print(Text(visible(_heading(found)), style="bold"))
    console.print(Text("question:  " + indented(_text(task.question, characters))))
    if task.answer is not None:
        console.print(Text("reference: " + indented(_text(task.answer, characters))))
    table = Table("#", "reward", "tokens", "ended by", "completion", show_lines=True)
    for place, completion, reward in choice.completions(item):
        table.add_row(
            str(place),
            f"{reward:.3g}",
            str(completion.token_count),
            completion.finish_reason,
            Text(_text(completion.text, characters)),
        )
    console.print(table)


def as_object(found: BatchedGroup, choice: Choice) -> dict[str, Any]:
    """The group as JSON, texts in full."""
    batch, item, scored = found.batch, found.item, found.item.scored
    group = scored.group
    return {
        "step": batch.number,
        "group_id": scored.group_id,
        "origin": "local" if scored.origin == "local" else "foreign",
        "sender": group.node,
        "dataset": group.task.ref.dataset,
        "config": json.loads(group.task.ref.config),
        "seed": group.task.ref.seed,
        "index": group.task.ref.index,
        "question": group.task.question,
        "reference": group.task.answer,
        "model": group.model.name,
        "policy_version": group.policy_version,
        "staleness": item.staleness,
        "age_s": round(item.age_s, 3),
        "strategy": batch.strategy,
        "draw_weight": item.weight,
        "replayed": item.replayed,
        "candidate": batch.preference is not None and scored.origin != "local",
        "completions": [
            {
                "place": place,
                "reward": reward,
                "tokens": completion.token_count,
                "finish_reason": completion.finish_reason,
                "text": completion.text,
            }
            for place, completion, reward in choice.completions(item)
        ],
    }


def _heading(found: BatchedGroup) -> str:
    batch, item, scored = found.batch, found.item, found.item.scored
    ref = scored.group.task.ref
    whose = "local" if scored.origin == "local" else f"foreign, from {scored.group.node}"
    return (
        f"step {batch.number} · {whose} · {ref.dataset} seed {ref.seed} index {ref.index} · "
        f"policy version {scored.group.policy_version} · {_lag(item)} · {_why(found)} · group {scored.group_id[:12]}"
    )


def _why(found: BatchedGroup) -> str:
    """Why this group is in the batch, as far as the batch says."""
    batch, item = found.batch, found.item
    if item.replayed:
        return "replayed"
    if item.scored.origin == "local":
        return "the next of this node"
    drawn = f"drawn by {batch.strategy}"
    if item.weight is not None:
        drawn += f" with {item.weight:.2f} of the mean weight"
    if batch.preference is not None:
        drawn += ", a candidate: the trainer keeps some by its policy"
    return drawn


def _lag(item: BatchItem) -> str:
    if item.staleness is None:
        return f"{item.age_s:.0f} s old"
    return f"staleness {item.staleness}"


def _text(text: str, characters: int) -> str:
    cut = text if len(text) <= characters else text[:characters] + f"… ({len(text) - characters:,} more characters)"
    return visible_lines(cut)
