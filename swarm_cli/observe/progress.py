"""The progress view's rows, and the decision when a run is complete. Pure functions over node
views; time is an argument.

Lines are plain, without cursor movement, because honcho puts a prefix before each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shared.contracts.status_figures import StatusFigure
from shared.roles import ROLES
from shared.text import visible
from swarm_cli.observe.evaluations import NO_PASS_SHOWN, Evaluation, gain_of
from swarm_cli.observe.standing import absent, finished, none_taken, trouble
from swarm_cli.observe.view import NodeView

HEADER = (
    f"{'time':>7}  {'node':<9}{'step':>6}{'steps/min':>10}{'reward':>7}{'held-out':>9}{'(base)':>7}"
    f"{'made':>6}{'shared':>7}{'taken':>6}{'refused':>8}{'stale':>6}  state"
)
SUMMARY_HEADER = (
    f"{'node':<9}{'steps':>6}{'held-out':>10}{'base':>8}{'gain':>8}{'tasks':>7}{'made':>6}{'shared':>7}{'taken':>6}{'refused':>8}"
)
LEGEND = (
    "reward: mean over the newest step's local groups; held-out: pass rate on tasks never trained on\n"
    "(r: mean reward, as no pass is defined), (base): that of the base policy; made, shared, taken,\n"
    "refused: rollout groups since each service started, updated every 2 s (so shared may be ahead of\n"
    "made); stale: policy versions between sampling and use"
)
_RATE_WINDOW_S = 60.0
LINE_CHARACTERS = 100
STATE_CHARACTERS = 80


class StepRate:
    """One node's steps per minute, over the last minute, and since it last fell back: a trainer
    that was killed takes the steps after its checkpoint again.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def update(self, now: float, step: int) -> float | None:
        """Record `step` at `now` (seconds). Returns the rate, or None at the first call and after a
        fall.
        """
        if self._seen and step < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now, step))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _RATE_WINDOW_S:
            self._seen.popleft()
        elapsed_s = now - self._seen[0][0]
        return 60.0 * (step - self._seen[0][1]) / elapsed_s if elapsed_s > 0 else None


@dataclass(frozen=True, slots=True)
class Row:
    """One node's line of the progress view."""

    view: NodeView
    evaluations: Sequence[Evaluation]
    steps_per_minute: float | None
    staleness: float | None = None
    """Mean over the newest step's local groups, in policy versions."""
    since: float = 0.0
    """Unix time. Processes that have not reported since are of an earlier start of the run."""

    def lines(self, elapsed_s: float, now: float) -> list[str]:
        """The line under `HEADER`, with a second line if the state is too long for the first."""
        view = self.view
        newest, base = newest_evaluation(view, self.evaluations), base_evaluation(self.evaluations)
        figures = (
            f"{_clock(elapsed_s):>7}  {visible(view.node):<9}{view.step:>6}{_number(self.steps_per_minute, 10, 1)}"
            f"{_number(view.newest('trainer', StatusFigure.REWARD_LOCAL), 7, 3)}"
            f"{_score(newest):>9}{_score(base):>7}"
            f"{_groups(view, self.since)}{_number(self.staleness, 6, 2)}"
        )
        words = visible(state(view, now), STATE_CHARACTERS)
        line = f"{figures}  {words}"
        return [line] if len(line) <= LINE_CHARACTERS else [figures, f"{'':>9}{words}"]


def newest_evaluation(view: NodeView, evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """The evaluation of the highest policy version, from the bucket or the run's folder."""
    known = list(evaluations)
    if view.evaluation:
        known.append(Evaluation.of(view.evaluation))
    return max(known, key=lambda evaluation: evaluation.policy_version, default=None)


def base_evaluation(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """The evaluation of version 0, the base policy."""
    return next((evaluation for evaluation in evaluations if evaluation.policy_version == 0), None)


def state(view: NodeView, now: float) -> str:
    """What the node is doing, or which of its services do not answer."""
    missing = [role for role in ROLES if not view.alive(role, now)]
    if len(missing) == len(ROLES) or (missing and (view.step == 0 or view.loading(now))):
        return "starting: waiting for " + ", ".join(missing)
    if missing:
        return ", ".join(absent(view, now))
    still = trouble(view, now)
    if still:
        return ", ".join(still)
    none = "" if finished(view) else none_taken(view, now)
    return view.alive("trainer", now)[0].state + (f", {none}" if none else "")


def steps_done(views: Sequence[NodeView], steps: int) -> bool:
    """Whether every node's trainer has taken `steps` steps and published the last step's policy."""
    taken = [min(view.position.policy_version, view.version) if view.position is not None else 0 for view in views]
    return bool(taken) and min(taken) >= steps


def evaluations_done(views: Sequence[NodeView], steps: int) -> bool:
    """Whether, for every node, the policy after `steps` steps or a later one was evaluated."""
    return all(view.evaluation is not None and view.evaluation.policy_version >= steps for view in views)


def summary(rows: Sequence[Row], *, went_on: bool = False) -> list[str]:
    """The closing table. went_on: whether the run was started before, under the same name."""
    lines = [SUMMARY_HEADER]
    for row in rows:
        newest, base = newest_evaluation(row.view, row.evaluations), base_evaluation(row.evaluations)
        lines.append(
            f"{visible(row.view.node):<9}{row.view.step:>6}{_score(newest):>10}"
            f"{_score(base):>8}{_number(gain_of(newest, base), 8, 3, sign=True)}{newest.n if newest else 0:>7}"
            f"{_groups(row.view, row.since)}"
        )
        if newest and newest.pass_rate is None:
            lines.append(f"({NO_PASS_SHOWN})")
    if went_on:
        lines.append("(made, shared, taken, refused: since this start; shared may include groups made before it)")
    return lines


def _score(evaluation: Evaluation | None) -> str:
    return "–" if evaluation is None else str(evaluation)


def _groups(view: NodeView, since: float) -> str:
    """Groups made, shared, taken in and refused."""
    made = view.total("generator", StatusFigure.GROUPS_GENERATED, since)
    verified = (StatusFigure.SHARED, StatusFigure.ACCEPTED, StatusFigure.REFUSED)
    shared, taken, refused = (view.total("verifier", figure, since) for figure in verified)
    return f"{made:>6.0f}{shared:>7.0f}{taken:>6.0f}{refused:>8.0f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _number(value: float | None, width: int, digits: int, *, sign: bool = False) -> str:
    if value is None:
        return f"{'–':>{width}}"
    return f"{value:>{'+' if sign else ''}{width}.{digits}f}"
