"""Recording rules for values that alerts and several panels use, so that they are computed once.
Names are `level:metric:operations`.
"""

from __future__ import annotations

from monitoring.rules.base import Record, by_node


def _rate(metric: str, window: str) -> str:
    return by_node("sum", f"rate({metric}[{window}])")


def _by_run(function: str, inner: str, window: str = "") -> str:
    """`inner` aggregated by node and run, so that a new run with the same node names is not
    compared with an earlier one. `window`: how far `inner` looks back. A younger run has no value,
    because part of it would come from the previous run.
    """
    run = "swarm_run_info"
    if window:
        run = f"({run} and {run} offset {window})"
    return f"{function} by (job, node, run) (({inner}) * on (job, node, instance) group_left (run) {run})"


_EVALUATED = """
    swarm_held_out_pass_ratio
    and on (job, node, instance)
    swarm_held_out_policy_version == on (job, node) group_left max by (job, node) (swarm_held_out_policy_version)
"""
"""Only one of several generator replicas evaluates a version, so the newest version's value counts.
"""

_TRAINER = 'up{job="swarm", role="trainer"}'
_LAST_STEP = 'last_over_time(swarm_trainer_last_step_timestamp_seconds{job="swarm"}[1d])'
_STARTED = 'last_over_time(process_start_time_seconds{job="swarm", role="trainer"}[1d])'

_REFUSED = _rate('swarm_ingest_rejected_total{reason!="surplus"}', "15m")

_REWARD = "node:swarm_local_reward:mean15m"
_REWARDED = "(" + _by_run("sum", 'increase(swarm_groups_scored_total{origin="local"}[15m])', "15m") + " > 0)"

_SHARED_ALL = _rate('swarm_rollout_publish_total{plane="swarm"}', "5m")
_SHARED_OK = _rate('swarm_rollout_publish_total{plane="swarm", result="ok"}', "5m")

RULES: tuple[Record, ...] = (
    Record(name="node:swarm_trainer_steps:rate5m", expr=_rate("swarm_trainer_steps_total", "5m")),
    Record(
        name="node:swarm_trainer_step_duration_seconds:mean6h",
        expr=f"{_rate('swarm_trainer_step_duration_seconds_sum', '6h')} / ({_rate('swarm_trainer_steps_total', '6h')} > 0)",
    ),
    Record(
        # The series of a trainer that answers no scrapes end, so its last value counts while it is
        # still a target. Before a process's first step its start time counts, so that a trainer
        # that never takes a step is noticed too.
        name="node:swarm_trainer_idle:seconds",
        expr="time() - " + by_node("max", f"(({_LAST_STEP} >= {_STARTED}) or {_STARTED}) and on (job, node, instance) {_TRAINER}"),
    ),
    Record(
        name="node:swarm_trainer_finished:max",
        expr=by_node("max", f'last_over_time(swarm_trainer_finished{{job="swarm"}}[1d]) and on (job, node, instance) {_TRAINER}'),
    ),
    Record(name="node:swarm_trained_version:max", expr=by_node("max", 'swarm_policy_version{role="trainer"}')),
    Record(
        name="node:swarm_sampled_version:min",
        expr=by_node("min", 'swarm_policy_version{role="generator"} and on (job, node, instance) swarm_ready == 1'),
    ),
    Record(
        name="node:swarm_policy_lag:steps", expr="clamp_min(node:swarm_trained_version:max - node:swarm_sampled_version:min, 0)"
    ),
    Record(name="node:swarm_rollouts_generated:rate10m", expr=_rate("swarm_rollouts_generated_total", "10m")),
    Record(name="node:swarm_rollouts_shared:rate5m", expr=_rate('swarm_rollout_publish_total{plane="swarm", result="ok"}', "5m")),
    Record(name="node:swarm_ingest_accepted:rate5m", expr=_rate("swarm_ingest_accepted_total", "5m")),
    Record(
        # `surplus` is left out: it is what honest senders send beyond this node's intake.
        name="node:swarm_ingest_rejected:ratio15m",
        expr=f"{_REFUSED} / (({_REFUSED} + {_rate('swarm_ingest_accepted_total', '15m')}) > 0)",
    ),
    Record(name="node:swarm_verify_queue:groups", expr=by_node("max", "swarm_verify_queue_groups")),
    Record(
        name="node:swarm_verify_queue_wait:seconds",
        expr=f"""node:swarm_verify_queue:groups / {_rate('swarm_groups_scored_total{origin="local"}', "5m")}""",
    ),
    Record(
        name="node:swarm_reward:mean15m",
        expr="sum by (job, node, origin) (rate(swarm_reward_sum[15m])) / (sum by (job, node, origin) "
        "(rate(swarm_reward_count[15m])) > 0)",
    ),
    Record(name="node:swarm_held_out_pass_ratio:latest", expr=_by_run("max", _EVALUATED)),
    Record(
        name="node:swarm_held_out_gain:latest",
        expr="node:swarm_held_out_pass_ratio:latest - on (job, node) group_left "
        + by_node("max", "swarm_held_out_base_pass_ratio"),
    ),
    Record(
        name="node:swarm_local_reward:mean15m",
        expr=_by_run("sum", 'rate(swarm_reward_sum{origin="local"}[15m])', "15m")
        + " / ("
        + _by_run("sum", 'rate(swarm_reward_count{origin="local"}[15m])', "15m")
        + " > 0)",
    ),
    Record(
        # Counted in groups, because the answers to one question are correlated. Rewards lie between
        # 0 and 1, so the variance is at most mean * (1 - mean). The added term keeps the error
        # above zero when all groups agree: three errors are then 3 / groups.
        name="node:swarm_local_reward:error15m",
        expr=f"sqrt(({_REWARD} * (1 - {_REWARD}) + 1 / {_REWARDED}) / {_REWARDED})",
    ),
    Record(
        # Three errors, because the best of several hours is the maximum of many values. A window
        # with few groups gets a low bound, however high its rewards.
        name="node:swarm_local_reward:least15m",
        expr=f"{_REWARD} - 3 * node:swarm_local_reward:error15m",
    ),
    Record(name="node:swarm_trainer_grad_norm:max", expr=_by_run("max", "swarm_trainer_grad_norm")),
    Record(
        # 1 while steps come at their usual pace and change the policy. A node whose trainer has
        # taken all its steps has no value.
        name="node:swarm_learns:bool",
        expr=f"""
        (
          (
            clamp_max(
              (node:swarm_trainer_idle:seconds < bool 120)
              + (node:swarm_trainer_idle:seconds < bool 5 * node:swarm_trainer_step_duration_seconds:mean6h),
              1
            )
            or
            (node:swarm_trainer_idle:seconds < bool 600)
          )
          unless on (job, node)
          ({_rate("swarm_trainer_unchanged_steps_total", "15m")} / ({_rate("swarm_trainer_steps_total", "15m")} > 0) > 0.9)
          or
          0 * node:swarm_trainer_idle:seconds
        )
        unless on (job, node) (node:swarm_trainer_finished:max == 1)
        """,
    ),
    Record(
        # 1 while the verifier is connected to the swarm plane and most of the groups it shares
        # arrive. 0 otherwise, also while no verifier of a sharing node answers scrapes. A node that
        # trains alone has no value.
        name="node:swarm_shares:bool",
        expr=f"""
        (
          {by_node("min", 'swarm_nats_connected{plane="swarm"}')}
          unless on (job, node)
          ({_SHARED_ALL} - {_SHARED_OK}) / ({_SHARED_ALL} > 0) > 0.1
        )
        or
        (
          0 * {by_node("max", 'up{job="swarm", role="verifier"}')}
          and on (job, node)
          {by_node("group", 'count_over_time(swarm_nats_connected{plane="swarm"}[1d])')}
        )
        """,
    ),
)
