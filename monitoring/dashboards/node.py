"""Dashboard "Node": the four services of one node, in the order in which a rollout passes through
them.
"""

from __future__ import annotations

from monitoring.dashboards.node_learning import LEARNING
from monitoring.dashboards.node_resources import RESOURCES
from monitoring.dashboards.vllm import VLLM
from monitoring.panels import Dashboard, Panel, PanelKind, Row, Threshold, Variable, quantiles, series

NODE = 'job=~"$job", node=~"$node"'
PER_SECOND = "suffix: /s"


def _stat(title: str, description: str, unit: str, expr: str, *thresholds: Threshold) -> Panel:
    return Panel(
        title=title,
        description=description,
        unit=unit,
        kind=PanelKind.STAT,
        width=4,
        height=4,
        thresholds=thresholds,
        queries=(series(expr, "{{node}}"),),
    )


_NOW = Row(
    title="Now",
    panels=(
        _stat(
            "Policy version",
            "Batches that the trainer has trained on.",
            "short",
            f'max by (node) (swarm_policy_version{{{NODE}, role="trainer"}})',
        ),
        _stat(
            "Held-out pass rate",
            "Of the newest evaluated policy.",
            "percentunit",
            f"max by (node) (node:swarm_held_out_pass_ratio:latest{{{NODE}}})",
        ),
        _stat(
            "Steps, 5 min",
            "Trainer steps per minute, over five minutes.",
            "suffix: /min",
            f"60 * max by (node) (node:swarm_trainer_steps:rate5m{{{NODE}}})",
        ),
        _stat(
            "Trainer waits",
            "Share of the last steps' time in which the trainer had no batch. If it is high, generators or verifiers are the "
            "bottleneck.",
            "percentunit",
            f"max by (node) (swarm_trainer_wait_ratio{{{NODE}}})",
            Threshold(value=0.5, color="orange"),
        ),
        _stat(
            "Policy lag",
            "Policy versions by which the slowest generator is behind the trainer. The two values may be one scrape interval "
            "apart.",
            "short",
            f"max by (node) (node:swarm_policy_lag:steps{{{NODE}}})",
        ),
        _stat(
            "Ready processes",
            "Processes that report ready; a node needs one for each of the four roles.",
            "short",
            f"sum by (node) (swarm_ready{{{NODE}}})",
            Threshold(value=4, color="green"),
        ),
    ),
)

_TIME = Row(
    title="Where time goes",
    panels=(
        Panel(
            title="Trainer by phase",
            description="Share of wall-clock time that the trainer spends in each phase of a step. wait: no batch; publish, "
            "checkpoint: writing the policy or checkpoint. A phase is counted when its step ends, so steps longer than the "
            "window make the lines jump.",
            unit="percentunit",
            minimum=0,
            stacked=True,
            width=12,
            queries=(
                series(f"sum by (phase) (rate(swarm_trainer_step_duration_seconds_sum{{{NODE}}}[$__rate_interval]))", "{{phase}}"),
            ),
        ),
        Panel(
            title="Sampler waiting",
            description="Share of wall-clock time in which the next batch waited for local groups (local), for foreign groups "
            "(external) or for the trainer to use up the batches it has (trainer). Waiting for the trainer is healthy.",
            unit="percentunit",
            minimum=0,
            stacked=True,
            width=12,
            queries=(
                series(f"sum by (reason) (rate(swarm_sampler_waiting_seconds_total{{{NODE}}}[$__rate_interval]))", "{{reason}}"),
            ),
        ),
        Panel(
            title="Engine call",
            description="Seconds of one call of the inference engine (generator.groups_per_call groups).",
            unit="s",
            minimum=0,
            width=6,
            queries=quantiles("swarm_generate_call_duration_seconds", NODE, "node", ""),
        ),
        Panel(
            title="Time to score a group",
            description="Seconds from receiving a group to its rewards, by dataset, 95th percentile.",
            unit="s",
            minimum=0,
            width=6,
            queries=(
                series(
                    "histogram_quantile(0.95, sum by (task, le) "
                    f"(rate(swarm_verify_duration_seconds_bucket{{{NODE}}}[$__rate_interval])))",
                    "p95 {{task}}",
                ),
            ),
        ),
        Panel(
            title="Time to build a batch",
            description="Seconds from choosing the groups to the server's acknowledgement of the batch.",
            unit="s",
            minimum=0,
            width=6,
            queries=quantiles("swarm_sampler_build_duration_seconds", NODE, "node", ""),
        ),
        Panel(
            title="Time to publish a group",
            description="Seconds until the server acknowledges a group, 95th percentile. node: from generator to verifier; "
            "swarm: to the other nodes.",
            unit="s",
            minimum=0,
            width=6,
            queries=(
                series(
                    f"histogram_quantile(0.95, sum by (plane, le) "
                    f"(rate(swarm_rollout_publish_duration_seconds_bucket{{{NODE}}}[$__rate_interval])))",
                    "p95 {{plane}}",
                ),
            ),
        ),
    ),
)

_FLOW = Row(
    title="Through the four services",
    panels=(
        Panel(
            title="Groups through the services",
            description="Groups per second: sampled by generators, scored by verifiers (local and foreign), put into batches "
            "(again: sampler.replay), trained on. Groups pile up or are lost between two services whose rates differ.",
            unit=PER_SECOND,
            minimum=0,
            width=12,
            queries=(
                series(f"sum by (node) (rate(swarm_rollouts_generated_total{{{NODE}}}[$__rate_interval]))", "sampled"),
                series(f"sum by (origin) (rate(swarm_groups_scored_total{{{NODE}}}[$__rate_interval]))", "scored {{origin}}"),
                series(f"sum by (source) (rate(swarm_sample_source_total{{{NODE}}}[$__rate_interval]))", "batched {{source}}"),
                series(f"sum by (node) (rate(swarm_sampler_replayed_groups_total{{{NODE}}}[$__rate_interval]))", "batched again"),
                series(f"sum by (origin) (rate(swarm_trainer_groups_total{{{NODE}}}[$__rate_interval]))", "trained {{origin}}"),
            ),
        ),
        Panel(
            title="Sampled by task",
            description="Groups sampled per second by dataset; the shares should follow the weights of the task sources.",
            unit=PER_SECOND,
            minimum=0,
            stacked=True,
            width=12,
            queries=(series(f"sum by (task) (rate(swarm_rollouts_generated_total{{{NODE}}}[$__rate_interval]))", "{{task}}"),),
        ),
        Panel(
            title="Queue before the verifier",
            description="Local groups stored and not scored yet. At the stream's limit of 512 the generator waits.",
            unit="short",
            minimum=0,
            width=6,
            queries=(series(f"max by (node) (swarm_verify_queue_groups{{{NODE}}})", "groups"),),
        ),
        Panel(
            title="Wait in the verifier's queue",
            description="How long a new group waits: groups queued divided by local groups scored per second. No value while "
            "nothing is queued and nothing is scored.",
            unit="s",
            minimum=0,
            width=6,
            queries=(series(f"max by (node) (node:swarm_verify_queue_wait:seconds{{{NODE}}})", "seconds"),),
        ),
        Panel(
            title="Foreign messages waiting",
            description="backlog: in the swarm's stream, not read yet. turn: read, and waiting for their sender's share of "
            "verifier.intake_groups_per_s.",
            unit="short",
            minimum=0,
            width=6,
            queries=(
                series(f"max by (node) (swarm_ingest_backlog_messages{{{NODE}}})", "backlog"),
                series(f"sum by (node) (swarm_ingest_waiting_messages{{{NODE}}})", "turn"),
            ),
        ),
        Panel(
            title="Sampler's pool",
            description="Groups in the pool that the next batch could use now.",
            unit="short",
            minimum=0,
            width=6,
            queries=(series(f"max by (origin) (swarm_sampler_pool_groups{{{NODE}}})", "{{origin}}"),),
        ),
        Panel(
            title="Draws allowed",
            description="Groups that admission allows generators to start now. If it stays at 0, the trainer is the bottleneck "
            "or has finished.",
            unit="short",
            minimum=0,
            width=6,
            queries=(series(f"max by (node) (swarm_draws_allowed{{{NODE}}})", "draws"),),
        ),
        Panel(
            title="Groups published",
            description="Groups per second by plane and result. held_back: the node's stream is full or its server is "
            "unreachable, and the generator waits.",
            unit=PER_SECOND,
            minimum=0,
            width=6,
            queries=(
                series(
                    f"sum by (plane, result) (rate(swarm_rollout_publish_total{{{NODE}}}[$__rate_interval]))",
                    "{{plane}} {{result}}",
                ),
            ),
        ),
        Panel(
            title="Size of a group",
            description="Bytes of a published group, 95th percentile, by plane. A group larger than the server's max_payload "
            "is sent in chunks.",
            unit="bytes",
            minimum=0,
            width=6,
            queries=(
                series(
                    f"histogram_quantile(0.95, sum by (plane, le) "
                    f"(rate(swarm_rollout_payload_bytes_bucket{{{NODE}}}[$__rate_interval])))",
                    "p95 {{plane}}",
                ),
            ),
        ),
        Panel(
            title="Dropped before a batch",
            description="Groups per second that the sampler drops, by reason. stale: older than sampler.max_staleness when "
            "their turn came. The generator may sample a new group for each.",
            unit=PER_SECOND,
            minimum=0,
            width=6,
            queries=(
                series(
                    f"sum by (origin, reason) (rate(swarm_sampler_dropped_groups_total{{{NODE}}}[$__rate_interval]))",
                    "{{origin}} {{reason}}",
                ),
            ),
        ),
    ),
)

_SCORING = Row(
    title="Scoring",
    panels=(
        Panel(
            title="Answers by result",
            description="Answers scored per second, by origin and result. timeout and killed: the scorer hung or crashed on "
            "the answer and was replaced.",
            unit=PER_SECOND,
            minimum=0,
            width=6,
            queries=(
                series(
                    f"sum by (origin, result) (rate(swarm_verify_jobs_total{{{NODE}}}[$__rate_interval]))", "{{origin}} {{result}}"
                ),
            ),
        ),
        Panel(
            title="Scorer processes replaced",
            description="Scorer processes killed or lost per second, and answers per second that made one hang.",
            unit=PER_SECOND,
            minimum=0,
            width=6,
            queries=(
                series(f"sum by (node) (rate(swarm_scorer_restarts_total{{{NODE}}}[$__rate_interval]))", "replaced"),
                series(f"sum by (node) (rate(swarm_scorer_timeouts_total{{{NODE}}}[$__rate_interval]))", "timeouts"),
            ),
        ),
        Panel(
            title="Dead letters",
            description="Local groups that could not be scored and are kept for inspection: `swarm dlq list`.",
            unit="short",
            minimum=0,
            decimals=0,
            width=6,
            queries=(series(f"max by (node) (swarm_dead_letters{{{NODE}}})", "kept"),),
        ),
        Panel(
            title="Local groups that could not be scored",
            description="Local groups per second that got no rewards; each becomes a dead letter.",
            unit=PER_SECOND,
            minimum=0,
            width=6,
            queries=(series(f"sum by (node) (rate(swarm_groups_failed_total{{{NODE}}}[$__rate_interval]))", "failed"),),
        ),
    ),
)

_FRESHNESS = Row(
    title="Freshness",
    panels=(
        Panel(
            title="Policy version by process",
            description="The version that the trainer has published and the version that each generator samples from. A line "
            "that stays behind for minutes is a generator that does not load new policies.",
            unit="short",
            minimum=0,
            queries=(series(f"swarm_policy_version{{{NODE}}}", "{{role}} {{instance}}"),),
        ),
        Panel(
            title="Staleness of local groups when used",
            description="Policy versions between sampling and use; never above sampler.max_staleness. Replayed groups "
            "(sampler.replay) are older and not counted.",
            unit="short",
            minimum=0,
            queries=(
                *quantiles("swarm_sample_policy_lag", NODE, "node", ""),
                series(f"max by (node) (swarm_trainer_staleness_steps_max{{{NODE}}})", "largest in the last step"),
            ),
        ),
        Panel(
            title="Age of groups when used",
            description="Seconds from sampling a group to the batch that uses it.",
            unit="s",
            minimum=0,
            queries=quantiles("swarm_sample_age_seconds", NODE, "origin", "{{origin}}"),
        ),
        Panel(
            title="Policy swap",
            description="Seconds from noticing a new policy to having it loaded. Nothing is sampled while weights are swapped.",
            unit="s",
            minimum=0,
            queries=quantiles("swarm_policy_load_duration_seconds", NODE, "node", ""),
        ),
        Panel(
            title="Failed policy swaps",
            description="Policy swaps per second that failed; the generator keeps sampling from the policy it has.",
            unit=PER_SECOND,
            minimum=0,
            queries=(series(f"sum by (node) (rate(swarm_policy_load_failures_total{{{NODE}}}[$__rate_interval]))", "failures"),),
        ),
        Panel(
            title="Since the policy was published",
            description="Seconds since the trainer published its newest policy.",
            unit="s",
            minimum=0,
            queries=(series(f"time() - max by (node) (swarm_policy_published_timestamp_seconds{{{NODE}}} > 0)", "seconds"),),
        ),
    ),
)

NODE_DASHBOARD = Dashboard(
    uid="swarm-node",
    title="Swarm node",
    description="One node: where time goes, what is queued, how fresh groups are, how the policy changes, and resource use.",
    variables=(
        Variable(name="job", label="Job", query="label_values(swarm_build_info, job)"),
        Variable(name="node", label="Node", query='label_values(swarm_build_info{job=~"$job"}, node)', many=False),
    ),
    rows=(_NOW, _TIME, _FLOW, _SCORING, _FRESHNESS, LEARNING, RESOURCES, VLLM),
)
