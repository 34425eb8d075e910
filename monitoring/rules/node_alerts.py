"""Alerts on a node's own learning: sampling, scoring, training, checkpoints."""

from __future__ import annotations

from monitoring.rules.base import NODE_DASHBOARD, SWARM_DASHBOARD, Alert, Severity

_FINISHED = "on (job, node) (node:swarm_trainer_finished:max == 1)"
"""The trainer has taken its `trainer.max_steps`, so it and the services before it are idle on
purpose.
"""

RULES: tuple[Alert, ...] = (
    Alert(
        name="SwarmTrainerStalled",
        expr=f"""
        (
          (node:swarm_trainer_idle:seconds > $seconds(120)) > 5 * node:swarm_trainer_step_duration_seconds:mean6h
          or
          (node:swarm_trainer_idle:seconds > 1800 unless node:swarm_trainer_step_duration_seconds:mean6h)
        )
        unless {_FINISHED}
        """,
        hold="1m",
        soon=True,
        severity=Severity.CRITICAL,
        summary="{{ $labels.node }} has not trained for {{ $value | humanizeDuration }}",
        description="The last step of {{ $labels.node }} (or the start of its trainer) was {{ $value | humanizeDuration }} "
        "ago, longer than five usual steps. The node is not learning.",
        dashboard=NODE_DASHBOARD,
    ),
    Alert(
        name="SwarmGeneratorStalled",
        expr=f"""
        (sum by (job, node) (rate(swarm_sampler_waiting_seconds_total{{reason="local"}}[10m])) > 0.9)
        and on (job, node) (node:swarm_rollouts_generated:rate10m == 0)
        unless on (job, node) (node:swarm_verify_queue:groups > 0)
        unless {_FINISHED}
        """,
        hold="20m",
        severity=Severity.WARNING,
        summary="{{ $labels.node }} samples nothing while its sampler waits for local groups",
        description="No generator of {{ $labels.node }} has sampled a group for at least half an hour, although no group is "
        "waiting to be scored and the sampler spends {{ $value | humanizePercentage }} of its time waiting for local groups.",
        dashboard=NODE_DASHBOARD,
    ),
    Alert(
        name="SwarmPolicyLagHigh",
        expr="""
        (node:swarm_policy_lag:steps > 0)
        and on (job, node) (node:swarm_sampled_version:min < node:swarm_trained_version:max offset 10m)
        unless on (job, node) (resets(node:swarm_trained_version:max[20m]) > 0)
        """,
        hold="5m",
        severity=Severity.WARNING,
        summary="A generator of {{ $labels.node }} samples from a policy {{ $value }} versions behind",
        description="A ready generator of {{ $labels.node }} still samples from a policy older than the one published ten "
        "minutes ago; it is {{ $value }} versions behind. Its groups are dropped as stale, or admission stops it.",
        dashboard=NODE_DASHBOARD,
    ),
    Alert(
        name="SwarmVerifyBacklogGrowing",
        expr="""
        (node:swarm_verify_queue_wait:seconds > 120)
        and on (job, node) (min_over_time(node:swarm_verify_queue:groups[15m]) > 0)
        """,
        hold="10m",
        severity=Severity.WARNING,
        summary="Local groups of {{ $labels.node }} wait {{ $value | humanizeDuration }} to be scored",
        description="The verifiers' queue on {{ $labels.node }} has not been empty for 15 minutes. At the present rate a new "
        "group waits {{ $value | humanizeDuration }} (+Inf: nothing is being scored).",
        dashboard=NODE_DASHBOARD,
    ),
    Alert(
        name="SwarmVerifyTimeoutRatioHigh",
        expr="""
        (
          sum by (job, node, origin) (rate(swarm_verify_jobs_total{result=~"timeout|killed"}[15m]))
          / (sum by (job, node, origin) (rate(swarm_verify_jobs_total[15m])) > 0)
        ) > 0.05
        and on (job, node, origin)
        (sum by (job, node, origin) (increase(swarm_verify_jobs_total{result=~"timeout|killed"}[15m])) > 10)
        """,
        hold="10m",
        severity=Severity.WARNING,
        summary="Scorers on {{ $labels.node }} hang or crash on {{ $value | humanizePercentage }} of {{ $labels.origin }} answers",
        description="Scorers on {{ $labels.node }} hang or crash on {{ $value | humanizePercentage }} of the {{ $labels.origin "
        "}} answers. Each such answer costs up to verifier.answer_timeout_s and a scorer process.",
        dashboard=NODE_DASHBOARD,
    ),
    Alert(
        name="SwarmScorerKills",
        expr="sum by (job, node) (increase(swarm_scorer_restarts_total[15m])) > 10",
        hold="5m",
        severity=Severity.WARNING,
        summary='{{ $value | printf "%.0f" }} scorer processes replaced on {{ $labels.node }} in 15 minutes',
        description='{{ $value | printf "%.0f" }} scorer processes on {{ $labels.node }} were killed or lost in 15 minutes. '
        "Possible causes: answers that make scorers hang, a memory limit that is too low, or an attack on the scorers.",
        dashboard=NODE_DASHBOARD,
    ),
    Alert(
        name="SwarmDeadLetters",
        expr="max by (job, node) (swarm_dead_letters) - min by (job, node) (min_over_time(swarm_dead_letters[1h])) > 0",
        hold="5m",
        severity=Severity.WARNING,
        summary='{{ $labels.node }} could not score {{ $value | printf "%.0f" }} local groups in the last hour',
        description='{{ $value | printf "%.0f" }} local groups of {{ $labels.node }} could not be scored in '
        "verifier.max_deliver attempts and are kept as dead letters.",
        dashboard=NODE_DASHBOARD,
    ),
    Alert(
        name="SwarmRewardCollapsedOrSaturated",
        expr="""
        node:swarm_reward:mean15m{origin="local"} < 0.01
        or
        node:swarm_reward:mean15m{origin="local"} > 0.99
        """,
        hold="30m",
        severity=Severity.WARNING,
        summary="Mean reward of {{ $labels.node }}'s local groups is {{ $value | humanizePercentage }}",
        description="For half an hour nearly all answers of {{ $labels.node }}'s local groups have had the same reward ({{ "
        "$value | humanizePercentage }} on average). Groups have no advantage, so the node learns nothing.",
        dashboard=SWARM_DASHBOARD,
    ),
    Alert(
        name="SwarmForeignGradientDominates",
        expr="""
        (
          sum by (job, node) (rate(swarm_trainer_bounded_groups_total[30m]))
          / (sum by (job, node) (rate(swarm_trainer_steps_total[30m])) > 0)
        ) > 0.2
        """,
        hold="15m",
        severity=Severity.WARNING,
        summary="{{ $labels.node }} scales down {{ $value | humanize }} foreign groups per step",
        description="{{ $labels.node }} keeps receiving foreign groups with gradients far larger than usual, {{ $value | "
        "humanize }} per step. They are scaled down; somebody may be trying to steer the policy.",
        dashboard=NODE_DASHBOARD,
    ),
    Alert(
        name="SwarmStepsChangeNothing",
        expr="""
        sum by (job, node) (rate(swarm_trainer_unchanged_steps_total[30m]))
        / (sum by (job, node) (rate(swarm_trainer_steps_total[30m])) > 0)
        > 0.9
        """,
        hold="30m",
        severity=Severity.WARNING,
        summary="{{ $value | humanizePercentage }} of {{ $labels.node }}'s steps do not change the weights",
        description="Steps of {{ $labels.node }} end without an update: no group has an advantage, or gradients are not finite.",
        dashboard=NODE_DASHBOARD,
    ),
    Alert(
        name="SwarmCheckpointOld",
        expr="""
        max by (job, node) (swarm_policy_version{role="trainer"} - on (job, node, instance, role) swarm_trainer_checkpoint_step)
        > 3 * max by (job, node) (swarm_trainer_checkpoint_interval_steps)
        """,
        hold="10m",
        severity=Severity.WARNING,
        summary="{{ $labels.node }} is {{ $value }} steps past its newest checkpoint",
        description="If the trainer of {{ $labels.node }} died now, it would repeat {{ $value }} steps. A checkpoint is due "
        "every trainer.checkpoint_every steps, and three were missed.",
        dashboard=NODE_DASHBOARD,
    ),
    Alert(
        name="SwarmWritesFailing",
        expr="sum by (job, node, kind) (increase(swarm_trainer_write_failures_total[15m])) > 3",
        hold="5m",
        severity=Severity.WARNING,
        summary="The trainer of {{ $labels.node }} cannot write: {{ $labels.kind }}",
        description='{{ $value | printf "%.0f" }} writes ({{ $labels.kind }}) of the trainer of {{ $labels.node }} failed lately. '
        "It retries each. Until writes succeed, generators may sample from an old policy and a restart may lose many steps.",
        dashboard=NODE_DASHBOARD,
        soon=True,
    ),
)
