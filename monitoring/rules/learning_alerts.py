"""Alerts on learning that fails although the trainer keeps taking steps. The verdict on a run
reports the same symptoms (`swarm_cli.observe.verdict`).
"""

from __future__ import annotations

from monitoring.rules.base import NODE_DASHBOARD, SWARM_DASHBOARD, Alert, Severity

_NEWEST = "node:swarm_held_out_pass_ratio:latest"
_BEST = f"max_over_time({_NEWEST}[1d])"
_BASE = "max by (job, node) (swarm_held_out_base_pass_ratio)"
_TASKS = "max by (job, node) (swarm_held_out_tasks)"
_ENOUGH = f"and on (job, node) ({_TASKS} >= 16)"
"""A pass rate over fewer tasks is too noisy to judge."""


def _error(other: str, matching: str = "") -> str:
    """The standard error of the difference between the newest pass rate and `other`."""
    variance = f"{_NEWEST} * (1 - {_NEWEST}) + {matching} (({other}) * (1 - ({other})))"
    return f"sqrt(({variance}) / on (job, node) group_left () ({_TASKS}))"


_REWARD = "node:swarm_local_reward:mean15m"
_AT_MOST = f"({_REWARD} + 2 * node:swarm_local_reward:error15m)"
"""Upper bound on the reward of a node's answers, allowing for chance."""


def _collapsed(window: str) -> str:
    """Nodes whose mean entropy over the window is below 0.02 by more than chance explains."""
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
        summary="{{ $labels.node }}'s held-out pass rate is {{ $value | humanizePercentage }} below that of its base policy",
        description="Training has made {{ $labels.node }}'s policy worse than its base policy, by more than chance explains "
        "for this number of held-out tasks.",
        dashboard=SWARM_DASHBOARD,
        soon=True,
    ),
    Alert(
        name="SwarmHeldOutFalling",
        # Three standard errors, not two: the day's best is the maximum of many evaluations, so
        # chance raises it.
        expr=f"""
        (({_BEST} - {_NEWEST}) > clamp_min(3 * {_error(_BEST)}, 0.05))
        {_ENOUGH}
        """,
        hold="15m",
        severity=Severity.WARNING,
        summary="{{ $labels.node }}'s held-out pass rate is {{ $value | humanizePercentage }} below the run's best of the last day",
        description="The newest evaluated policy of {{ $labels.node }} has a held-out pass rate {{ $value | humanizePercentage "
        "}} below this run's best of the last 24 hours, more than chance explains for this number of tasks.",
        dashboard=SWARM_DASHBOARD,
    ),
    Alert(
        name="SwarmRewardFalling",
        # Compares the upper bound of the present reward with the lower bound of the best one.
        expr=f"""
        ({_REWARD} < 0.5 * max_over_time({_REWARD}[6h]))
        and
        (max_over_time({_REWARD}[6h]) - {_REWARD} > 0.05)
        and
        ({_AT_MOST} < max_over_time(node:swarm_local_reward:least15m[6h]))
        """,
        hold="10m",
        severity=Severity.WARNING,
        summary="Reward of {{ $labels.node }}'s local groups has fallen to {{ $value | humanizePercentage }}",
        description="The mean reward of {{ $labels.node }}'s local groups is less than half of this run's best in the last six "
        "hours, by more than chance explains for this number of groups. The policy is getting worse at the tasks it trains on.",
        dashboard=NODE_DASHBOARD,
    ),
    Alert(
        name="SwarmEntropyCollapsed",
        # A slow trainer takes too few steps in a quarter of an hour, so the last hour is used
        # instead.
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
        summary='Entropy of {{ $labels.node }}\'s policy is {{ $value | printf "%.3f" }} nats per token',
        description="{{ $labels.node }}'s policy nearly always gives the same, wrong answer. The answers of a group do not "
        "differ, so training finds nothing better.",
        dashboard=NODE_DASHBOARD,
    ),
    Alert(
        name="SwarmPolicyDiverges",
        expr="max by (job, node) (avg_over_time(swarm_trainer_kl_behaviour_nats[5m])) > 0.5",
        hold="1m",
        severity=Severity.WARNING,
        summary='The policy {{ $labels.node }} trains is {{ $value | printf "%.1f" }} nats per token from the one that sampled '
        "its answers",
        description="The policy that {{ $labels.node }} trains is far from the one that sampled the answers (KL divergence; a "
        "healthy run stays below a tenth of the limit of 0.5). Steps are too large, or generator and trainer compute different "
        "probabilities.",
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
        description="The median gradient norm of {{ $labels.node }} over 15 minutes is more than twenty times that of the "
        "hours before in this run. Gradients are clipped (trainer.grad_clip), but their directions are mostly noise.",
        dashboard=NODE_DASHBOARD,
    ),
)
