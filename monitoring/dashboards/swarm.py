"""Dashboard "Swarm": who learns, and what the nodes give each other."""

from __future__ import annotations

from monitoring.panels import Dashboard, Panel, PanelKind, Row, Threshold, Variable, mean, quantiles, series

ALL = 'job=~"$job", node=~"$node"'
PER_SECOND = "suffix: /s"
PER_MINUTE = "suffix: /min"

_GLANCE = Panel(
    title="Nodes at a glance",
    description="One line a node. Gain is the held-out pass rate minus that of the base policy on the same tasks; rates are over "
    "five "
    "minutes, the reward over fifteen. A node whose line is missing has no process that is scraped.",
    unit="short",
    kind=PanelKind.TABLE,
    width=24,
    height=7,
    labels=("node",),
    queries=(
        series(f'max by (node) (swarm_policy_version{{{ALL}, role="trainer"}})', "policy version"),
        series(f"max by (node) (node:swarm_held_out_pass_ratio:latest{{{ALL}}})", "held-out pass rate", "percentunit"),
        series(f"max by (node) (node:swarm_held_out_gain:latest{{{ALL}}})", "gain over base", "percentunit"),
        series(f'max by (node) (node:swarm_reward:mean15m{{{ALL}, origin="local"}})', "own reward", "percentunit"),
        series(f"60 * max by (node) (node:swarm_trainer_steps:rate5m{{{ALL}}})", "steps", PER_MINUTE),
        series(f"max by (node) (node:swarm_rollouts_shared:rate5m{{{ALL}}})", "groups shared", PER_SECOND),
        series(f"max by (node) (node:swarm_ingest_accepted:rate5m{{{ALL}}})", "groups taken in", PER_SECOND),
        series(f"max by (node) (node:swarm_ingest_rejected:ratio15m{{{ALL}}})", "refused", "percentunit"),
    ),
)

_LEARNING = Row(
    title="Who learns",
    panels=(
        _GLANCE,
        Panel(
            title="Held-out pass rate",
            description="Share of a fixed set of tasks, never trained on by any node with the same sources, that the newest "
            "evaluated policy "
            "answers right (greedy). This is the figure that says whether a node learns.",
            unit="percentunit",
            minimum=0,
            maximum=1,
            width=12,
            queries=(series(f"max by (node) (node:swarm_held_out_pass_ratio:latest{{{ALL}}})", "{{node}}"),),
        ),
        Panel(
            title="Gain over the base policy",
            description="Held-out pass rate minus that of policy version 0. Below zero: the node has become worse than what it "
            "began with.",
            unit="percentunit",
            width=12,
            queries=(series(f"max by (node) (node:swarm_held_out_gain:latest{{{ALL}}})", "{{node}}"),),
        ),
        Panel(
            title="Reward of own answers",
            description="Mean reward of the answers that a node's own policy sampled, as its own verifier scored them. At 0 or 1 "
            "groups have no "
            "advantage and nothing is learned.",
            unit="percentunit",
            minimum=0,
            maximum=1,
            queries=(series(mean("swarm_reward", f'{ALL}, origin="local"', "node"), "{{node}}"),),
        ),
        Panel(
            title="Reward of others' answers",
            description="Mean reward that a node's own verifier gave to the answers it took in from other nodes. Much below the "
            "own answers': "
            "the others are weaker on these tasks, or send rubbish.",
            unit="percentunit",
            minimum=0,
            maximum=1,
            queries=(series(mean("swarm_reward", f'{ALL}, origin="external"', "node"), "{{node}}"),),
        ),
        Panel(
            title="Trained groups without advantage",
            description="Share of the groups taken into batches whose rewards are all alike: they cost time and teach nothing.",
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
            description="Optimizer steps a minute. Zero for long is what alert SwarmTrainerStalled looks for.",
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
            description="Completion tokens that the node's generators sample a second.",
            unit=PER_SECOND,
            minimum=0,
            width=6,
            queries=(series(f"sum by (node) (rate(swarm_completion_tokens_sum{{{ALL}}}[$__rate_interval]))", "{{node}}"),),
        ),
        Panel(
            title="Tokens trained on",
            description="Completion tokens that the trainer takes in a second, own and others'.",
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
            description="Local groups stored in the swarm's stream a second, by node.",
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
            title="Groups taken in",
            description="Groups of other nodes that passed the border's checks and have this node's own rewards, a second.",
            unit=PER_SECOND,
            minimum=0,
            width=6,
            queries=(series(f"sum by (node) (rate(swarm_ingest_accepted_total{{{ALL}}}[$__rate_interval]))", "{{node}}"),),
        ),
        Panel(
            title="Others' share of batches",
            description="Share of the groups in batches that other nodes sampled. It should be J / (I + J) of the node's "
            "configuration; less means "
            "that batches are filled up with local groups or are short.",
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
            description="Share of batches that had fewer than J groups of other nodes when patience ended "
            "(sampler.shortage_wait_s).",
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
            description="Seconds between the making of a foreign group and the batch that uses it: the way through the whole "
            "system.",
            unit="s",
            minimum=0,
            queries=quantiles("swarm_sample_age_seconds", f'{ALL}, origin="external"', "node", "{{node}}"),
        ),
        Panel(
            title="Local groups that did not reach the swarm",
            description="Groups a second that were given up on (dropped), or that failed and are tried again (error), because "
            "the swarm's "
            "server was away or refused them.",
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
            description="Local groups waiting for the swarm's server. It grows while the server is away and is sent when it "
            "is back.",
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
            description="Foreign messages refused at the border a second, by the first check that failed, over the chosen nodes.",
            unit=PER_SECOND,
            minimum=0,
            stacked=True,
            width=12,
            queries=(series(f"sum by (reason) (rate(swarm_ingest_rejected_total{{{ALL}}}[$__rate_interval]))", "{{reason}}"),),
        ),
        Panel(
            title="Share refused",
            description="Refused messages of all foreign messages that were judged. Alert SwarmRejectSpike compares this with "
            "the hours before.",
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
            description="The ten senders most is refused of. The name is what the message claims, good for counting and for "
            "nothing else; `swarm ban` "
            "without a name shows which keys are to blame.",
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
            title="Senders left out",
            description="Senders that a node does not listen to: in quarantine for what they sent, or banned by its operator.",
            unit="short",
            minimum=0,
            decimals=0,
            queries=(series(f"max by (node, why) (swarm_senders_left_out{{{ALL}}})", "{{node}} {{why}}"),),
        ),
        Panel(
            title="Reads of the swarm's stream",
            description="Reads a second by their end. gap: the stream's window had moved past the reader, so groups were missed.",
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
            description="Processes of each role that answer and say they are ready. Every node needs one of each role at least.",
            unit="short",
            minimum=0,
            decimals=0,
            width=6,
            queries=(series(f"sum by (node, role) (swarm_ready{{{ALL}}})", "{{node}} {{role}}"),),
        ),
        Panel(
            title="NATS connections",
            description="1 while every process of a node is connected to the plane, 0 while one is not. Node: the node's own "
            "streams; swarm: the "
            "shared ones, on verifiers of nodes that have a swarm plane.",
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
            description="Seconds since each trainer's last step ended. It grows for ever on a node that has taken all its steps "
            "(trainer.max_steps).",
            unit="s",
            minimum=0,
            width=6,
            queries=(series(f"time() - max by (node) (swarm_trainer_last_step_timestamp_seconds{{{ALL}}} > 0)", "{{node}}"),),
        ),
        Panel(
            title="Firing alerts",
            description="Alerts that fire now. Watchdog always does: it proves that rules are evaluated.",
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
    description="Who learns, how fast, what nodes give each other and what they refuse.",
    variables=(
        Variable(name="job", label="Job", query="label_values(swarm_build_info, job)"),
        Variable(name="node", label="Node", query='label_values(swarm_build_info{job=~"$job"}, node)'),
    ),
    rows=(_LEARNING, _PACE, _SHARING, _REFUSALS, _HEALTH),
)
