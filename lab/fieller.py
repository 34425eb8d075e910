"""Ratios of two arms' mean gains, with intervals by Fieller's method, from an experiment's records:

    python -m lab.fieller experiments/results/q8-evidence default/replay default/central
    python -m lab.fieller experiments/results/q13-services 4-4/8-0 --equal-completions

The report's intervals are a bootstrap's, which is too narrow for few seeds; these are not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from lab.comparisons import gains_of_two
from lab.measures import Measures
from lab.report import folders_of, read_runs
from lab.spec import SpecError
from lab.statistics import fieller_ratio


def fieller_lines(results: Path, pairs: Collection[str], *, at_equal_completions: bool | None = None) -> list[str]:
    """A line for each pair ARM/BASELINE: the ratio of their cumulative gains, screened, with its 95
    % interval over the seeds that both have.

    `at_equal_completions`: compare up to where the arm with fewer completions ended; None: as the
    spec says.

    Raises:
        SpecError: no run is complete, or an arm of a pair has none.
    """
    manifest, runs = read_runs(results, folders_of(results))
    if at_equal_completions is None:
        at_equal_completions = manifest["spec"].get("compare") == "equal completions"
    over = "equal completions" if at_equal_completions else "whole runs"
    return [f"{pair}, over {over}: {_ratio(runs, pair, at_equal_completions)}" for pair in pairs]


def _ratio(runs: Mapping[str, Mapping[int, Measures]], pair: str, at_equal_completions: bool) -> str:
    arms = pair.split("/")
    if len(arms) != 2 or not all(arm in runs for arm in arms):
        raise SpecError(f"{pair!r} is not ARM/BASELINE of the arms that have complete runs: {', '.join(runs)}")
    gains, base = gains_of_two(runs[arms[0]], runs[arms[1]], at_equal_completions=at_equal_completions)
    seeds = sorted(gains.keys() & base.keys())
    found = fieller_ratio([gains[seed] for seed in seeds], [base[seed] for seed in seeds])
    if found is None:
        return f"{len(seeds)} seeds in common, too few to bound the ratio: the baseline's gain may be 0"
    return f"{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f}), {len(seeds)} seeds"


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.fieller", description="Ratios of two arms' gains with intervals by Fieller's method."
    )
    parser.add_argument("results", type=Path, help="folder of an experiment's results")
    parser.add_argument("pairs", nargs="+", metavar="ARM/BASELINE", help="what to compare")
    parser.add_argument("--whole-runs", dest="equal", action="store_const", const=False, help="over whole runs")
    parser.add_argument("--equal-completions", dest="equal", action="store_const", const=True, help="over equal completions")
    asked = parser.parse_args(arguments)
    try:
        print("\n".join(fieller_lines(asked.results, asked.pairs, at_equal_completions=asked.equal)))
    except SpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
