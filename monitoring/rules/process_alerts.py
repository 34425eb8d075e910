"""Alerts on processes and their connections, and the alert that proves that alerting works."""

from __future__ import annotations

from monitoring.rules.base import NODE_DASHBOARD, Alert, Severity

_KNOWN = 'group by (job, node) (up{job="swarm", node!=""})'
_TRAINS = f'({_KNOWN} and group by (job, node) (count_over_time(up{{job="swarm", role=~"sampler|trainer"}}[1d])))'
"""Nodes that have a sampler or trainer, or had one today: a node whose policy is trained elsewhere
has neither, on purpose.
"""
_NEEDED_BY = {"generator": _KNOWN, "verifier": _KNOWN, "sampler": _TRAINS, "trainer": _TRAINS}


def _missing(role: str) -> str:
    answers = f'group by (job, node) (up{{job="swarm", role="{role}"}} == 1)'
    return f'label_replace({_NEEDED_BY[role]} unless {answers}, "role", "{role}", "", "")'


RULES: tuple[Alert, ...] = (
    Alert(
        name="SwarmRoleMissing",
        expr="\nor\n".join(_missing(role) for role in _NEEDED_BY),
        hold="15m",
        severity=Severity.CRITICAL,
        summary="{{ $labels.node }} has no {{ $labels.role }}",
        description="No {{ $labels.role }} of {{ $labels.node }} answers scrapes, while other processes of the node are known. A "
        "node learns with all four roles only.",
        dashboard=NODE_DASHBOARD,
        soon=True,
    ),
    Alert(
        name="TargetDown",
        expr='up{job=~"swarm|nats|nats-watch"} == 0',
        hold="10m",
        severity=Severity.WARNING,
        summary="{{ $labels.job }} target {{ $labels.instance }} does not answer",
        description="{{ $labels.instance }} ({{ $labels.job }} {{ $labels.node }} {{ $labels.role }}) does not answer Prometheus, "
        "though it should be there.",
        dashboard=NODE_DASHBOARD,
        soon=True,
    ),
    Alert(
        name="SwarmNotReady",
        expr="swarm_ready == 0",
        hold="30m",
        severity=Severity.WARNING,
        summary="{{ $labels.role }} {{ $labels.instance }} of {{ $labels.node }} is not ready",
        description="{{ $labels.role }} {{ $labels.instance }} of {{ $labels.node }} answers, but has not been ready for half an "
        "hour.",
        dashboard=NODE_DASHBOARD,
    ),
    Alert(
        name="SwarmCrashLooping",
        expr='changes(process_start_time_seconds{job="swarm"}[30m]) > 3',
        hold="",
        severity=Severity.WARNING,
        summary="{{ $labels.role }} {{ $labels.instance }} of {{ $labels.node }} has restarted {{ $value }} times in 30 minutes",
        description="{{ $labels.role }} {{ $labels.instance }} of {{ $labels.node }} was started {{ $value }} times again in 30 "
        "minutes.",
        dashboard=NODE_DASHBOARD,
    ),
    Alert(
        name="SwarmNatsDisconnected",
        expr='min by (job, node, role, plane) (swarm_nats_connected{plane="node"}) == 0',
        hold="3m",
        severity=Severity.CRITICAL,
        summary="{{ $labels.role }} of {{ $labels.node }} has lost its own NATS server",
        description="A {{ $labels.role }} of {{ $labels.node }} is not connected to the node's own streams. Nothing is lost; "
        "nothing moves either.",
        dashboard=NODE_DASHBOARD,
        soon=True,
    ),
    Alert(
        name="SwarmNatsDisconnected",
        expr='min by (job, node, role, plane) (swarm_nats_connected{plane="swarm"}) == 0',
        hold="15m",
        severity=Severity.WARNING,
        summary="{{ $labels.node }} cannot reach the swarm",
        description="A {{ $labels.role }} of {{ $labels.node }} has not been connected to the shared streams for a quarter of an "
        "hour. The node trains alone until it is back.",
        dashboard=NODE_DASHBOARD,
    ),
    Alert(
        name="SwarmClockSkewed",
        expr="max by (job, node) (abs(swarm_clock_skew_seconds)) > 20",
        hold="5m",
        severity=Severity.WARNING,
        summary="The clock of {{ $labels.node }} is {{ $value | humanizeDuration }} off",
        description="A machine of {{ $labels.node }} and its NATS server disagree on the time by {{ $value | humanizeDuration }}. "
        "Other nodes refuse groups that come from the future or are too old.",
        dashboard=NODE_DASHBOARD,
    ),
    Alert(
        name="SwarmCertificateExpires",
        expr="min by (job, node, plane) (swarm_certificate_expiry_timestamp_seconds - time()) < 7 * 86400",
        hold="10m",
        severity=Severity.WARNING,
        summary="The certificate of the {{ $labels.plane }} plane's server of {{ $labels.node }} runs out in {{ $value | "
        "humanizeDuration }}",
        description="{{ $labels.node }} cannot connect to the server of its {{ $labels.plane }} plane any more once its "
        "certificate has run out. Connections that are open stay so until they break.",
        dashboard=NODE_DASHBOARD,
    ),
    Alert(
        name="Watchdog",
        expr="vector(1)",
        hold="",
        severity=Severity.NONE,
        summary="Alerting works",
        description="Fires always. If it does not arrive, rules are not evaluated or alerts are not delivered.",
        dashboard="/d/swarm-overview",
    ),
)
