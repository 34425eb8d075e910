"""One arm's lead over another, from an experiment's records:

    python -m lab.lead experiments/results/q8-evidence default/replay default/central
    python -m lab.lead experiments/results/q8-evidence default/central --without binary_matrix
    python -m lab.lead experiments/results/q8-evidence central-2/central --of default/central

Of several pairs it prints the ratio of their mean gains. Of one pair it also says whether other
measures show the lead, on which seeds and datasets it rests, how much more training is behind it,
and what part it makes up of another lead. Intervals of ratios are Fieller's, that of the difference
is Student's.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.comparisons import bounded, gains_of_two
from lab.measures import Measures, Point, gain_until, round_of
from lab.records import read_records
from lab.report import folders_of, read_runs
from lab.spec import SpecError
from lab.statistics import fieller_ratio, sign_flip_p, value_at
from shared.intervals import estimate

WORK = {
    "groups trained on": ("groups_local", "groups_external", "groups_replayed"),
    "groups with an advantage": ("informative_local", "informative_external", "informative_replayed"),
    "tokens": ("tokens",),
    "updates": ("updated",),
}
"""What all nodes did, and the counts of a step that add up to it. The tokens of the results in
`experiments/results` include those of groups without an advantage.
"""


@dataclass(frozen=True, slots=True)
class Run:
    """A run's measures, its steps, and the number of its held-out questions by dataset."""

    measures: Measures
    steps: Sequence[Mapping[str, Any]]
    questions: Mapping[str, int]

    def work(self, end: float, counts: Sequence[str]) -> float:
        """The sum of some counts over all steps up to round `end`, which need not be whole."""
        part = {step["round"]: min(1.0, max(0.0, end - step["round"] + 1)) for step in self.steps}
        return math.fsum(part[step["round"]] * (step.get(count) or 0) for step in self.steps for count in counts)


Measure = Callable[[list[Point], float], float]
"""A figure of a held-out series, where the comparison ends in a given round."""
Value = Callable[[Run, float], float]
"""The same of a run."""


def gained(points: list[Point], end: float) -> float:
    """Cumulative gain up to round `end`; 0 if that is before the first evaluation."""
    return gain_until(points, end) or 0.0


def reached(points: list[Point], end: float) -> float:
    """Held-out pass rate in round `end` minus the base policy's."""
    return value_at(points, end) - points[0][1]


def last_quarter(points: list[Point], _end: float) -> float:
    """Mean of the evaluations in the last quarter of a run, wherever the comparison ends."""
    kept = [y for x, y in points if x >= 0.75 * points[-1][0]]
    return sum(kept) / len(kept)


def shares(leads: Mapping[str, float], questions: Mapping[str, int]) -> dict[str, float]:
    """Each dataset's part of the lead over all questions, largest first."""
    whole = sum(lead * questions[name] for name, lead in leads.items())
    parts = {name: lead * questions[name] / whole for name, lead in leads.items()}
    return dict(sorted(parts.items(), key=lambda each: -each[1]))


def ratio_text(arm: Sequence[float], base: Sequence[float]) -> str:
    """Ratio of the means, seeds on which the arm is ahead, p by the signs of the differences."""
    differences = _differences(arm, base)
    ahead = sum(difference > 0 for difference in differences)
    return f"{_bounded(arm, base)}, ahead on {ahead} of {len(differences)} seeds, p {sign_flip_p(differences):.3f} uncorrected"


def difference_text(arm: Sequence[float], base: Sequence[float]) -> str:
    """Mean difference, with Student's interval where there are two seeds or more."""
    found = estimate(_differences(arm, base))
    return f"{found.mean:+.4f}" + ("" if found.half_width is None else f" ± {found.half_width:.4f}")


def _differences(arm: Sequence[float], base: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(arm, base, strict=True)]


def _bounded(values: Sequence[float], base: Sequence[float]) -> str:
    return bounded(fieller_ratio(values, base))


def _screened(measure: Measure) -> Value:
    return lambda run, end: measure(run.measures.held_out_screened, end)


def _task(measure: Measure, name: str) -> Value:
    return lambda run, end: measure(run.measures.held_out_of_task[name], end)


def _work(counts: Sequence[str]) -> Value:
    return lambda run, end: run.work(end, counts)


@dataclass(frozen=True, slots=True)
class Compared:
    """The runs of two arms with the same seeds, in the order of `seeds`."""

    runs: Sequence[tuple[Run, Run]]
    seeds: Sequence[int] = ()

    def values(self, value: Value, part: float = 1.0) -> tuple[list[float], list[float]]:
        """A value of both arms by seed, when each had made a part of the completions both made."""
        found: tuple[list[float], list[float]] = ([], [])
        for pair in self.runs:
            completions = part * min(run.measures.numbers["completions"] for run in pair)
            for run, into in zip(pair, found, strict=True):
                into.append(value(run, round_of(run.measures, completions)))
        return found

    def means(self, value: Value) -> tuple[float, float]:
        """The same as means over seeds, at equal completions."""
        one, other = self.values(value)
        return sum(one) / len(one), sum(other) / len(other)


def lead_lines(results: Path, pair: str, without: Sequence[str] = (), whole: str = "") -> Iterator[str]:
    """What the command prints for a pair ARM/BASELINE. `without`: datasets left out of all ratios.
    `whole`: another pair, of whose lead this one's is a part.

    Raises:
        SpecError: no run is complete, an arm of a pair has none, or they have no seed in common.
    """
    compared = _compared(results, pair, without)
    gains = compared.values(_screened(gained))
    yield f"cumulative gain: {ratio_text(*gains)}"
    yield f"  difference: {difference_text(*gains)}"
    if whole:
        yield f"  as a part of the difference of {whole}: {_part(compared, _compared(results, whole, without))}"
    yield "  by seed: " + ", ".join(f"{seed} {one / other:.2f}" for seed, one, other in zip(compared.seeds, *gains, strict=True))
    yield f"cumulative gain, half of these completions: {ratio_text(*compared.values(_screened(gained), 0.5))}"
    yield f"pass rate at their end minus the base policy's: {ratio_text(*compared.values(_screened(reached)))}"
    questions = compared.runs[0][0].questions
    for title, measure in (("cumulative gain", gained), ("pass rate over the last quarter of whole runs", last_quarter)):
        means = {name: compared.means(_task(measure, name)) for name in questions}
        parts = shares({name: one - other for name, (one, other) in means.items()}, questions)
        yield f"lead by dataset, {title}: " + ", ".join(f"{name} {round(100 * part)} %" for name, part in parts.items())
    for title, counts in WORK.items():
        done, by_other = compared.means(_work(counts))
        yield f"{title}: {done:,.0f} and {by_other:,.0f}, {done / by_other:.1f} times as many"


def ratio_lines(results: Path, pairs: Sequence[str], *, at_equal_completions: bool | None = None) -> Iterator[str]:
    """A line for each pair: the ratio of cumulative gains over the seeds that both have.

    `at_equal_completions`: compare up to where the arm with fewer completions ended; None: as the
    spec says.

    Raises:
        SpecError: no run is complete, or an arm of a pair has none.
    """
    manifest, runs = read_runs(results, folders_of(results))
    if at_equal_completions is None:
        at_equal_completions = manifest["spec"].get("compare") == "equal completions"
    for pair in pairs:
        arm, _, baseline = pair.partition("/")
        for name in (arm, baseline):
            _must_have_runs(name, runs)
        gains, base = gains_of_two(runs[arm], runs[baseline], at_equal_completions=at_equal_completions)
        seeds = sorted(gains.keys() & base.keys())
        over = "equal completions" if at_equal_completions else "whole runs"
        ratio = _bounded([gains[seed] for seed in seeds], [base[seed] for seed in seeds])
        yield f"{pair}, over {over}: {ratio}, {len(seeds)} seeds"


def _must_have_runs(arm: str, known: Collection[str]) -> None:
    if arm not in known:
        raise SpecError(f"{arm!r} is no arm that has complete runs; compare two as ARM/BASELINE of {', '.join(known)}")


def _compared(results: Path, pair: str, without: Sequence[str]) -> Compared:
    arm, _, baseline = pair.partition("/")
    ones, others = (_runs(results, name, without) for name in (arm, baseline))
    seeds = sorted(ones.keys() & others.keys())
    if not seeds:
        raise SpecError(f"{results}: the arms of {pair} have no seed in common")
    return Compared([(ones[seed], others[seed]) for seed in seeds], seeds)


def _part(lead: Compared, whole: Compared) -> str:
    """The ratio of two mean differences of cumulative gain, over the seeds that both have."""
    by_seed = [dict(zip(each.seeds, _differences(*each.values(_screened(gained))), strict=True)) for each in (lead, whole)]
    seeds = sorted(by_seed[0].keys() & by_seed[1].keys())
    return _bounded(*([differences[seed] for seed in seeds] for differences in by_seed))


def _runs(results: Path, arm: str, without: Sequence[str]) -> dict[int, Run]:
    """By seed. Measures have no count of updates, so the steps are read beside them."""
    folders = folders_of(results)
    known = list(dict.fromkeys(folder.arm for folder in folders))
    _must_have_runs(arm, known)
    own = [folder for folder in folders if folder.arm == arm]
    _, runs = read_runs(results, own, without)
    found = {}
    for folder in own:
        lines = list(read_records(folder.records))
        asked = next(line["tasks"] for line in lines if line["kind"] == "eval")
        found[folder.seed] = Run(
            runs[arm][folder.seed],
            [line for line in lines if line["kind"] == "step"],
            {name: counted[0] for name, counted in asked.items()},
        )
    return found


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m lab.lead", description="One arm's lead over another, by several measures.")
    parser.add_argument("results", type=Path, help="folder of an experiment's results")
    parser.add_argument(
        "pairs", nargs="+", metavar="ARM/BASELINE", help="what to compare; one pair in detail, over equal completions"
    )
    parser.add_argument("--equal-completions", action="store_const", const=True, help="several pairs: whatever the spec says")
    parser.add_argument("--without", action="append", default=[], metavar="DATASET", help="leave a dataset out of the ratios")
    parser.add_argument("--of", default="", metavar="ARM/BASELINE", help="what part of this pair's lead it makes up")
    asked = parser.parse_args(arguments)
    try:
        if len(asked.pairs) == 1:
            lines = lead_lines(asked.results, asked.pairs[0], asked.without, asked.of)
        else:
            lines = ratio_lines(asked.results, asked.pairs, at_equal_completions=asked.equal_completions)
        for line in lines:
            print(line)
    except SpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
