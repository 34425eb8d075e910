"""Dashboard "Swarm": which nodes learn, and what they share with each other."""

from __future__ import annotations

from monitoring.panels import Dashboard, Panel, PanelKind, Row, Threshold, Variable, mean, quantiles, series

ALL = 'job=~"$job", node=~"$node"'
PER_SECOND = "suffix: /s"
PER_MINUTE = "suffix: /min"

_GLANCE = Panel(
    title="Nodes at a glance",
    description="One line per node. Gain is the held-out pass rate minus that of the base policy on the same tasks. A "
    "column named with a time is over that time; the curves below are over others. If a node is missing, none of its processes is "
    "being scraped.",
    unit="short",
    kind=PanelKind.TABLE,
    width=24,
    height=7,
    labels=("node",),
    queries=(
        series(f'max by (node) (swarm_policy_version{{{ALL}, role="trainer"}})', "policy version"),
        series(f"max by (node) (node:swarm_held_out_pass_ratio:latest{{{ALL}}})", "held-out pass rate", "percentunit"),
        series(f"max by (node) (node:swarm_held_out_gain:latest{{{ALL}}})", "gain over base", "percentunit"),
        series(f'max by (node) (node:swarm_reward:mean15m{{{ALL}, origin="local"}})', "local reward, 15 min", "percentunit"),
        series(f"60 * max by (node) (node:swarm_trainer_steps:rate5m{{{ALL}}})", "steps, 5 min", PER_MINUTE),
        series(f"max by (node) (node:swarm_rollouts_shared:rate5m{{{ALL}}})", "groups shared, 5 min", PER_SECOND),
        series(f"max by (node) (node:swarm_ingest_accepted:rate5m{{{ALL}}})", "groups accepted, 5 min", PER_SECOND),
        series(f"max by (node) (node:swarm_ingest_rejected:ratio15m{{{ALL}}})", "share refused, 15 min", "percentunit"),
    ),
)

_LEARNING = Row(
    title="Who learns",
    panels=(
        _GLANCE,
        Panel(
            title="Held-out pass rate",
            description="Share of the held-out tasks that the newest evaluated policy answers correctly (greedy decoding). No node "
            "with the same task sources trains on them. This figure says whether a node learns.",
            unit="percentunit",
            minimum=0,
            maximum=1,
            width=12,
            queries=(series(f"max by (node) (node:swarm_held_out_pass_ratio:latest{{{ALL}}})", "{{node}}"),),
        ),
        Panel(
            title="Gain over the base policy",
            description="Held-out pass rate minus that of policy version 0. Below zero, the policy is worse than the base policy.",
            unit="percentunit",
            width=12,
            queries=(series(f"max by (node) (node:swarm_held_out_gain:latest{{{ALL}}})", "{{node}}"),),
        ),
        Panel(
            title="Reward of local groups",
            description="Mean reward of the answers that the node sampled, as its verifier scored them. At 0 or 1 groups have "
            "no advantage and the node learns nothing.",
            unit="percentunit",
            minimum=0,
            maximum=1,
            queries=(series(mean("swarm_reward", f'{ALL}, origin="local"', "node"), "{{node}}"),),
        ),
        Panel(
            title="Reward of foreign groups",
            description="Mean reward that the node's verifier gave to answers from other nodes. If it is far below the reward "
            "of local groups, the other nodes are weaker on these tasks or send junk.",
            unit="percentunit",
            minimum=0,
            maximum=1,
            queries=(series(mean("swarm_reward", f'{ALL}, origin="external"', "node"), "{{node}}"),),
        ),
        Panel(
            title="Groups without advantage",
            description="Share of trained groups whose rewards are all equal. They cost time and teach nothing.",
            unit="percentunit",
            minimum=0,
            maximum=1,
            queries=(
                series(
                    f"sum by (node) (rate(swarm_trainer_zero_advantage_groups_total{{{ALL}}}[$__rate_interval])) / "
                    f"(sum by (node) (rate(swarm_trainer_groups_total{{{ALL}}}[$__rate_interval])) > 0)",
                    "{{node}}",
                ),
            ),
        ),
    ),
)

_PACE = Row(
    title="Pace",
    panels=(
        Panel(
            title="Trainer steps",
            description="Trainer steps per minute. Each point is over a time that grows with the range shown, not over the "
            "table's five minutes. Alert SwarmTrainerStalled fires if there are none for too long.",
            unit=PER_MINUTE,
            minimum=0,
            width=6,
            queries=(series(f"60 * sum by (node) (rate(swarm_trainer_steps_total{{{ALL}}}[$__rate_interval]))", "{{node}}"),),
        ),
        Panel(
            title="Policy version",
            description="Batches that each node's trainer has trained on. It falls only when a trainer resumes from an older "
            "checkpoint.",
            unit="short",
            minimum=0,
            width=6,
            queries=(series(f'max by (node) (swarm_policy_version{{{ALL}, role="trainer"}})', "{{node}}"),),
        ),
        Panel(
            title="Tokens sampled",
            description="Completion tokens that the node's generators sample per second.",
            unit=PER_SECOND,
            minimum=0,
            width=6,
            queries=(series(f"sum by (node) (rate(swarm_completion_tokens_sum{{{ALL}}}[$__rate_interval]))", "{{node}}"),),
        ),
        Panel(
            title="Tokens trained on",
            description="Completion tokens that the trainer trains on per second, local and foreign.",
            unit=PER_SECOND,
            minimum=0,
            width=6,
            queries=(series(f"sum by (node) (rate(swarm_trainer_tokens_total{{{ALL}}}[$__rate_interval]))", "{{node}}"),),
        ),
    ),
)

_SHARING = Row(
    title="Sharing",
    panels=(
        Panel(
            title="Groups shared",
            description="Local groups stored in the swarm's stream per second, by node.",
            unit=PER_SECOND,
            minimum=0,
            width=6,
            queries=(
                series(
                    f'sum by (node) (rate(swarm_rollout_publish_total{{{ALL}, plane="swarm", result="ok"}}[$__rate_interval]))',
                    "{{node}}",
                ),
            ),
        ),
        Panel(
            title="Foreign groups accepted",
            description="Foreign groups per second that passed the border's checks and were scored by this node.",
            unit=PER_SECOND,
            minimum=0,
            width=6,
            queries=(series(f"sum by (node) (rate(swarm_ingest_accepted_total{{{ALL}}}[$__rate_interval]))", "{{node}}"),),
        ),
        Panel(
            title="Foreign share of batches",
            description="Share of the groups in batches that are foreign. It should be J / (I + J); less means that batches "
            "are filled with local groups instead, or are short.",
            unit="percentunit",
            minimum=0,
            maximum=1,
            width=6,
            queries=(
                series(
                    f'sum by (node) (rate(swarm_sample_source_total{{{ALL}, source="external"}}[$__rate_interval])) / '
                    f"(sum by (node) (rate(swarm_sample_source_total{{{ALL}}}[$__rate_interval])) > 0)",
                    "{{node}}",
                ),
            ),
        ),
        Panel(
            title="Batches with too few foreign groups",
            description="Share of batches that still had fewer than J foreign groups after sampler.shortage_wait_s.",
            unit="percentunit",
            minimum=0,
            maximum=1,
            width=6,
            queries=(
                series(
                    f"sum by (node) (rate(swarm_sampler_short_batches_total{{{ALL}}}[$__rate_interval])) / "
                    f"(sum by (node) (rate(swarm_sampler_batches_total{{{ALL}}}[$__rate_interval])) > 0)",
                    "{{node}}",
                ),
            ),
        ),
        Panel(
            title="Age of foreign groups when used",
            description="Seconds from sampling a foreign group on its node to the batch here that uses it.",
            unit="s",
            minimum=0,
            queries=quantiles("swarm_sample_age_seconds", f'{ALL}, origin="external"', "node", "{{node}}"),
        ),
        Panel(
            title="Local groups that did not reach the swarm",
            description="Groups per second that were dropped, or that failed and will be retried (error), because the swarm's "
            "server was unreachable or refused them.",
            unit=PER_SECOND,
            minimum=0,
            queries=(
                series(
                    f"sum by (node, result) (rate(swarm_rollout_publish_total"
                    f'{{{ALL}, plane="swarm", result!="ok"}}[$__rate_interval]))',
                    "{{node}} {{result}}",
                ),
            ),
        ),
        Panel(
            title="Outbox",
            description="Local groups waiting to be sent to the swarm's server. The outbox grows while the server is "
            "unreachable and is sent once it is back.",
            unit="short",
            minimum=0,
            decimals=0,
            queries=(series(f"sum by (node) (swarm_outbox_groups{{{ALL}}})", "{{node}}"),),
        ),
    ),
)

_REFUSALS = Row(
    title="Refusals",
    panels=(
        Panel(
            title="Refused by reason",
            description="Foreign messages refused at the border per second, by the first check that failed, summed over the "
            "selected nodes.",
            unit=PER_SECOND,
            minimum=0,
            stacked=True,
            width=12,
            queries=(series(f"sum by (reason) (rate(swarm_ingest_rejected_total{{{ALL}}}[$__rate_interval]))", "{{reason}}"),),
        ),
        Panel(
            title="Share refused",
            description="Share of checked foreign messages that were refused. Alert SwarmRejectSpike compares this with the "
            "hours before.",
            unit="percentunit",
            minimum=0,
            maximum=1,
            width=12,
            queries=(
                series(
                    f"sum by (node) (rate(swarm_ingest_rejected_total{{{ALL}}}[$__rate_interval])) / "
                    f"((sum by (node) (rate(swarm_ingest_rejected_total{{{ALL}}}[$__rate_interval])) + "
                    f"sum by (node) (rate(swarm_ingest_accepted_total{{{ALL}}}[$__rate_interval]))) > 0)",
                    "{{node}}",
                ),
            ),
        ),
        Panel(
            title="Refused by claimed sender",
            description="The ten senders with the most refused messages. The name is only what the message claims and may be "
            "false; `swarm ban` without a name shows which keys are to blame.",
            unit=PER_SECOND,
            minimum=0,
            queries=(
                series(
                    f"topk(10, sum by (sender) (rate(swarm_ingest_rejected_by_sender_total{{{ALL}}}[$__rate_interval])))",
                    "{{sender}}",
                ),
            ),
        ),
        Panel(
            title="Senders shut out",
            description="Senders that the node ignores: quarantined for what they sent, or banned by its operator.",
            unit="short",
            minimum=0,
            decimals=0,
            queries=(series(f"max by (node, why) (swarm_senders_left_out{{{ALL}}})", "{{node}} {{why}}"),),
        ),
        Panel(
            title="Reads of the swarm's stream",
            description="Reads per second by result. gap: the stream had already dropped messages that the reader had not "
            "read, so groups were missed.",
            unit=PER_SECOND,
            minimum=0,
            queries=(
                series(
                    f"sum by (node, result) (rate(swarm_sample_requests_total{{{ALL}}}[$__rate_interval]))", "{{node}} {{result}}"
                ),
            ),
        ),
    ),
)

_HEALTH = Row(
    title="Health",
    panels=(
        Panel(
            title="Ready processes",
            description="Processes of each role that report ready. Every node needs at least one of each role.",
            unit="short",
            minimum=0,
            decimals=0,
            width=6,
            queries=(series(f"sum by (node, role) (swarm_ready{{{ALL}}})", "{{node}} {{role}}"),),
        ),
        Panel(
            title="NATS connections",
            description="1 while every process of a node is connected to the plane, 0 while one is not. node: the node's own "
            "streams. swarm: the shared streams, which only verifiers connect to; a node without a swarm plane has no value.",
            unit="short",
            minimum=0,
            maximum=1,
            decimals=0,
            width=6,
            thresholds=(Threshold(value=1, color="green"),),
            queries=(series(f"min by (node, plane) (swarm_nats_connected{{{ALL}}})", "{{node}} {{plane}}"),),
        ),
        Panel(
            title="Since the last step",
            description="Seconds since each trainer's last step ended. It keeps growing on a node that has taken all its steps "
            "(trainer.max_steps).",
            unit="s",
            minimum=0,
            width=6,
            queries=(series(f"time() - max by (node) (swarm_trainer_last_step_timestamp_seconds{{{ALL}}} > 0)", "{{node}}"),),
        ),
        Panel(
            title="Firing alerts",
            description="Alerts firing now. Watchdog always fires, which proves that rules are evaluated.",
            unit="short",
            minimum=0,
            decimals=0,
            width=6,
            queries=(series('count by (alertname, severity) (ALERTS{alertstate="firing"})', "{{alertname}} ({{severity}})"),),
        ),
    ),
)

SWARM = Dashboard(
    uid="swarm-overview",
    title="Swarm",
    description="Which nodes learn, how fast, what they share and what they refuse.",
    variables=(
        Variable(name="job", label="Job", query="label_values(swarm_build_info, job)"),
        Variable(name="node", label="Node", query='label_values(swarm_build_info{job=~"$job"}, node)'),
    ),
    rows=(_LEARNING, _PACE, _SHARING, _REFUSALS, _HEALTH),
)
