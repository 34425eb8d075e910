"""The result of a run, in a few lines per node: pure functions over its steps and evaluations, and
`run_verdicts`, which reads them for every display of a run that has ended.

While a run is running, the same symptoms raise alerts (`k8s/components/monitoring/rules`).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from shared.paired import Pairs, paired
from shared.rewards import Mark
from shared.run_records import EVAL_FILE, reward_changes, unreadable
from shared.text import visible
from swarm_cli.file_names import FileNames, file_names
from swarm_cli.observe.run_files import (
    NO_PASS_SHOWN,
    Evaluation,
    alike_of_steps,
    alike_words,
    bonus_of_steps,
    bonus_words,
    compared,
    margin,
    read_evaluations,
    read_steps,
    read_unknown,
    set_lines,
    unsaved_words,
)

FEWEST_STEPS = 8
"""With fewer steps, only the held-out tasks are judged, and whether any step changed the
weights.
"""
FEWEST_TASKS = 16
"""A pass rate on fewer held-out tasks says nothing."""
REWARD_ERRORS = 3.0
"""Standard errors: of runs without any change, at most one in fifty falls by this many."""
SHORT_RUN_STEPS = 8
"""A run of this many steps must fall by twice as many standard errors: their size is estimated from
few steps, and the reward of the first dozen wanders.
"""
REWARD_PART = 0.5
REWARD_DROP = 0.05
ENTROPY_NATS = 0.02
"""Below it a policy nearly always gives the same answer; the demos' good policies have
0.05 to 0.2.
"""
ENTROPY_PART = 0.5
"""Part of the first value: a policy that was already this certain before training has not
collapsed.
"""
SOLVED_REWARD = 0.9
"""A policy that is nearly always right may be certain."""
ENTROPY_FACTOR = 3.0
ENTROPY_RISE_NATS = 1.0
KL_NATS = 0.5
"""KL between the policy that sampled and the one being trained; in the demos it stays
below 0.06.
"""
KL_STEPS = 3
GRADIENT_FACTOR = 20.0
UNCHANGED_PART = 0.5
REMEDY = "remedy: docs/runbooks/{page}.md; most often a lower trainer.learning_rate"


UNKNOWN_REMEDY = "remedy: `swarm config check` tries the verifier; verifier.log says what it did"


class Outcome(StrEnum):
    """The judgement of a run."""

    LEARNED = "learned"
    FELL = "fell"
    UNCLEAR = "unclear"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A run's outcome. `reasons`: first what the held-out tasks say, then symptoms of failure and
    notes.
    """

    outcome: Outcome
    reasons: tuple[str, ...]

    def lines(self) -> list[str]:
        """Such as `learned: held-out 0.655, +0.565 over the base policy`, followed by a line for
        each symptom and for the remedy.
        """
        words = {
            Outcome.LEARNED: "learned",
            Outcome.FELL: "learned, and fell from its best",
            Outcome.UNCLEAR: "no clear gain",
            Outcome.FAILED: "LEARNING FAILS",
            Outcome.UNKNOWN: "not judged",
        }[self.outcome]
        first, *symptoms = self.reasons
        remedy = [REMEDY.format(page=self._page())] if self.outcome is Outcome.FAILED else []
        return [f"{words}: {first}", *symptoms, *remedy]

    def _page(self) -> str:
        """The runbook for what is wrong: by the held-out tasks, else by the first symptom."""
        return next((page for words, page in _RUNBOOKS for reason in self.reasons if reason.startswith(words)), _RUNBOOKS[0][1])


def verdict(
    steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Evaluation], lost: str = "", folder: Path | None = None
) -> Verdict:
    """Judge a node's run. `steps` are lines of `metrics.jsonl` in order, `evaluations` by policy
    version; either may be empty. lost: a sentence about evaluations that cannot be read. folder:
    the node's, for commands.
    """
    outcome, held_out, *_ = held_out_verdict(evaluations, lost, folder)
    changed = _changed_words(steps, evaluations)
    steps = _judged_alike(steps, evaluations)
    symptoms = [found for look in _SYMPTOMS if len(steps) >= FEWEST_STEPS and (found := look(steps))]
    notes = [note for look in _NOTES if (note := look(steps))]
    notes += [changed] if changed else []
    notes += [lost] if lost and lost not in held_out else []
    if symptoms and outcome is not Outcome.LEARNED:
        outcome = Outcome.FAILED
    return Verdict(outcome, (held_out, *symptoms, *notes))


def run_verdicts(run_dir: Path, nodes: Sequence[str], *, ended: bool = False) -> list[str]:
    """The verdicts on a run's nodes, as lines; none for a node that has written nothing. ended: as
    for `node_verdict`.
    """
    lines = []
    for node in nodes:
        told = [*filter(None, node_verdict(run_dir / node, ended=ended)), *set_lines(run_dir / node)]
        lines += [f"{visible(node)}: {told[0]}", *(f"  {text}" for text in told[1:])] if told else []
    return lines


def node_verdict(folder: Path, *, ended: bool = False) -> tuple[str, ...]:
    """The verdict on the node of this folder: its judgement, empty if there is nothing to judge,
    and then a sentence for each reason, with its remedy. ended: the run has ended, so what no
    checkpoint contains was not saved.
    """
    steps, evaluations, counts = read_steps(folder), read_evaluations(folder), read_unknown(folder)
    lost = unreadable(folder / EVAL_FILE)
    judgement, *reasons = verdict(steps, evaluations, lost, folder).lines() if steps or evaluations or lost else [""]
    alike = alike_of_steps(steps)
    why = [
        bonus_words(alike, bonus_of_steps(steps)),  # the cause of a fall follows the judgement
        alike_words(alike, folder.name),
        unsaved_words(folder) if ended else "",
        *reasons,
        _untrained(steps, counts),
        *_unknown(counts, evaluations, file_names(folder.parent)),
    ]
    return judgement, *filter(None, why)


class HeldOutVerdict(NamedTuple):
    """The judgement of a node by its held-out tasks alone. `words`: a sentence. `chance`: how far
    apart by chance the newest score and the base policy's may be; None if they cannot be judged.
    `pairs`: what changed question by question, where both evaluations' answers are on record.
    """

    outcome: Outcome
    words: str
    chance: float | None = None
    pairs: Pairs | None = None


def held_out_verdict(evaluations: Sequence[Evaluation], lost: str = "", folder: Path | None = None) -> HeldOutVerdict:
    """Judge a node by its evaluations, in order of policy version. lost, folder: as for
    `verdict`.
    """
    if evaluations and not evaluations[-1].n and evaluations[-1].unknown:
        last = evaluations[-1]
        words = f"none of the {last.unknown:,} held-out answers of version {last.policy_version} has a known reward"
        return HeldOutVerdict(Outcome.UNKNOWN, words)
    comparison = compared(evaluations)
    newest, base, alike = comparison.newest, comparison.base, comparison.alike
    if comparison.why_no_base:
        return HeldOutVerdict(Outcome.UNKNOWN, comparison.why_no_base)
    if newest is None or base is None or len(alike) < 2:
        return HeldOutVerdict(Outcome.UNKNOWN, lost or _missing(evaluations, folder))
    if newest.pass_rate is None or base.pass_rate is None:
        best = max(alike, key=lambda each: each.mean_reward or 0.0)
        words = f"held-out mean reward {_mean(newest)}, of the base policy {_mean(base)}"
        if best.policy_version not in (newest.policy_version, base.policy_version):
            words += f", at its best {_mean(best)} at version {best.policy_version}"
        return _by_reward(newest, base, words) or HeldOutVerdict(Outcome.UNKNOWN, f"{words}; {NO_PASS_SHOWN}")
    best = max(alike, key=lambda each: each.pass_rate or 0.0)
    fewest = min((base, newest, best), key=lambda each: each.n)
    if fewest.n < FEWEST_TASKS:
        return HeldOutVerdict(Outcome.UNKNOWN, _too_few(fewest))
    if best.pass_rate == 0 and base.mean_reward is not None and (newest.mean_reward or base.mean_reward):
        words = f"no answer had full marks (a pass); mean held-out reward {_mean(newest)}, of the base policy {_mean(base)}"
        return _by_reward(newest, base, words) or HeldOutVerdict(Outcome.UNKNOWN, words)
    pairs, gain = paired(base.answers, newest.answers), newest.pass_rate - base.pass_rate
    chance, changed = (margin(newest, base, 2), "") if pairs is None else (pairs.chance, f": {pairs.words}")
    beyond = 0 if abs(each := gain if pairs is None else pairs.gain) <= chance else math.copysign(1, each)
    if beyond < 0:
        words = f"held-out fell below the base policy's, from {base.pass_rate:.3f} to {newest.pass_rate:.3f}{changed}"
        return HeldOutVerdict(Outcome.FAILED, words, chance, pairs)
    if (best.pass_rate or 0.0) - newest.pass_rate > margin(best, newest, 2 * len(alike)):
        words = f"held-out fell from its best, {best} at version {best.policy_version}, to {newest.pass_rate:.3f}"
        outcome = Outcome.FELL if beyond else Outcome.FAILED
        return HeldOutVerdict(outcome, f"{words} (base {base.pass_rate:.3f})", chance, pairs)
    words = f"held-out {newest.pass_rate:.3f}, {gain:+.3f} over the base policy{changed}"
    if beyond:
        return HeldOutVerdict(Outcome.LEARNED, words, chance, pairs)
    return HeldOutVerdict(Outcome.UNCLEAR, f"{words}; chance explains up to {chance:.3f} on {newest.n} tasks", chance, pairs)


def _by_reward(newest: Evaluation, base: Evaluation, words: str) -> HeldOutVerdict | None:
    """The judgement by mean rewards; None without the answers to each question, because their
    spread is not known then.
    """
    pairs = paired(base.answers, newest.answers, by_reward=True)
    if pairs is None or pairs.n < FEWEST_TASKS:
        return None
    outcome = Outcome.UNCLEAR if abs(pairs.gain) <= pairs.chance else Outcome.LEARNED if pairs.gain > 0 else Outcome.FAILED
    fell = "it fell below the base policy's: " if outcome is Outcome.FAILED else ""
    return HeldOutVerdict(outcome, f"{fell}{words}: {pairs.gain:+.3f} ({pairs.words})", pairs.chance, pairs)


def _judged_alike(steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Evaluation]) -> Sequence[Mapping[str, Any]]:
    """The steps since the newest evaluation on other questions or with another reward, and since
    the reward was changed, because rewards of both cannot be compared either.
    """
    changes = reward_changes([step.get("scorer") for step in steps])
    steps = [step for step, before in zip(steps, changes, strict=True) if before == changes[-1]]
    measures = [(each.held_out, each.scorer) for each in evaluations]
    others = [each.policy_version for each, measure in zip(evaluations, measures, strict=True) if measure != measures[-1]]
    since = max(others, default=-1)
    return [step for step in steps if step["step"] > since] if others else steps


def _changed_words(steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Evaluation]) -> str:
    """Say from which step on another reward was trained on; empty if none was."""
    changes = reward_changes([step.get("scorer") for step in steps])
    if not any(changes):
        return ""
    since = steps[changes.index(changes[-1])]["step"]
    told = f"the reward was changed before step {since:,}: training rewards before and since cannot be compared"
    versions = [each.policy_version for each in evaluations]
    if versions and versions[0] < since <= versions[-1] and len({each.scorer for each in evaluations}) == 1:
        told += "; the held-out scores are all by one reward, so the generator did not read the change"
    return told


def _too_few(evaluation: Evaluation) -> str:
    """Why an evaluation's answers are too few to be judged."""
    asked = evaluation.n + evaluation.unknown
    if asked < FEWEST_TASKS:
        return f"{asked} held-out tasks are too few: set eval.tasks to {FEWEST_TASKS} or more"
    left = f"only {evaluation.n} of {asked} held-out answers have a known reward, and {FEWEST_TASKS} are needed"
    return f"{left}: verifier.log and generator.log say why the other {evaluation.unknown} have none"


def _mean(evaluation: Evaluation) -> str:
    return "–" if evaluation.mean_reward is None else f"{evaluation.mean_reward:.3f}"


def _untrained(steps: Sequence[Mapping[str, Any]], counts: Mapping[tuple[str, str], int]) -> str:
    """Say if unknown rewards left nothing to train on; empty if they did not."""
    if steps or not counts:
        return ""
    if {cause for _, cause in counts} == {Mark.NOT_APPLICABLE.cause}:
        return f"no step was trained, and nothing can be learnt: the reward returned None for all {sum(counts.values()):,} answers"
    return "no step was trained"


def _missing(evaluations: Sequence[Evaluation], folder: Path | None) -> str:
    """Say which evaluation a judgement lacks."""
    command = "`swarm eval` of the node's folder" if folder is None else f"`swarm eval {shlex.quote(str(folder))}`"
    how = f"{command} evaluates the newest checkpoint"
    if not evaluations:
        return f"no held-out evaluation is on record (eval.tasks): {how}"
    if evaluations[-1].policy_version == 0:
        return f"nothing was evaluated after step 0 (eval.every_versions): {how}"
    return "the base policy was not evaluated, so there is nothing to compare with"


def _unknown(counts: Mapping[tuple[str, str], int], evaluations: Sequence[Evaluation], names: FileNames) -> list[str]:
    """Sentences about answers whose reward is unknown."""
    by_source = [
        f"{answers:,} of {visible(names.shown(dataset), 64)} ({visible(cause, 32)})" for (dataset, cause), answers in counts.items()
    ]
    told = [f"answers whose reward is unknown, so they taught nothing: {', '.join(by_source)}"] if counts else []
    short = [each for each in evaluations if each.unknown]
    if short:
        left_out, asked = sum(each.unknown for each in short), sum(each.n + each.unknown for each in short)
        told.append(
            f"{left_out:,} of {asked:,} held-out answers, in {len(short):,} of {len(evaluations):,} evaluations, have no known "
            "reward and are left out, so these scores may be of different questions"
        )
    return [*told, UNKNOWN_REMEDY] if told else []


def _numbers(steps: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Values of a field, without the steps in which it was not measured (null)."""
    values = (step.get(name) for step in steps)
    return [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]


def _ends(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]] | None:
    """The first and the last quarter; None if there are too few values to compare."""
    quarter = len(values) // 4
    return (values[:quarter], values[-quarter:]) if quarter >= 2 else None


def _reward(steps: Sequence[Mapping[str, Any]]) -> str | None:
    """Compare the last quarter with the best of the three before it.

    The error of the two means is estimated from the differences between successive steps. A trend
    hardly adds to those, so a collapse does not hide itself, and even a short run uses all steps.
    """
    values = _numbers(steps, "reward_local")
    if (ends := _ends(values)) is None:
        return None
    size = len(ends[1])
    best, last = max(fmean(values[at * size : (at + 1) * size]) for at in range(3)), fmean(ends[1])
    variance = fmean((later - earlier) ** 2 / 2 for earlier, later in zip(values, values[1:], strict=False))
    errors = REWARD_ERRORS * (1 + SHORT_RUN_STEPS / len(values))
    drop = best - last
    falls = last < REWARD_PART * best and drop > max(REWARD_DROP, errors * math.sqrt(2 * variance / size))
    return f"the reward of local groups fell from {best:.3f}, its best quarter, to {last:.3f}" if falls else None


def _entropy(steps: Sequence[Mapping[str, Any]]) -> str | None:
    """Entropy that collapsed, unless the policy is nearly always right; or that rose to random."""
    values, rewards = _numbers(steps, "entropy"), _ends(_numbers(steps, "reward_local"))
    if len(values) < 2:
        return None
    ends = _ends(values) or (values[:1], values[-1:])
    first, last = fmean(ends[0]), fmean(ends[1])
    if last < min(ENTROPY_NATS, ENTROPY_PART * first) and (rewards is None or fmean(rewards[1]) < SOLVED_REWARD):
        return f"the policy's entropy collapsed, from {first:.3f} to {last:.3f} nats per token"
    if last > ENTROPY_FACTOR * first and last - first > ENTROPY_RISE_NATS:
        return f"the policy's entropy rose from {first:.2f} to {last:.2f} nats per token: it answers at random"
    return None


def _divergence(steps: Sequence[Mapping[str, Any]]) -> str | None:
    values = _numbers(steps, "kl_behaviour")
    size = min(KL_STEPS, len(values))
    worst = max((fmean(values[at : at + size]) for at in range(len(values) - size + 1)), default=0.0) if size else 0.0
    if worst <= KL_NATS:
        return None
    return f"the policy moved {worst:.1f} nats per token away from the one that sampled (KL), over {size} steps"


def _gradient(steps: Sequence[Mapping[str, Any]]) -> str | None:
    ends = _ends(_numbers(steps, "grad_norm"))
    if ends is None:
        return None
    first, last = median(ends[0]), median(ends[1])
    return f"the gradient's norm rose from {first:.2g} to {last:.2g}" if last > GRADIENT_FACTOR * first > 0 else None


def _unchanged(steps: Sequence[Mapping[str, Any]]) -> str | None:
    """Most steps changed nothing, or of a short run every one: then nothing was trained. A note,
    not a failure: in most groups all answers were right or all were wrong.
    """
    without = sum(step.get("updated") is False for step in steps)
    every = bool(steps) and without == len(steps)
    rewards = _ends(_numbers(steps, "reward_local"))
    solved = rewards is not None and fmean(rewards[1]) >= SOLVED_REWARD
    most = len(steps) >= FEWEST_STEPS and without > UNCHANGED_PART * len(steps) and not solved
    if not every and not most:
        return None
    of = f"{without} of {len(steps)} step{'' if len(steps) == 1 else 's'}"
    nothing = "; nothing was trained" if every else ""
    return f"{of} did not change the weights: the rewards in their groups did not differ{nothing}"


_SYMPTOMS: tuple[Callable[[Sequence[Mapping[str, Any]]], str | None], ...] = (_reward, _entropy, _divergence, _gradient)
_NOTES = (_unchanged,)
_RUNBOOKS = (
    ("held-out fell below", "SwarmHeldOutBelowBase"),
    ("held-out fell from", "SwarmHeldOutFalling"),
    ("the reward of local groups", "SwarmRewardFalling"),
    ("the policy's entropy", "SwarmEntropyCollapsed"),
    ("the policy moved", "SwarmPolicyDiverges"),
    ("the gradient's norm", "SwarmGradientNormHigh"),
)
"""How a reason begins, and the page about it."""
