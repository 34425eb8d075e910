"""Alerts on what a node gives to the swarm and takes from it. A node that trains alone is not
concerned by any.
"""

from __future__ import annotations

from monitoring.rules.base import SWARM_DASHBOARD, Alert, Severity

RULES: tuple[Alert, ...] = (
    Alert(
        name="SwarmNoRolloutsIngested",
        expr="""
        (sum by (job, node) (rate(swarm_ingest_accepted_total[15m])) == 0)
        and on (job, node) (max by (job, node) (swarm_sampler_external_configured) > 0)
        unless on (job, node) (node:swarm_trainer_finished:max == 1)
        """,
        hold="15m",
        severity=Severity.WARNING,
        summary="{{ $labels.node }} takes in nothing from other nodes",
        description="{{ $labels.node }} wants groups of others in its batches (sampler.external) and has accepted none for half "
        "an hour. It learns, if at all, "
        "from its own alone.",
        dashboard=SWARM_DASHBOARD,
    ),
    Alert(
        name="SwarmRejectSpike",
        expr="""
        (node:swarm_ingest_rejected:ratio15m > 0.3)
        and on (job, node)
        (1 - node:swarm_ingest_rejected:ratio15m < 0.5 * (1 - avg_over_time(node:swarm_ingest_rejected:ratio15m[6h] offset 30m)))
        and on (job, node)
        (sum by (job, node) (increase(swarm_ingest_rejected_total[15m])) > 20)
        """,
        hold="10m",
        severity=Severity.WARNING,
        summary="{{ $labels.node }} refuses {{ $value | humanizePercentage }} of what others send",
        description="{{ $labels.node }} refuses {{ $value | humanizePercentage }} of the foreign messages it looks at; the share "
        "it accepts is less than half of that of the "
        "hours before.",
        dashboard=SWARM_DASHBOARD,
    ),
    Alert(
        name="SwarmFlood",
        expr='sum by (job, node) (increase(swarm_ingest_rejected_total{reason="flood"}[2m])) > 50',
        hold="1m",
        severity=Severity.WARNING,
        summary='{{ $labels.node }} is flooded: {{ $value | printf "%.0f" }} messages of strangers found no place',
        description="Senders that have earned no standing with {{ $labels.node }} send more than it looks at. Groups of those that "
        "have keep their turns, and what they make beyond it counts as surplus, not as flood.",
        dashboard=SWARM_DASHBOARD,
        soon=True,
    ),
    Alert(
        name="SwarmShareFailing",
        expr="""
        sum by (job, node) (rate(swarm_rollout_publish_total{plane="swarm", result!="ok"}[15m]))
        / (sum by (job, node) (rate(swarm_rollout_publish_total{plane="swarm"}[15m])) > 0)
        > 0.1
        """,
        hold="15m",
        severity=Severity.WARNING,
        summary="{{ $value | humanizePercentage }} of what {{ $labels.node }} shares does not reach the swarm",
        description="{{ $value | humanizePercentage }} of the groups that {{ $labels.node }} wants to share fail or are given up "
        "on. Its own training is not concerned; "
        "the others learn without it.",
        dashboard=SWARM_DASHBOARD,
    ),
)
