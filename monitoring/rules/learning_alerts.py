"""Alerts on learning that fails while steps go on. The same symptoms end up in the verdict on a run
(`swarm_cli.observe.verdict`).
"""

from __future__ import annotations

from monitoring.rules.base import NODE_DASHBOARD, SWARM_DASHBOARD, Alert, Severity

_NEWEST = "node:swarm_held_out_pass_ratio:latest"
_BEST = f"max_over_time({_NEWEST}[1d])"
_BASE = "max by (job, node) (swarm_held_out_base_pass_ratio)"
_TASKS = "max by (job, node) (swarm_held_out_tasks)"
_ENOUGH = f"and on (job, node) ({_TASKS} >= 16)"
"""A pass rate of fewer tasks says nothing."""


def _error(other: str, matching: str = "") -> str:
    """The standard error of the difference between the newest pass rate and `other`."""
    variance = f"{_NEWEST} * (1 - {_NEWEST}) + {matching} (({other}) * (1 - ({other})))"
    return f"sqrt(({variance}) / on (job, node) group_left () ({_TASKS}))"


_REWARD = "node:swarm_local_reward:mean15m"
_AT_MOST = f"({_REWARD} + 2 * node:swarm_local_reward:error15m)"
"""What the reward of a node's answers may be, chance allowed for."""


def _collapsed(window: str) -> str:
    """Nodes whose mean entropy over the window is near zero by more than its steps vary."""
    steps = _steps(window)
    error = f"max by (job, node) (stddev_over_time(swarm_trainer_entropy_nats[{window}])) / sqrt({steps})"
    return f"(max by (job, node) (avg_over_time(swarm_trainer_entropy_nats[{window}])) < 0.02 - 2 * {error} and {steps} >= 4)"


def _steps(window: str) -> str:
    return f"sum by (job, node) (increase(swarm_trainer_steps_total[{window}]))"


RULES: tuple[Alert, ...] = (
    Alert(
        name="SwarmHeldOutBelowBase",
        expr=f"""
        ((0 - node:swarm_held_out_gain:latest) > clamp_min(2 * {_error(_BASE, "on (job, node) group_left ()")}, 0.02))
        {_ENOUGH}
        """,
        hold="5m",
        severity=Severity.CRITICAL,
        summary="{{ $labels.node }} answers {{ $value | humanizePercentage }} of the held-out tasks less than its base policy",
        description="Training has made the policy of {{ $labels.node }} worse than the one it began with, by more than chance "
        "explains for a set of this size.",
        dashboard=SWARM_DASHBOARD,
        soon=True,
    ),
    Alert(
        name="SwarmHeldOutFalling",
        # Three errors, not two: the best of a day is the best of many.
        expr=f"""
        (({_BEST} - {_NEWEST}) > clamp_min(3 * {_error(_BEST)}, 0.05))
        {_ENOUGH}
        """,
        hold="15m",
        severity=Severity.WARNING,
        summary="Held-out pass rate of {{ $labels.node }} is {{ $value | humanizePercentage }} below the run's best of the day",
        description="The newest evaluated policy of {{ $labels.node }} answers {{ $value | humanizePercentage }} of the held-out "
        "tasks less than the best of this run in the last "
        "24 hours: more than chance explains for a set of this size.",
        dashboard=SWARM_DASHBOARD,
    ),
    Alert(
        name="SwarmRewardFalling",
        # What the reward may be now is compared with what its best was at least.
        expr=f"""
        ({_REWARD} < 0.5 * max_over_time({_REWARD}[6h]))
        and
        (max_over_time({_REWARD}[6h]) - {_REWARD} > 0.05)
        and
        ({_AT_MOST} < max_over_time(node:swarm_local_reward:least15m[6h]))
        """,
        hold="10m",
        severity=Severity.WARNING,
        summary="Reward of {{ $labels.node }}'s own answers has fallen to {{ $value | humanizePercentage }}",
        description="The mean reward of the answers of {{ $labels.node }} is less than half of the best that this run had in the "
        "last six hours, by more than chance explains for so many groups: the policy gets worse at the tasks that it trains on.",
        dashboard=NODE_DASHBOARD,
    ),
    Alert(
        name="SwarmEntropyCollapsed",
        # Slow steps are too few in a quarter of an hour, and are judged by the last hour's.
        expr=f"""
        (
          {_collapsed("15m")}
          or
          ({_collapsed("1h")} unless {_steps("15m")} >= 4)
        )
        unless on (job, node) ({_AT_MOST} > 0.9)
        """,
        hold="10m",
        severity=Severity.WARNING,
        summary='Entropy of {{ $labels.node }}\'s policy is {{ $value | printf "%.3f" }} nats a token',
        description="The policy of {{ $labels.node }} gives nearly always the same answer, and not the right one: the answers of "
        "a group do not differ, and nothing better is found.",
        dashboard=NODE_DASHBOARD,
    ),
    Alert(
        name="SwarmPolicyDiverges",
        expr="max by (job, node) (avg_over_time(swarm_trainer_kl_behaviour_nats[5m])) > 0.5",
        hold="1m",
        severity=Severity.WARNING,
        summary='The policy of {{ $labels.node }} moved {{ $value | printf "%.1f" }} nats a token from the one that sampled',
        description="The policy that {{ $labels.node }} trains is far from the one that sampled the answers it is trained on (KL "
        "divergence; a healthy run stays below a tenth of this): steps are too large, or generator and trainer disagree.",
        dashboard=NODE_DASHBOARD,
        soon=True,
    ),
    Alert(
        name="SwarmGradientNormHigh",
        expr="""
        quantile_over_time(0.5, node:swarm_trainer_grad_norm:max[15m])
        > 20 * (quantile_over_time(0.5, node:swarm_trainer_grad_norm:max[6h] offset 15m) > 0)
        """,
        hold="10m",
        severity=Severity.WARNING,
        summary='Gradient norm of {{ $labels.node }} is {{ $value | printf "%.1f" }}',
        description="The median norm of the gradients of {{ $labels.node }} is more than twenty times that of the run's hours "
        "before. They are clipped (trainer.grad_clip), and what is left of them is mostly noise.",
        dashboard=NODE_DASHBOARD,
    ),
)
