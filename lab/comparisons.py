"""Compares each arm with its baseline, with intervals over seeds, and corrects for the number of
comparisons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lab.measures import Measures, gain_until, round_of
from lab.statistics import Ratio, fieller_ratio, holm, paired_differences, sign_flip_p
from shared.intervals import Estimate, estimate

_GAIN = "gain_screened"


def compare_arms(
    manifest: Mapping[str, Any], runs: Mapping[str, Mapping[int, Measures]], baseline_of: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Comparisons by cumulative screened gain, over whole runs or equal completions: those stated
    in the spec first, then those of all other arms.

    p comes from the signs of paired differences. It is given for stated comparisons only, with
    Holm's correction.

    `runs` are measures by arm and seed, `baseline_of` names each arm's baseline.
    """
    spec = manifest["spec"]
    at_equal_completions = spec.get("compare") == "equal completions"
    stated = list(dict.fromkeys(_pair(pair, baseline_of) for pair in spec.get("confirm", [])))
    others = [pair for pair in baseline_of.items() if pair not in stated]
    found: list[dict[str, Any]] = []
    for arm, baseline in [*stated, *others]:
        if arm == baseline or arm not in runs or baseline not in runs:
            continue
        gains = gains_of_two(runs[arm], runs[baseline], at_equal_completions=at_equal_completions)
        differences = paired_differences(*gains)
        if len(differences) < 2:
            continue
        was_stated = (arm, baseline) in stated
        shared_seeds = sorted(gains[0].keys() & gains[1].keys())
        found.append(
            {
                "arm": arm,
                "baseline": baseline,
                "stated": was_stated,
                "seeds": len(differences),
                "difference": estimate(differences),
                "ratio": fieller_ratio(*([gain[seed] for seed in shared_seeds] for gain in gains)),
                "p": sign_flip_p(differences) if was_stated else None,
                "gains": {
                    name: {seed: round(gain[seed], 6) for seed in shared_seeds}
                    for name, gain in zip(("arm", "baseline"), gains, strict=True)
                },
            }
        )
    asked = sum(arm != baseline or arm not in runs for arm, baseline in stated)
    corrected = holm({_name(each): float(each["p"]) for each in found if each["stated"]}, asked)
    return [{**each, "p_corrected": corrected.get(_name(each))} for each in found]


def _pair(stated: str, baseline_of: Mapping[str, str]) -> tuple[str, str]:
    """ARM/OTHER, or ARM with its baseline (with itself if it has no runs)."""
    arm, _, other = stated.partition("/")
    return arm, other or baseline_of.get(arm, arm)


def _name(compared: Mapping[str, Any]) -> str:
    return f"{compared['arm']}/{compared['baseline']}"


def comparisons_text(comparisons: Sequence[Mapping[str, Any]], over: str = "whole runs") -> str:
    """Markdown; empty if there is nothing to compare. `over`: the spec's `compare`."""
    if not comparisons:
        return ""
    parts = [
        "## Comparisons\n",
        f"Cumulative gain, screened, over {over}. Ratio of the means over seeds, with Fieller's 95 % interval. Mean paired "
        "difference, with Student's 95 % interval over seeds. p: two-sided, from the signs of the differences, also corrected for "
        "the number of stated comparisons (Holm). A comparison that was not stated beforehand is exploratory and has no p.\n",
        comparisons_table(comparisons),
    ]
    return "\n".join(parts)


def comparisons_table(comparisons: Sequence[Mapping[str, Any]]) -> str:
    """Only the table."""
    lines = [
        "| arm | baseline | | seeds | ratio of means | difference | p | p, corrected |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in comparisons:
        difference: Estimate = each["difference"]
        lines.append(
            f"| {each['arm']} | {each['baseline']} | {'stated' if each['stated'] else 'exploratory'} | {each['seeds']} | "
            f"{bounded(each['ratio'])} | {difference.mean:+.4f} ± {difference.half_width:.4f} | {_p(each['p'])} | "
            f"{_p(each['p_corrected'])} |"
        )
    return "\n".join(lines) + "\n"


def bounded(ratio: Ratio | None) -> str:
    """The ratio with its interval, in words where none can be bounded."""
    return "no ratio can be bounded" if ratio is None else f"{ratio.ratio:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def gains_of_two(
    arm: Mapping[int, Measures], baseline: Mapping[int, Measures], *, at_equal_completions: bool
) -> tuple[dict[int, float], dict[int, float]]:
    """Cumulative gain, screened, by seed for two arms."""
    return _matched_gains(arm, baseline) if at_equal_completions else (_gains(arm), _gains(baseline))


def _gains(by_seed: Mapping[int, Measures]) -> dict[int, float]:
    return {seed: run.numbers[_GAIN] for seed, run in by_seed.items() if _GAIN in run.numbers}


def _matched_gains(arm: Mapping[int, Measures], baseline: Mapping[int, Measures]) -> tuple[dict[int, float], dict[int, float]]:
    """The gain by seed up to an equal number of completions, for both arms."""
    found: tuple[dict[int, float], dict[int, float]] = ({}, {})
    for seed in arm.keys() & baseline.keys():
        completions = min(arm[seed].numbers["completions"], baseline[seed].numbers["completions"])
        for run, into in ((arm[seed], found[0]), (baseline[seed], found[1])):
            if (gain := gain_until(run.held_out_screened, round_of(run, completions))) is not None:
                into[seed] = gain
    return found


def _p(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
