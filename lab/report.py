"""Tables and plots of an experiment, from its raw records alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab.measures import NUMBERS, Measures, measures
from lab.records import read_records
from lab.runs import finished_runs, read_manifest
from lab.spec import SpecError
from lab.statistics import Estimate, area_under, estimate, paired_differences, paired_ratios, value_at

Runs = Mapping[str, Mapping[int, Measures]]
"""arm -> seed -> measures, arms in the spec's order."""

_MAIN = ("trained_total", "local_total", "gain", "final_gain", "final", "final_mean_reward", "oscillation", "completions")
_TITLES = {
    "trained_total": "(a) trained on, total",
    "local_total": "(b) local, total",
    "gain": "(c) cumulative gain",
    "final_gain": "(c) final gain",
    "final": "(c) final",
    "final_mean_reward": "(c) final mean reward",
    "oscillation": "oscillation",
    "completions": "completions",
    "gain_matched": "(c) cumulative gain at equal completions",
}


def read_runs(results: Path) -> tuple[dict[str, Any], dict[str, dict[int, Measures]]]:
    """Manifest and measures of every complete run, arms in the spec's order.

    Raises:
        SpecError: there is no complete run.
    """
    manifest = read_manifest(results)
    order = list(manifest["spec"].get("arms", {}))
    runs: dict[str, dict[int, Measures]] = {}
    for folder in finished_runs(results):
        runs.setdefault(folder.arm, {})[folder.seed] = measures(read_records(folder.records))
    if not runs:
        raise SpecError(f"{results}: no run is complete: `swarm experiment run` makes them")
    known = {arm: place for place, arm in enumerate(order)}
    return manifest, dict(sorted(runs.items(), key=lambda each: known.get(each[0], len(known))))


def write_report(results: Path, out: Path) -> list[Path]:
    """Write report.md, report.json and the plots, and return their paths.

    Raises:
        SpecError, ValueError: nothing complete, or torn records.
    """
    from lab.plots import draw_plots

    manifest, runs = read_runs(results)
    baseline = manifest["baseline"] if manifest["baseline"] in runs else next(iter(runs))
    out.mkdir(parents=True, exist_ok=True)
    summary = summarise_runs(runs, baseline)
    (out / "report.json").write_text(json.dumps(_jsonable(summary), indent=1) + "\n", encoding="utf-8")
    plots = draw_plots(manifest["name"], runs, out)
    text = _markdown(manifest, runs, baseline, summary, [plot.name for plot in plots])
    (out / "report.md").write_text(text, encoding="utf-8")
    return [out / "report.md", out / "report.json", *plots]


def summarise_runs(runs: Runs, baseline: str) -> dict[str, Any]:
    """For every arm: each number's estimate over seeds, and its paired ratio and difference to the baseline's."""
    numbers = {arm: {seed: dict(run.numbers) for seed, run in by_seed.items()} for arm, by_seed in runs.items()}
    fewest = min(run["completions"] for by_seed in numbers.values() for run in by_seed.values())
    for arm, by_seed in runs.items():
        for seed, run in by_seed.items():
            matched = _gain_until(run, fewest)
            if matched is not None:
                numbers[arm][seed]["gain_matched"] = matched
    arms: dict[str, Any] = {}
    for arm, of_seeds in numbers.items():
        values = {
            name: {seed: of_seed[name] for seed, of_seed in of_seeds.items() if name in of_seed} for name in _all_names(of_seeds)
        }
        base = {name: {seed: of_seed[name] for seed, of_seed in numbers[baseline].items() if name in of_seed} for name in values}
        arms[arm] = {
            "seeds": sorted(of_seeds),
            "estimates": {name: estimate(list(by_seed.values())) for name, by_seed in values.items() if by_seed},
            "ratios": {
                name: estimate(ratios) for name, by_seed in values.items() if (ratios := paired_ratios(by_seed, base[name]))
            },
            "differences": {
                name: estimate(found) for name, by_seed in values.items() if (found := paired_differences(by_seed, base[name]))
            },
            "tasks": _tasks(runs[arm]),
        }
    return {"baseline": baseline, "matched_completions": fewest, "explained": NUMBERS, "arms": arms}


def _gain_until(run: Measures, completions: float) -> float | None:
    """Cumulative held-out gain up to the round at which `completions` were generated."""
    if len(run.held_out) < 2:
        return None
    end = value_at([(count, number) for number, count in run.completions], completions)
    points = [(x, y) for x, y in run.held_out if x < end] + [(end, value_at(run.held_out, end))]
    if len(points) < 2 or end <= points[0][0]:
        return None
    return area_under(points) / (end - points[0][0]) - points[0][1]


def _all_names(of_seeds: Mapping[int, Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for of_seed in of_seeds.values() for name in of_seed))


def _tasks(by_seed: Mapping[int, Measures]) -> dict[str, dict[str, Estimate]]:
    """Held-out pass rate by dataset: of the base policy, and over the last quarter."""
    found: dict[str, dict[str, Estimate]] = {}
    for name in dict.fromkeys(name for run in by_seed.values() for name in run.held_out_of_task):
        series = [run.held_out_of_task[name] for run in by_seed.values() if name in run.held_out_of_task]
        finals = []
        for points in series:
            late = [y for x, y in points if x >= 0.75 * points[-1][0]]
            finals.append(sum(late) / len(late))
        found[name] = {"base": estimate([points[0][1] for points in series]), "final": estimate(finals)}
    return found


def _markdown(manifest: Mapping[str, Any], runs: Runs, baseline: str, summary: Mapping[str, Any], plots: Sequence[str]) -> str:
    seeds = sorted({seed for by_seed in runs.values() for seed in by_seed})
    parts = [
        f"# {manifest['name']}\n",
        f"{manifest['question']}\n" if manifest["question"] else "",
        f"Driver {manifest['driver']}, seeds {', '.join(map(str, seeds))}. Means over seeds of means over nodes, "
        "± half width of the 95 % interval (Student's t over seeds); ratios and differences are paired by seed.\n",
        "## Results\n",
        _table(summary["arms"], "estimates", [name for name in _MAIN if _has(summary, "estimates", name)]),
    ]
    if len(runs) > 1:
        compared = ["trained_total", "local_total", "gain", "gain_matched", "final_gain", "final", "oscillation"]
        ratios = [name for name in compared if _has(summary, "ratios", name, at_least=2)]
        differences = [
            name for name in ("gain", "gain_matched", "final", "oscillation") if _has(summary, "differences", name, at_least=2)
        ]
        if ratios:
            parts += [f"## Ratio to {baseline}\n", _table(summary["arms"], "ratios", ratios)]
        if differences:
            parts += [f"## Difference to {baseline}\n", _table(summary["arms"], "differences", differences)]
        parts.append(f"Equal completions: the first {summary['matched_completions']:,.0f} that all nodes together generated.\n")
    parts += ["## Held-out pass rate by dataset\n", _task_table(summary["arms"])]
    parts += [f"![{name}]({name})\n" for name in plots]
    parts += [
        "## What the columns mean\n",
        *[f"- {_TITLES[name]}: {text}" for name, text in NUMBERS.items() if name in _TITLES],
        "",
    ]
    return "\n".join(part for part in parts if part)


def _has(summary: Mapping[str, Any], kind: str, name: str, at_least: int = 1) -> bool:
    return sum(name in arm[kind] for arm in summary["arms"].values()) >= at_least


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
        return "No held-out evaluation was made.\n"
    lines = ["| dataset | base | " + " | ".join(arms) + " |", "|" + "---|" * (len(arms) + 2)]
    for dataset in datasets:
        of_arms = [summary["tasks"].get(dataset) for summary in arms.values()]
        base = next(of_arm["base"] for of_arm in of_arms if of_arm)
        lines.append(
            f"| {dataset} | {base.mean:.3f} | "
            + " | ".join(_cell(of_arm["final"] if of_arm else None) for of_arm in of_arms)
            + " |"
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


def _jsonable(value: Any) -> Any:
    if isinstance(value, Estimate):
        return {key: None if part is None else round(part, 6) for key, part in asdict(value).items()}
    if isinstance(value, Mapping):
        return {str(key): _jsonable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(part) for part in value]
    return value
