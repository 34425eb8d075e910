"""A run's folder: the held-out results, training steps and unknown rewards that its processes
recorded, one JSON object per line.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple, TypeVar

from shared.contracts.control import EvalReport, TaskScore, incomparable
from shared.contracts.status_figures import FigureFamily
from shared.paired import Answer, recorded_answers
from shared.plain_files import NO_FILE, read_plain_end
from shared.rewards import LocalOnly
from shared.run_records import (
    EVAL_FILE,
    EVAL_SETS_FILE,
    METRICS_FILE,
    added_words,
    eval_lines,
    eval_report,
    read_jsonl,
    saved_step,
    unknown_files,
)
from shared.text import visible

T = TypeVar("T")

TAIL_BYTES = 65_536
"""Far longer than a line."""

HeldOutSet = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One held-out evaluation: `pass_rate` of `n` tasks by `policy_version`; None: no pass is
    defined for one of the sources, so `mean_reward` counts. `unknown`: answers without a known
    reward, which are not among the `n`. `at`: Unix time. `held_out`, `scorer`, `pass_rule`,
    `max_new_tokens`: as in `EvalReport`; "" or None if unknown.
    """

    policy_version: int
    pass_rate: float | None
    n: int
    mean_reward: float | None = None
    unknown: int = 0
    at: float = 0.0
    held_out: str = ""
    scorer: str = ""
    pass_rule: str = ""
    max_new_tokens: int | None = None
    per_task: Mapping[str, TaskScore] = field(default_factory=dict)
    answers: tuple[Answer, ...] = ()
    """To each question, of the base policy's and the newest one on record here."""

    @classmethod
    def of(cls, report: EvalReport) -> Evaluation:
        """The evaluation that a report is about."""
        return cls(
            report.policy_version, report.pass_rate, report.n, report.mean_reward, report.unknown, report.created_at,
            report.held_out or "", report.scorer or "", report.pass_rule or "", report.max_new_tokens, report.per_task,
        )  # fmt: skip

    @property
    def score(self) -> float | None:
        """The number by which results are compared; None if no answer has a known reward."""
        return self.mean_reward if self.pass_rate is None else self.pass_rate

    @property
    def held_out_set(self) -> HeldOutSet:
        """The ids of its questions and of their scorers, and the number of tasks."""
        return self.held_out, self.scorer, self.n + self.unknown

    def __str__(self) -> str:
        """The score, such as `0.412`, or `0.412r` for a mean reward (`NO_PASS_SHOWN`)."""
        if not self.n and self.unknown:
            return "unknown"
        if self.pass_rate is not None:
            return f"{self.pass_rate:.3f}"
        return "–" if self.mean_reward is None else f"{self.mean_reward:.3f}r"


NO_PASS_SHOWN = "no pass is defined, so held-out results are mean rewards (r): set pass_at in the [[tasks]] entry for a pass rate"


class Comparison(NamedTuple):
    """The held-out results of a node that can be compared with its newest one
    (`shared.contracts.control.incomparable`), in order, by the newest's measure. `base`: that of
    the base policy. `why_no_base`: a sentence, if it was evaluated and cannot be compared.
    """

    alike: tuple[Evaluation, ...] = ()
    base: Evaluation | None = None
    why_no_base: str = ""

    @property
    def newest(self) -> Evaluation | None:
        return self.alike[-1] if self.alike else None

    @property
    def values(self) -> list[tuple[Evaluation, float]]:
        """Each with its pass rate, or its mean reward where no pass is defined."""
        return [(each, score) for each in self.alike if (score := each.score) is not None]

    @property
    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Scores by policy version: over all datasets under "", and of each dataset, by the measure
        of its newest result.
        """
        curves = {"": [(each.policy_version, value) for each, value in self.values]}
        newest = self.alike[-1].per_task if self.alike else {}
        for name in sorted({name for each in self.alike for name in each.per_task}):
            by_reward = name in newest and newest[name].pass_rate is None
            results = [(each.policy_version, each.per_task[name]) for each in self.alike if name in each.per_task]
            scores = [(version, result.mean_reward if by_reward else result.pass_rate) for version, result in results]
            curves[name] = [(version, score) for version, score in scores if score is not None]
        return {name: curve for name, curve in curves.items() if curve}

    @property
    def gain(self) -> float | None:
        """The newest minus the base policy's; None if that is not known."""
        newest = self.newest
        if newest is None or self.base is None or newest is self.base or newest.score is None or self.base.score is None:
            return None
        return newest.score - self.base.score


def compared(evaluations: Sequence[Evaluation]) -> Comparison:
    """Compare a node's evaluations, which are in order of version, with the newest one that has a
    score.
    """
    known = [each for each in evaluations if each.n or not each.unknown]
    if not known:
        return Comparison()
    newest = known[-1]
    alike = tuple(each for each in known if not incomparable(each, newest))
    if newest.pass_rate is None:
        alike = tuple(replace(each, pass_rate=None) for each in alike)
    base = next((each for each in alike if each.policy_version == 0), None)
    other = next((each for each in known if each.policy_version == 0), None)
    if base is not None or other is None:
        return Comparison(alike, base)
    why = incomparable(other, newest)
    remedy = ": `swarm eval BASE` scores the base policy again, with today's limit" if "tokens" in why else ""
    return Comparison(alike, None, f"no gain is known: the base policy was evaluated {why}{remedy}")


def read_steps(node_dir: Path) -> list[dict[str, Any]]:
    """A node's training steps in order. If a resumed trainer repeated a step, the later line
    counts.
    """
    by_step = {
        int(line["step"]): _without_huge(line) for line in read_jsonl(node_dir / METRICS_FILE) if _is_number(line.get("step"))
    }
    return [by_step[step] for step in sorted(by_step)]


def thinned(curve: Sequence[T], most: int) -> tuple[T, ...]:
    """At most `most` points, evenly spread, including the last and, of several, the first."""
    if len(curve) <= most:
        return tuple(curve)
    if most == 1:
        return (curve[-1],)
    return tuple(curve[round(place * (len(curve) - 1) / (most - 1))] for place in range(most))


def newest_step(node_dir: Path) -> dict[str, Any]:
    """The newest training step, read from the end of the file; {} before the first."""
    try:
        lines = read_plain_end(node_dir / METRICS_FILE, TAIL_BYTES)[0].decode("utf-8", "replace").splitlines()
    except OSError as error:
        if error.errno in NO_FILE:
            return {}
        raise
    for line in reversed(lines):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            if isinstance(value, dict):
                return _without_huge(value)
    return {}


def unsaved_words(node_dir: Path) -> str:
    """The steps of an ended run that no checkpoint contains, in words; empty if there are none."""
    taken: Any = newest_step(node_dir).get("step")
    saved = saved_step(node_dir)
    if not _is_number(taken) or taken <= saved:
        return ""
    newest = f"the newest is of step {saved:,}" if saved else "there is none"
    return f"no checkpoint has the policy after step {int(taken):,}: {newest}; the steps since are trained again if it goes on"


def _without_huge(line: dict[str, Any]) -> dict[str, Any]:
    """`line` without the integers that no float can hold, which no trainer writes."""
    return {key: value for key, value in line.items() if not isinstance(value, int) or abs(value) < 2**63}


STEPS_UNRECORDED = 1000
"""At most so many steps of a trainer may be missing at the end of its record, as on a full disk."""
EVALUATIONS_KEPT = 2**17
"""Of a node, the newest."""
_SETS_KEPT = 64
_FILES_KEPT = 64
_read: dict[Path, tuple[tuple[int, int, int], tuple[Evaluation, ...]]] = {}
"""The evaluations last read from a file, by what told then that it had changed."""


def recorded_evaluations(node_dir: Path) -> tuple[Evaluation, ...]:
    """A node's evaluations in the order of its file: the newest `EVALUATIONS_KEPT`, and before them
    the base policy's of each set, against which gains are measured. Lines that no generator writes
    are skipped, and those of policies that are gone. The file is read again only when it has
    changed.
    """
    file = node_dir / EVAL_FILE
    try:
        found = file.lstat()
    except OSError:
        return ()
    state = found.st_ino, found.st_size, found.st_mtime_ns
    known = _read.pop(file, None)
    if known is None or known[0] != state:
        newest: deque[Evaluation] = deque(maxlen=EVALUATIONS_KEPT)
        bases: dict[HeldOutSet, Evaluation] = {}
        for line in eval_lines(file):
            if (each := _evaluation(line)) is not None:
                # Answers of versions between the base and the highest are not compared. A slow
                # generator may write a lower one after a higher.
                if newest and 0 < newest[-1].policy_version <= each.policy_version:
                    newest[-1] = replace(newest[-1], answers=())
                elif newest and 0 < each.policy_version < newest[-1].policy_version:
                    each = replace(each, answers=())  # noqa: PLW2901 (the same, without them)
                newest.append(each)
                if each.policy_version == 0 and (each.held_out_set in bases or len(bases) < _SETS_KEPT):
                    bases[each.held_out_set] = each
        first = newest[0] if len(newest) == EVALUATIONS_KEPT else None
        pushed_out = [base for base in bases.values() if base not in newest] if first is not None else []
        known = state, (*pushed_out, *newest)
    _read[file] = known
    while len(_read) > _FILES_KEPT:
        _read.pop(next(iter(_read)), None)
    return known[1]


def read_evaluations(node_dir: Path) -> list[Evaluation]:
    """A node's evaluations in order of policy version; if one was repeated, the later line counts.
    One of a version far beyond the steps on record is nobody's result.
    """
    by_version = {each.policy_version: each for each in recorded_evaluations(node_dir)}
    last = _last_possible(node_dir)
    return [by_version[version] for version in sorted(by_version) if version <= last]


def _last_possible(node_dir: Path) -> float:
    """The last policy version that the node's trainer can have made, by the steps on record."""
    taken: Any = newest_step(node_dir).get("step")
    return taken + STEPS_UNRECORDED if _is_number(taken) else math.inf


@dataclass(frozen=True, slots=True)
class SetResult(Evaluation):
    """A result on an evaluation set: `pass_rate` is avg@k. `error`: its standard error over
    `questions`; `pass_at`: pass@k by k; `added`: since when it is kept out of training, in words,
    if not from the beginning.
    """

    k: int = 1
    questions: int = 0
    error: float = 0.0
    pass_at: Mapping[str, float] = field(default_factory=dict)
    added: str = ""

    @property
    def at_k(self) -> float | None:
        """Its pass@k; None if no pass is defined."""
        return self.pass_at.get(str(self.k))

    def words(self) -> str:
        """Its measure: `avg@4`, or `mean reward` where no pass is defined."""
        return "mean reward" if self.pass_rate is None else f"avg@{self.k}"


class SetCurve(NamedTuple):
    """The results on one set that can be compared with its newest, in order. `base`: the base
    policy's.
    """

    results: tuple[SetResult, ...]
    base: SetResult | None

    @property
    def newest(self) -> SetResult:
        return self.results[-1]


def read_sets(node_dir: Path) -> dict[str, SetCurve]:
    """A node's results on evaluation sets, by the set's name. Lines that no generator writes are
    skipped, and those of policies that are gone or never were.
    """
    by_set: dict[str, dict[int, SetResult]] = {}
    last = _last_possible(node_dir)
    for line in eval_lines(node_dir / EVAL_SETS_FILE):
        report, name, rates = eval_report("node", line), line.get("set"), line.get("pass_at")
        numbers = (line.get("k"), line.get("questions"), line.get("error"))
        if report is None or not report.n or not isinstance(name, str) or not isinstance(rates, dict):
            continue
        if report.policy_version > last:
            continue
        if all(map(_is_number, (*numbers, *rates.values()))) and all(0.0 <= rate <= 1.0 for rate in rates.values()):
            found = Evaluation.of(report)
            known = {each.name: getattr(found, each.name) for each in fields(found)}
            k, questions, error = numbers
            result = SetResult(
                **known,
                k=int(k or 1),
                questions=int(questions or 0),
                error=float(error or 0.0),
                pass_at=rates,
                added=added_words(line),
            )
            by_set.setdefault(name, {})[result.policy_version] = result
    curves = {}
    for name, results in sorted(by_set.items()):
        comparison = compared([results[version] for version in sorted(results)])
        alike = tuple(each for each in comparison.alike if isinstance(each, SetResult))
        curves[name] = SetCurve(alike, next((each for each in alike if each.policy_version == 0), None))
    return curves


CHANCE = NormalDist().cdf(-2.0)
"""The probability that chance alone looks like a fall, over all of a run's evaluations together:
that of a value beyond two standard errors.
"""
CHANCE_AT_LEAST = 0.02


def set_chance(curve: SetCurve) -> float | None:
    """By how much the newest pass rate on a set may exceed the base policy's by chance; None
    without both.
    """
    newest, base = curve.newest, curve.base
    if base is None or base is newest or newest.pass_rate is None or base.pass_rate is None:
        return None
    # Answers to one question are alike, so the errors are over questions.
    return _margin(sum(max(each.error**2, _variance(each)) for each in (newest, base)), 2)


def set_lines(node_dir: Path) -> list[str]:
    """The newest result on each evaluation set beside the base policy's, a line for each."""
    lines = []
    for name, curve in read_sets(node_dir).items():
        newest, base = curve.newest, curve.base
        told = f"set {visible(name)}: {newest.words()} {newest.score or 0.0:.3f}"
        if base is not None and base is not newest:
            told += f", {(newest.score or 0.0) - (base.score or 0.0):+.3f} over the base policy"
            if (chance := set_chance(curve)) is not None:
                told += f" (chance explains up to {chance:.3f})"
        if newest.k > 1 and newest.at_k is not None:
            told += f"; pass@{newest.k} {newest.at_k:.3f}"
            told += f" (base {base.at_k:.3f})" if base is not None and base is not newest and base.at_k is not None else ""
        told += f"; {newest.questions:,} questions, version {newest.policy_version}"
        lines.append(f"{told}; {newest.added}" if newest.added else told)
    return lines


def margin(one: Evaluation, other: Evaluation, looks: int) -> float:
    """Calculate how far apart two pass rates may be by chance if `looks` pairs are compared
    (Bonferroni): 2.3 standard errors of the difference for two pairs, 3.6 for 120.

    One right and one wrong answer are added to each rate, so that rates of 0 and 1 have an error
    too.
    """
    return _margin(_variance(one) + _variance(other), looks)


def _variance(evaluation: Evaluation) -> float:
    """The variance of a pass rate if each of its answers were to another question."""
    rate = ((evaluation.pass_rate or 0.0) * evaluation.n + 1) / (evaluation.n + 2)
    return rate * (1 - rate) / max(1, evaluation.n)


def _margin(variance: float, looks: int) -> float:
    return max(CHANCE_AT_LEAST, -NormalDist().inv_cdf(CHANCE / looks) * math.sqrt(variance))


def _evaluation(line: Mapping[str, Any]) -> Evaluation | None:
    """The evaluation of a line; None if no generator writes such a line."""
    if (report := eval_report("node", line)) is not None:
        return replace(Evaluation.of(report), answers=recorded_answers(line))
    unscored = line.get("pass_rate") is None and line.get("mean_reward") is None and line.get("unknown")
    report = eval_report("node", {**line, "mean_reward": 0.0}) if unscored else None
    return None if report is None else replace(Evaluation.of(report), mean_reward=None)


def read_unknown(node_dir: Path) -> Counter[tuple[str, str]]:
    """Count the local answers that left their groups because their reward is unknown, by dataset
    and cause, as all replicas of the node's verifier have counted them.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for line in (line for path in unknown_files(node_dir) for line in read_jsonl(path)):
        answers: Any = line.get("answers")
        if _is_number(answers) and answers > 0:
            counts[str(line.get("dataset")), str(line.get("cause"))] += int(answers)
    return counts


FEWEST_GROUPS, MOSTLY, OFTEN_CUT_OFF, ALL_CUT_OFF = 16, 0.65, 0.25, 0.995
ALIKE_KINDS = ("of", "right", "wrong", "alike", "cut_off")


def alike_words(alike: Mapping[str, float], node: str) -> str:
    """Why most of the last groups taught nothing, or that most of their answers were cut off, and
    what to change; empty if neither is so. alike: by `ALIKE_KINDS`, as in `FigureFamily.ALIKE`.
    """
    groups, flat = alike["of"], {kind: alike[kind] for kind in ("wrong", "right", "alike")}
    longer = "raise generator.max_new_tokens, or ask for shorter answers"
    if groups < FEWEST_GROUPS:
        return ""
    if sum(flat.values()) < MOSTLY * groups:
        part = alike["cut_off"]
        if part >= ALL_CUT_OFF:  # so rewards that differ are those of answers that were cut off
            limit = f"every answer of the last {groups:,.0f} groups ran to the limit (generator.max_new_tokens)"
            return f"{limit}: the model does not stop by itself, and rewards are given all the same"
        return f"{part:.0%} of the last {groups:,.0f} groups' answers were cut off: {longer}" if part >= MOSTLY else ""
    names = {"wrong": "all wrong", "right": "all right", "alike": "of equal rewards"}
    told = ", ".join(f"{flat[kind]:,.0f} {names[kind]}" for kind in flat if flat[kind])
    remedies = {
        "wrong": f"read some (`swarm rollouts {node} --wrong`): if they are right, mend the verifier or ask for the form of the "
        "answer in model.system_prompt; else train on easier questions",
        "right": "train on harder questions",
        "alike": f"read some (`swarm rollouts {node}`): the reward gives them all the same",
    }
    cut_off = f"; {alike['cut_off']:.0%} of the answers were cut off" if alike["cut_off"] >= OFTEN_CUT_OFF else ""
    earned = alike["cut_off"] >= ALL_CUT_OFF and sum(flat.values()) < groups
    too_long = alike["cut_off"] >= 2 * OFTEN_CUT_OFF and not flat["right"] and not earned
    remedy = longer if too_long else remedies[max(flat, key=flat.__getitem__)]
    return f"of the last {groups:,.0f} groups, {told}{cut_off}, which teaches nothing: {remedy}"


def local_only_words(figures: Mapping[str, float]) -> list[str]:
    """Sentences about sources of which no foreign group is taken, from a verifier's figures."""
    numbers = {why: figures.get(FigureFamily.LOCAL_ONLY.of(why), 0.0) for why in LocalOnly}
    return [
        f"{number:,.0f} {'source is' if number == 1 else 'sources are'} local only (no group of another node is taken): {why.words}"
        for why, number in numbers.items()
        if number
    ]


OFTEN_BONUS = 0.25


def bonus_words(alike: Mapping[str, float], bonus: Mapping[str, float]) -> str:
    """Say that in most of the last groups that taught anything no answer was right, so that a bonus
    alone was learned, and what to change; empty if it is not so. bonus: as in `FigureFamily.BONUS`.
    """
    groups, found = alike["of"], sum(bonus.values())
    taught = groups - sum(alike[kind] for kind in ("wrong", "right", "alike"))
    if groups < FEWEST_GROUPS or found < OFTEN_BONUS * groups or found < taught / 2:
        return ""
    names = sorted({visible(name, 40) for names in bonus if bonus[names] for name in names.split(", ")})
    told, many = ", ".join(names[:4]), len(names) > 1
    it, its = ("they", "their weights do") if many else ("it", "its weight does")
    return (
        f"{found:,.0f} of the last {groups:,.0f} groups had no right answer, and there only {told} differed: {it} alone "
        f"{'were' if many else 'was'} learned, since {its} not count within a group. Give {'them' if many else 'it'} to right "
        f"answers only, train on easier questions, or drop {'them' if many else 'it'}"
    )


def group_notes(figures: Mapping[str, float], node: str) -> list[str]:
    """Sentences about a trainer's last groups (`bonus_words`, `alike_words`), from its figures."""
    alike = {kind: figures.get(FigureFamily.ALIKE.of(kind), 0.0) for kind in ALIKE_KINDS}
    bonus = {names: number for figure, number in figures.items() if (names := FigureFamily.BONUS.what(figure))}
    return list(filter(None, [bonus_words(alike, bonus), alike_words(alike, node)]))


def bonus_of_steps(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The numbers of `bonus_words`, of the steps of `alike_of_steps`."""
    found = Counter[str]()
    groups = 0
    for step in reversed(steps):
        local, bonus = step.get("groups_local"), step.get("bonus_of")
        if not isinstance(bonus, dict) or not all(map(_is_number, (local, *bonus.values()))):
            break
        found.update(bonus)
        groups += local or 0
        if groups >= 2 * FEWEST_GROUPS:
            break
    return dict(found)


def alike_of_steps(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The numbers of `alike_words` for the newest steps of `metrics.jsonl` with enough groups."""
    found = dict.fromkeys(ALIKE_KINDS, 0.0)
    for step in reversed(steps):
        groups, alike, cut_off = step.get("groups_local"), step.get("alike_of"), step.get("cut_off_share") or 0.0
        if not isinstance(alike, dict) or not all(map(_is_number, (groups, cut_off, *alike.values()))):
            break
        for kind in ("right", "wrong", "alike"):
            found[kind] += alike.get(kind, 0)
        found["of"] += groups
        found["cut_off"] += groups * cut_off
        if found["of"] >= 2 * FEWEST_GROUPS:
            break
    found["cut_off"] /= max(1.0, found["of"])
    return found


def _is_number(value: Any) -> bool:
    """Check whether `value` is a number that fits into 64 bits, which JSON's need not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63
