"""The driver `services` without its processes: checks which specs it can run, and makes records
from the nodes' files.

A real node's trainer and generator write `metrics.jsonl` and `eval.jsonl`. These lack what a
simulation records in addition (every fresh answer, refusals by reason). `local_reward` is therefore
the reward of the local groups in the batch, which are all local groups of a node without a filter.
Replayed groups (`sampler.replay`) are counted in the earlier batch that they were generated for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.arms import PlannedRun
from lab.records import RecordWriter
from lab.spec import SpecError
from shared.run_records import EVAL_FILE, METRICS_FILE

_COPIED = (
    *("updated", "loss", "grad_norm", "entropy", "clip_fraction", "importance_weight", "truncated_fraction"),
    *("kl_behaviour", "kl_reference", "groups_local", "groups_external", "tokens"),
)


def check_services_run(run: PlannedRun) -> None:
    """Refuse specs that only a simulation can run.

    Raises: SpecError: naming what only a simulation can run.
    """
    if run.delay_rounds != (0, 0):
        raise SpecError(f"arm {run.arm}: only the driver simulate supports delay_rounds: remove it, or use that driver")
    for node in run.nodes:
        if node.role != "honest" or node.local != type(node.local)():
            raise SpecError(
                f"arm {run.arm}: node {node.name} has role {node.role} or a [local] rule, which only the driver simulate has "
                "(to train on earlier local groups set sampler.replay instead of local.reuse)"
            )
        if node.config.eval.every_versions != run.nodes[0].config.eval.every_versions:
            raise SpecError(f"arm {run.arm}: the nodes' eval.every_versions differ: give all nodes the same value")


def collect(run: PlannedRun, run_dir: Path, records: RecordWriter) -> None:
    """Write the records of a run whose nodes' folders are in `run_dir`.

    Raises:
        ValueError: a node has not done all its steps.
    """
    for node in run.nodes:
        completions = node.config.generator.completions
        for line in _lines(run_dir / node.name / EVAL_FILE):
            records.write(
                "eval",
                round=line["policy_version"],
                node=node.name,
                n=line["n"],
                pass_rate=line["pass_rate"],
                mean_reward=line["mean_reward"],
                tasks={name: [each["n"], each["pass_rate"], each["mean_reward"]] for name, each in line["per_task"].items()},
            )
        steps = {int(line["step"]): line for line in _lines(run_dir / node.name / METRICS_FILE)}
        missing = [number for number in range(1, run.rounds + 1) if number not in steps]
        if missing:
            raise ValueError(f"{run_dir / node.name}: {len(missing)} of {run.rounds} steps are missing, first {missing[0]}")
        for number in range(1, run.rounds + 1):
            records.write("step", **_step(node.name, number, steps[number], completions))
    seconds = max(_seconds(run_dir / node.name / METRICS_FILE) for node in run.nodes)
    records.write("round", round=run.rounds, seconds={"all": seconds})


def _step(node: str, number: int, line: dict[str, Any], completions: int) -> dict[str, Any]:
    """Convert a line of a real trainer's `metrics.jsonl` to the simulation's format. Its rewards
    are means by origin, so `trained_reward` weights them by their numbers of groups. Lines of
    versions without replay lack the fields of replayed groups.
    """
    local, external = line["groups_local"], line["groups_external"]
    replayed, replayed_reward = line.get("groups_replayed", 0), line.get("reward_replayed")
    parts = [(local, line["reward_local"]), (external, line["reward_external"]), (replayed, replayed_reward)]
    known = [(groups, reward) for groups, reward in parts if groups and reward is not None]
    total = sum(groups for groups, _ in known)
    again = {"groups_replayed": replayed, "replayed_reward": replayed_reward} if replayed else {}
    return {
        "round": number,
        "node": node,
        "trained_reward": sum(groups * reward for groups, reward in known) / total if total else None,
        "local_reward": line["reward_local"],
        "external_reward": line["reward_external"],
        "generated": local * completions,
        "staleness": line["staleness_mean"],
        "ratio_mean": line["importance_ratio"],
        "ratio_max": line["importance_ratio_max"],
        **{name: line[name] for name in _COPIED},
        **again,
    }


def _seconds(file: Path) -> float:
    """Seconds by phase, over all steps."""
    return float(sum(seconds for line in _lines(file) for seconds in line["phase_seconds"].values()))


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
