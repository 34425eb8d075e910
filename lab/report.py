"""Makes an experiment's tables and plots from its raw records alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.comparisons import compare_arms, comparisons_table
from lab.floors import out_datasets, read_floors
from lab.measures import NUMBERS, Measures, gain_until, measures, round_of
from lab.records import read_records
from lab.report_tables import report_markdown
from lab.runs import RunFolder, finished_runs, read_manifest
from lab.spec import SpecError
from lab.statistics import Ratio, paired_ratios
from shared.intervals import Estimate, estimate

Runs = Mapping[str, Mapping[int, Measures]]
"""arm -> seed -> measures, arms in the spec's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of the results that a report covers: datasets to exclude, and seeds to include
    (none: all).
    """

    without: Collection[str] = ()
    seeds: Collection[int] = ()

    def __bool__(self) -> bool:
        return bool(self.without or self.seeds)

    def text(self) -> str:
        """A sentence at the top of the report; empty if it covers everything."""
        said = [
            *([f"{', '.join(sorted(self.without))} treated as out"] if self.without else []),
            *([f"only seeds {', '.join(map(str, sorted(self.seeds)))}"] if self.seeds else []),
        ]
        return f"**Part of the results**: {'; '.join(said)}.\n" if said else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A report's files, and its main findings as Markdown for a terminal."""

    files: list[Path]
    findings: str


EVERYTHING = Part()
_NO_COMPARISON = "No comparisons: an arm and its baseline need two seeds in common, and at least one dataset must not be out.\n"


def folders_of(results: Path, part: Part = EVERYTHING) -> list[RunFolder]:
    """The complete runs that a report covers.

    Raises: SpecError: there are none, or none for a requested seed.
    """
    finished = finished_runs(results)
    if not finished:
        raise SpecError(f"{results}: no run is complete: make runs with `swarm experiment run`")
    there = {folder.seed for folder in finished}
    if missing := sorted(set(part.seeds) - there):
        complete = ", ".join(map(str, sorted(there)))
        raise SpecError(f"{results}: no run of seed {missing[0]} is complete; seeds with complete runs: {complete}")
    return [folder for folder in finished if not part.seeds or folder.seed in part.seeds]


def read_runs(
    results: Path, folders: Sequence[RunFolder], without: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, dict[int, Measures]]]:
    """Manifest and measures of runs, arms in the spec's order. `without` are datasets to exclude,
    whatever constant answers score on them.

    Raises:
        SpecError: no run was evaluated on a dataset of `without`.
    """
    manifest = read_manifest(results)
    order = list(manifest["spec"].get("arms", {}))
    runs: dict[str, dict[int, Measures]] = {}
    out = out_datasets(read_floors(results) or ()) | set(without)
    for folder in folders:
        runs.setdefault(folder.arm, {})[folder.seed] = measures(read_records(folder.records), out)
    asked = {name for by_seed in runs.values() for run in by_seed.values() for name in run.held_out_of_task}
    if unknown := sorted(set(without) - asked):
        raise SpecError(f"{results}: no run was evaluated on {unknown[0]!r}, only on {', '.join(sorted(asked))}")
    known = {arm: place for place, arm in enumerate(order)}
    return manifest, dict(sorted(runs.items(), key=lambda each: known.get(each[0], len(known))))


def write_report(results: Path, out: Path, part: Part = EVERYTHING) -> Written:
    """Write report.md, report.json and the plots.

    Raises: SpecError, ValueError: no run is complete, records are incomplete, or a partial report
    would overwrite the full one.
    """
    from lab.plots import draw_plots

    if part and out.resolve() == (results / "report").resolve():
        raise SpecError(f"{out} is reserved for the full report: give another --out for a part")
    folders = folders_of(results, part)
    manifest, runs = read_runs(results, folders, part.without)
    out.mkdir(parents=True, exist_ok=True)
    summary = summarise_runs(runs, baselines(manifest, runs))
    summary["comparisons"] = compare_arms(manifest, runs, baselines(manifest, runs))
    summary["commits"] = dict(Counter(folder.commit() for folder in folders))
    if part:
        summary["part"] = {"without": sorted(part.without), "seeds": sorted(part.seeds)}
    (out / "report.json").write_text(json.dumps(_jsonable(summary), indent=1) + "\n", encoding="utf-8")
    plots = draw_plots(manifest["name"], runs, out)
    text = report_markdown(manifest, summary, part.text(), read_floors(results), [plot.name for plot in plots])
    (out / "report.md").write_text(text, encoding="utf-8")
    compared = summary["comparisons"]
    findings = [
        part.text(),
        comparisons_table(compared) if compared else _NO_COMPARISON,
    ]
    files = [out / "report.md", out / "report.json", *plots]
    return Written(files=files, findings="\n".join(each for each in findings if each))


def baselines(manifest: Mapping[str, Any], runs: Runs) -> dict[str, str]:
    """The arm that each arm is compared with: its own `baseline`, the spec's, or the first that has
    runs.
    """
    arms = manifest["spec"].get("arms", {})
    common = manifest["baseline"] if manifest["baseline"] in runs else next(iter(runs))
    wanted = {arm: arms.get(arm, {}).get("baseline") or common for arm in runs}
    return {arm: baseline if baseline in runs else common for arm, baseline in wanted.items()}


def summarise_runs(runs: Runs, baseline_of: Mapping[str, str]) -> dict[str, Any]:
    """For every arm, each number's estimate over seeds, and its paired ratio to the baseline.

    Arms with the same baseline are also compared at equal completions: at the number that the arm
    with the fewest generated.
    """
    fewest = {
        baseline: min(
            run.numbers["completions"]
            for arm, by_seed in runs.items()
            if baseline_of[arm] == baseline or arm == baseline
            for run in by_seed.values()
        )
        for baseline in dict.fromkeys(baseline_of.values())
    }
    arms: dict[str, Any] = {}
    for arm, by_seed in runs.items():
        baseline = baseline_of[arm]
        values = _numbers(by_seed, fewest[baseline])
        base = _numbers(runs[baseline], fewest[baseline])
        arms[arm] = {
            "baseline": baseline,
            "seeds": sorted(by_seed),
            "estimates": {name: estimate(list(seed_values.values())) for name, seed_values in values.items()},
            "ratios": {
                name: estimate(ratios)
                for name, seed_values in values.items()
                if (ratios := paired_ratios(seed_values, base.get(name, {})))
            },
            "tasks": _tasks(by_seed),
        }
    return {"matched_completions": fewest, "explained": NUMBERS, "arms": arms}


def _numbers(by_seed: Mapping[int, Measures], completions: float) -> dict[str, dict[int, float]]:
    """Number -> seed -> value, including the gain over the first `completions`."""
    values: dict[str, dict[int, float]] = {}
    for seed, run in by_seed.items():
        matched = {"gain_matched": _gain_until(run, completions)}
        for name, value in (run.numbers | matched).items():
            if value is not None:
                values.setdefault(name, {})[seed] = value
    return values


def _gain_until(run: Measures, completions: float) -> float | None:
    """Cumulative held-out gain up to the round at which `completions` were generated."""
    return gain_until(run.held_out, round_of(run, completions)) if run.held_out else None


def _tasks(by_seed: Mapping[int, Measures]) -> dict[str, dict[str, Estimate]]:
    """Held-out pass rate by dataset, of the base policy and over the last quarter."""
    found: dict[str, dict[str, Estimate]] = {}
    for name in dict.fromkeys(name for run in by_seed.values() for name in run.held_out_of_task):
        series = [run.held_out_of_task[name] for run in by_seed.values() if name in run.held_out_of_task]
        finals = []
        for points in series:
            late = [y for x, y in points if x >= 0.75 * points[-1][0]]
            finals.append(sum(late) / len(late))
        found[name] = {"base": estimate([points[0][1] for points in series]), "final": estimate(finals)}
    return found


def _jsonable(value: Any) -> Any:
    if isinstance(value, Estimate | Ratio):
        return {key: None if part is None else round(part, 6) for key, part in asdict(value).items()}
    if isinstance(value, Mapping):
        return {str(key): _jsonable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(part) for part in value]
    return value
