"""Alerts on processes and their connections, and Watchdog, which proves that alerting works."""

from __future__ import annotations

from monitoring.rules.base import NODE_DASHBOARD, Alert, Severity

_KNOWN = 'group by (job, node) (up{job="swarm", node!=""})'
_TRAINS = f'({_KNOWN} and group by (job, node) (count_over_time(up{{job="swarm", role=~"sampler|trainer"}}[1d])))'
"""Nodes that have a sampler or trainer, or had one in the last day. A node with neither trains its
policy elsewhere.
"""
_PROCESS = "job, node, role, instance"
_STARTED_AT = 'process_start_time_seconds{job="swarm"}'
_STARTED_IN_RUN = (
    f"{_STARTED_AT} * on ({_PROCESS}) group_left (run) swarm_run_info\nor\n{_STARTED_AT} unless on ({_PROCESS}) swarm_run_info"
)
"""When each process was started, with its run: on one machine the next run has the same ports and
node names, and its start is no restart. A process that names no run is counted without one.
"""
_DIED_UNSEEN = "or on (node, role)\nswarm_process_recent_deaths > 3"
"""On one machine the local page counts also those that died before they were scraped."""
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
        description="No {{ $labels.role }} of {{ $labels.node }} answers scrapes, although the node has other processes. A "
        "node needs all four roles to learn.",
        dashboard=NODE_DASHBOARD,
        soon=True,
    ),
    Alert(
        name="TargetDown",
        expr='up{job=~"swarm|nats|nats-watch"} == 0',
        hold="10m",
        severity=Severity.WARNING,
        summary="{{ $labels.job }} target {{ $labels.instance }} does not answer",
        description="{{ $labels.instance }} ({{ $labels.job }} {{ $labels.node }} {{ $labels.role }}) does not answer "
        "Prometheus' scrapes, although it should be running.",
        dashboard=NODE_DASHBOARD,
        soon=True,
    ),
    Alert(
        name="SwarmNotReady",
        expr="swarm_ready == 0",
        hold="30m",
        severity=Severity.WARNING,
        summary="{{ $labels.role }} {{ $labels.instance }} of {{ $labels.node }} is not ready",
        description="{{ $labels.role }} {{ $labels.instance }} of {{ $labels.node }} answers scrapes but has not been ready "
        "for half an hour.",
        dashboard=NODE_DASHBOARD,
    ),
    Alert(
        name="SwarmCrashLooping",
        expr=f"changes((\n{_STARTED_IN_RUN}\n)[30m:15s]) > 3\n{_DIED_UNSEEN}",
        hold="",
        severity=Severity.WARNING,
        summary="{{ $labels.role }} {{ $labels.instance }} of {{ $labels.node }} has restarted {{ $value }} times in 30 minutes",
        description="{{ $labels.role }} {{ $labels.instance }} of {{ $labels.node }} has restarted {{ $value }} times in 30 "
        "minutes. Its log and the last exit code say why.",
        dashboard=NODE_DASHBOARD,
    ),
    Alert(
        name="SwarmNatsDisconnected",
        expr='min by (job, node, role, plane) (swarm_nats_connected{plane="node"}) == 0',
        hold="3m",
        severity=Severity.CRITICAL,
        summary="A {{ $labels.role }} of {{ $labels.node }} is disconnected from the node's NATS server",
        description="A {{ $labels.role }} of {{ $labels.node }} is not connected to the node plane. It waits until the "
        "connection is back; no data is lost.",
        dashboard=NODE_DASHBOARD,
        soon=True,
    ),
    Alert(
        name="SwarmNatsDisconnected",
        expr='min by (job, node, role, plane) (swarm_nats_connected{plane="swarm"}) == 0',
        hold="15m",
        severity=Severity.WARNING,
        summary="{{ $labels.node }} cannot reach the swarm",
        description="A {{ $labels.role }} of {{ $labels.node }} has not been connected to the swarm plane for 15 minutes. The "
        "node trains alone until the connection is back.",
        dashboard=NODE_DASHBOARD,
    ),
    Alert(
        name="SwarmClockSkewed",
        expr="max by (job, node) (abs(swarm_clock_skew_seconds)) > 20",
        hold="5m",
        severity=Severity.WARNING,
        summary="The clock of {{ $labels.node }} is {{ $value | humanizeDuration }} off",
        description="The clock of a machine of {{ $labels.node }} differs from its NATS server's by {{ $value | "
        "humanizeDuration }}. Other nodes refuse groups whose time is in the future or too old.",
        dashboard=NODE_DASHBOARD,
    ),
    Alert(
        name="SwarmCertificateExpires",
        expr="min by (job, node, plane) (swarm_certificate_expiry_timestamp_seconds - time()) < 7 * 86400",
        hold="10m",
        severity=Severity.WARNING,
        summary="The {{ $labels.plane }} plane's server of {{ $labels.node }} has a certificate that expires in {{ $value | "
        "humanizeDuration }}",
        description="Once the certificate expires, {{ $labels.node }} can no longer connect to the server of its {{ "
        "$labels.plane }} plane. Open connections stay up until they break.",
        dashboard=NODE_DASHBOARD,
    ),
    Alert(
        name="Watchdog",
        expr="vector(1)",
        hold="",
        severity=Severity.NONE,
        summary="Alerting works",
        description="Always fires. If it does not arrive, rules are not being evaluated or alerts are not being delivered.",
        dashboard="/d/swarm-overview",
    ),
)
