"""Recording rules: what alerts and several panels ask for, computed once. Names are
`level:metric:operations`.
"""

from __future__ import annotations

from monitoring.rules.base import Record, by_node


def _rate(metric: str, window: str) -> str:
    return by_node("sum", f"rate({metric}[{window}])")


_EVALUATED = """
    swarm_held_out_pass_ratio
    and on (job, node, instance)
    swarm_held_out_policy_version == on (job, node) group_left max by (job, node) (swarm_held_out_policy_version)
"""
"""Of several generator replicas only one evaluates a version: the newest version's figure counts.
"""

RULES: tuple[Record, ...] = (
    Record(name="node:swarm_trainer_steps:rate5m", expr=_rate("swarm_trainer_steps_total", "5m")),
    Record(
        name="node:swarm_trainer_step_duration_seconds:mean6h",
        expr=f"{_rate('swarm_trainer_step_duration_seconds_sum', '6h')} / ({_rate('swarm_trainer_steps_total', '6h')} > 0)",
    ),
    Record(
        # Before the first step the trainer's own start counts, so that one that never steps is seen
        # too.
        name="node:swarm_trainer_idle:seconds",
        expr="time() - "
        + by_node(
            "max", '(swarm_trainer_last_step_timestamp_seconds > 0) or process_start_time_seconds{job="swarm", role="trainer"}'
        ),
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
        name="node:swarm_ingest_rejected:ratio15m",
        expr=f"{_rate('swarm_ingest_rejected_total', '15m')} / "
        f"(({_rate('swarm_ingest_rejected_total', '15m')} + {_rate('swarm_ingest_accepted_total', '15m')}) > 0)",
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
    Record(name="node:swarm_held_out_pass_ratio:latest", expr=by_node("max", _EVALUATED)),
    Record(
        name="node:swarm_held_out_gain:latest",
        expr=f"node:swarm_held_out_pass_ratio:latest - {by_node('max', 'swarm_held_out_base_pass_ratio')}",
    ),
)
