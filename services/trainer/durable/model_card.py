"""Writes the README.md of an exported policy, from its checkpoint and, if available, the logs of
its run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.trainer.durable.checkpoint import Checkpoint, TrainedModel
from shared.json_lines import read_jsonl
from shared.run_records import EVAL_FILE, METRICS_FILE
from shared.text import visible
from shared.version import VERSION

CARD = "README.md"


def write_card(folder: Path, checkpoint: Checkpoint, *, dtype: str, adapter: bool) -> None:
    """Write the card of the exported policy into `folder`. The node's logs are beside its
    checkpoints.
    """
    node_folder = checkpoint.folder.parent.parent
    step = checkpoint.position.batch_number
    text = model_card(
        checkpoint.model,
        step,
        evaluations=read_jsonl(node_folder / EVAL_FILE),
        steps=[line for line in read_jsonl(node_folder / METRICS_FILE) if _number(line, "step") <= step],
        origin=f"{node_folder.parent.name}, node {node_folder.name}",
        dtype=dtype,
        adapter=adapter,
    )
    (folder / CARD).write_text(text, encoding="utf-8")


def model_card(
    model: TrainedModel,
    step: int,
    *,
    evaluations: Sequence[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
    origin: str,
    dtype: str,
    adapter: bool,
) -> str:
    """The card in Hugging Face's format. If the base is a folder, the card contains only the
    folder's name, because the path is specific to this machine.
    """
    from_hub = bool(model.model_revision)
    base = model.model_path if from_hub else Path(model.model_path).name
    name = f"{base} at commit {model.model_revision}" if from_hub else f"the folder `{visible(base)}`"
    kind = "LoRA adapters" if adapter else "whole weights, adapters merged" if model.lora_rank else "whole weights"
    header = ["---", f"library_name: {'peft' if adapter else 'transformers'}"]
    header += [f"base_model: {base}"] if from_hub else []
    header += ["pipeline_tag: text-generation", "tags: [reinforcement-learning, swarm]", "---", ""]
    facts = [
        f"# {visible(base)}, {step} steps of reinforcement learning",
        "",
        "| | |",
        "|---|---|",
        f"| base model | {name} |",
        f"| what this is | {kind}, {dtype} |",
        f"| run | {visible(origin)} |",
        f"| steps | {step} |",
        *_groups(steps),
        f"| made by | Swarm {VERSION}: `swarm model export` |",
    ]
    return "\n".join([*header, *facts, *_scores(evaluations, step), ""])


def _groups(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Number of local and foreign groups that it was trained on."""
    if not steps:
        return []
    local, foreign = (int(sum(_number(line, key) for line in steps)) for key in ("groups_local", "groups_external"))
    return [f"| trained on | {local:,} groups of answers of its own, {foreign:,} of other nodes |"]


def _scores(evaluations: Sequence[Mapping[str, Any]], step: int) -> list[str]:
    """Held-out pass rates by task, of the base policy and of the last evaluated version up to this
    one.
    """
    known = {int(_number(line, "policy_version")): line for line in evaluations if _number(line, "policy_version") <= step}
    if not known:
        return ["", "No held-out evaluation of this policy is in the run's folder."]
    first, last = known[min(known)], known[max(known)]
    begin, end = min(known), max(known)
    by_reward = last.get("pass_rate") is None
    key, title = ("mean_reward", "Mean reward (no pass is defined)") if by_reward else ("pass_rate", "Pass rate")
    lines = [
        "",
        f"## {title} on {int(_number(last, 'n'))} held-out questions, never trained on",
        "",
        f"| task | version {begin}{' (base)' if begin == 0 else ''} | version {end}{' (this)' if end == step else ''} |",
        "|---|---|---|",
        f"| all | {_number(first, key):.3f} | {_number(last, key):.3f} |",
    ]
    for task, score in sorted(dict(last.get("per_task") or {}).items()):
        before = dict(first.get("per_task") or {}).get(task) or {}
        lines.append(f"| {visible(task, 64)} | {_number(before, key):.3f} | {_number(score, key):.3f} |")
    return lines


def _number(line: Mapping[str, Any], key: str) -> float:
    """A number from a line of a log; -1 if it has none."""
    value = line.get(key)
    return float(value) if isinstance(value, int | float) else -1.0
