"""Renders a report's Markdown: the tables of an experiment's summary. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lab.comparisons import comparisons_text
from lab.floors import Floor, floors_table
from lab.measures import NUMBERS
from shared.intervals import Estimate

_MAIN = (
    "trained_total",
    "local_total",
    "gain",
    "gain_screened",
    "final_gain",
    "final",
    "completions",
)
_HOSTILE = ("hostile_share", "hostile_refused", "absurd_answers")
_RATIOS = (
    "trained_total",
    "local_total",
    "gain",
    "gain_screened",
    "gain_matched",
    "final_gain",
    "final",
)
_TITLES = {
    "trained_total": "(a) trained on, total",
    "local_total": "(b) local, total",
    "gain": "(c) cumulative gain",
    "gain_screened": "(c) cumulative gain, screened",
    "final_gain": "(c) final gain",
    "final": "(c) final",
    "completions": "completions",
    "hostile_share": "hostile share of the foreign groups trained on",
    "hostile_refused": "refused at the border, per node and round",
    "absurd_answers": "answers left out as absurd, per node and round",
    "gain_matched": "(c) cumulative gain at equal completions",
}


def report_markdown(
    manifest: Mapping[str, Any],
    summary: Mapping[str, Any],
    part: str,
    floors: Sequence[Floor] | None,
    plots: Sequence[str],
) -> str:
    """The text of report.md for a summary (`lab.report.summarise_runs` with what `write_report`
    adds).

    part: a sentence about what the report leaves out, or empty; floors: None if the datasets were
    not screened; plots: names of the pictures.
    """
    arms = summary["arms"]
    seeds = sorted({seed for arm in arms.values() for seed in arm["seeds"]})
    parts = [
        f"# {manifest['name']}\n",
        f"{manifest['question']}\n" if manifest["question"] else "",
        part,
        f"Driver {manifest['driver']}, seeds {', '.join(map(str, seeds))}. Each value is the mean over nodes and then over seeds, "
        "± half the width of its 95 % interval (Student's t over seeds); ratios are paired by seed. "
        + _commits_text(summary["commits"]),
        "## Results\n",
        _table(arms, "estimates", [name for name in _MAIN if _has(arms, "estimates", name)]),
        *[_comparison(arms, baseline, completions) for baseline, completions in summary["matched_completions"].items()],
        comparisons_text(summary["comparisons"], manifest["spec"].get("compare", "whole runs")),
        _hostile_table(arms),
        "## Held-out pass rate by dataset\n",
        _task_table(arms),
        "## Pass rates without skill\n",
        _floors_text(floors),
        f"Plots, written beside this page: {', '.join(f'`{name}`' for name in plots)}.\n" if plots else "",
        "## What the columns mean\n",
        *[f"- {_TITLES[name]}: {text}" for name, text in NUMBERS.items() if name in _TITLES],
        "",
    ]
    return "\n".join(part for part in parts if part)


def _commits_text(commits: Mapping[str, int]) -> str:
    made = ", ".join(f"{count} by `{commit}`" for commit, count in sorted(commits.items()))
    return f"Runs, and the commits of the code that made them: {made}.\n"


def _floors_text(floors: Sequence[Floor] | None) -> str:
    if floors is None:
        return "These datasets were not screened: run `swarm experiment screen SPEC --out DIR`.\n"
    asked = min(floor.questions for floor in floors)
    return (
        f"Measured on {asked} questions that no node is trained or evaluated on, after choosing the best constant and the best "
        "copy on as many others. On a dataset that is out, a gain may only mean that the constant was learned; the columns named "
        "screened leave these datasets out.\n\n" + floors_table(floors)
    )


def _comparison(arms: Mapping[str, Any], baseline: str, completions: float) -> str:
    """Ratios of the arms that are compared with `baseline`."""
    compared = {arm: summary for arm, summary in arms.items() if summary["baseline"] == baseline and arm != baseline}
    if not compared:
        return ""
    ratios = [name for name in _RATIOS if _has(compared, "ratios", name)]
    parts = [
        *([f"## Ratio to {baseline}\n", _table(compared, "ratios", ratios)] if ratios else []),
        f"Equal completions: the first {completions:,.0f} completions of all nodes together.\n",
    ]
    return "\n".join(parts)


def _hostile_table(arms: Mapping[str, Any]) -> str:
    """How far the hostile nodes' text got, next to arms without such nodes; empty if no arm has
    any.
    """
    if not _has(arms, "estimates", "hostile_share"):
        return ""
    return "## Hostile text that got through\n\n" + _table(arms, "estimates", _HOSTILE)


def _has(arms: Mapping[str, Any], kind: str, name: str) -> bool:
    return any(name in arm[kind] for arm in arms.values())


def _table(arms: Mapping[str, Any], kind: str, names: Sequence[str]) -> str:
    head = "| arm | seeds | " + " | ".join(_TITLES.get(name, name) for name in names) + " |"
    lines = [head, "|" + "---|" * (len(names) + 2)]
    for arm, summary in arms.items():
        cells = [_cell(summary[kind].get(name)) for name in names]
        lines.append(f"| {arm} | {len(summary['seeds'])} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _task_table(arms: Mapping[str, Any]) -> str:
    datasets = list(dict.fromkeys(name for summary in arms.values() for name in summary["tasks"]))
    if not datasets:
        return "No run was evaluated.\n"
    lines = ["| dataset | base | " + " | ".join(arms) + " |", "|" + "---|" * (len(arms) + 2)]
    for dataset in datasets:
        rates = [summary["tasks"].get(dataset) for summary in arms.values()]
        base = next(rate["base"] for rate in rates if rate)
        lines.append(
            f"| {dataset} | {base.mean:.3f} | " + " | ".join(_cell(rate["final"] if rate else None) for rate in rates) + " |"
        )
    return "\n".join(lines) + "\n"


def _cell(value: Estimate | None) -> str:
    if value is None:
        return "–"
    mean = _number(value.mean)
    return mean if value.half_width is None else f"{mean} ± {_number(value.half_width)}"


def _number(value: float) -> str:
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 else f"{value:.4f}"
