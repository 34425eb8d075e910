"""Alerts on sharing with the swarm. None of them fires for a node that trains alone."""

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
        summary="{{ $labels.node }} accepts no groups from other nodes",
        description="{{ $labels.node }} is configured to use foreign groups (sampler.external) and has accepted none for half "
        "an hour. It trains on local groups alone, or not at all.",
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
        summary="{{ $labels.node }} refuses {{ $value | humanizePercentage }} of foreign messages",
        description="{{ $labels.node }} refuses {{ $value | humanizePercentage }} of the foreign messages it checks. The share "
        "it accepts is less than half of that in the hours before.",
        dashboard=SWARM_DASHBOARD,
    ),
    Alert(
        name="SwarmFlood",
        expr='sum by (job, node) (increase(swarm_ingest_rejected_total{reason="flood"}[2m])) > 50',
        hold="1m",
        severity=Severity.WARNING,
        summary='{{ $labels.node }} is flooded: it refused {{ $value | printf "%.0f" }} messages from new senders',
        description="Senders that have not earned a standing with {{ $labels.node }} send more than it takes in. Established "
        "senders are not affected: they keep their share, and what they send beyond it counts as surplus, not as flood.",
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
        summary="{{ $value | humanizePercentage }} of the groups that {{ $labels.node }} shares do not reach the swarm",
        description="{{ $value | humanizePercentage }} of the groups that {{ $labels.node }} shares fail or are dropped. Its "
        "own training is not affected; other nodes train without its groups.",
        dashboard=SWARM_DASHBOARD,
    ),
)
