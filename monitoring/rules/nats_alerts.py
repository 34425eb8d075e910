"""Alerts on the NATS servers, from prometheus-nats-exporter beside each (see
`monitoring.dashboards.nats`).
"""

from __future__ import annotations

from monitoring.rules.base import NATS_DASHBOARD, Alert, Severity

RULES: tuple[Alert, ...] = (
    Alert(
        name="NatsDown",
        expr="""
        nats_healthz_status_value{job="nats"} == 0
        or
        up{job="nats"} == 0
        """,
        hold="3m",
        severity=Severity.CRITICAL,
        summary="NATS server {{ $labels.instance }} is down or unhealthy{{ with $labels.value }} ({{ . }}){{ end }}",
        description="The NATS server at {{ $labels.instance }} does not report healthy ({{ if $labels.value }}{{ $labels.value "
        "}}{{ else }}its exporter does not answer{{ end }}). With one of three servers down, streams keep working; with two "
        "down, they accept no messages.",
        dashboard=NATS_DASHBOARD,
        soon=True,
    ),
    Alert(
        name="NatsStreamLeaderless",
        expr="""
        count by (job, account, stream_name) (nats_stream_total_messages)
        unless
        count by (job, account, stream_name) (nats_stream_total_messages{is_stream_leader="true"})
        """,
        hold="3m",
        severity=Severity.CRITICAL,
        summary="Stream {{ $labels.stream_name }} has no leader",
        description="{{ $value }} servers report stream {{ $labels.stream_name }} (account {{ $labels.account }}) and none "
        "leads it: it can be neither written nor read.",
        dashboard=NATS_DASHBOARD,
    ),
    Alert(
        name="NatsUnexpectedRequest",
        expr='sum by (job, instance) (increase(swarm_nats_api_requests_total{by="unexpected"}[1h])) > 0',
        hold="",
        severity=Severity.CRITICAL,
        summary="JetStream received requests that no role or operator may make (seen by {{ $labels.instance }})",
        description='About {{ $value | printf "%.0f" }} JetStream API requests in the last hour came neither from an operator '
        "nor from a role within its permissions: somebody has found a way to administer streams. The log of `swarm nats watch` "
        "names the account, the request and who made it.",
        dashboard=NATS_DASHBOARD,
    ),
    Alert(
        name="NatsWatchDeaf",
        expr="swarm_nats_watch_listening == 0",
        hold="10m",
        severity=Severity.WARNING,
        summary="swarm nats watch at {{ $labels.instance }} is not seeing JetStream requests",
        description="`swarm nats watch` at {{ $labels.instance }} runs but is not connected to the server, or lacks permission "
        "to listen. Forbidden requests go unnoticed.",
        dashboard=NATS_DASHBOARD,
    ),
    Alert(
        name="NatsCertificateExpires",
        expr="min by (job, server) (swarm_nats_certificate_expiry_timestamp_seconds - time()) < 14 * 86400",
        hold="10m",
        severity=Severity.WARNING,
        summary="The certificate of NATS server {{ $labels.server }} expires in {{ $value | humanizeDuration }}",
        description="The certificate that {{ $labels.server }} presents expires in less than 14 days. After that neither "
        "clients nor other servers can connect to it; open connections stay up until they break.",
        dashboard=NATS_DASHBOARD,
    ),
    Alert(
        name="NatsStreamNearlyFull",
        expr="""
        max by (job, account, stream_name) (
          nats_stream_total_bytes{stream_name=~"NODE_.+_ROLLOUTS(_BLOBS)?"} / (nats_stream_limit_bytes > 0)
        ) > 0.9
        or
        max by (job, account, stream_name) (
          nats_stream_total_messages{stream_name=~"NODE_.+_ROLLOUTS(_BLOBS)?"} / (nats_stream_limit_messages > 0)
        ) > 0.9
        """,
        hold="10m",
        severity=Severity.WARNING,
        summary="Work queue {{ $labels.stream_name }} is {{ $value | humanizePercentage }} full",
        description="{{ $labels.stream_name }} (account {{ $labels.account }}) is {{ $value | humanizePercentage }} full. Once "
        "it is full it refuses new groups and the generator waits.",
        dashboard=NATS_DASHBOARD,
    ),
    Alert(
        name="NatsConsumerCountHigh",
        expr="max by (job, account, stream_name) (nats_stream_consumer_count) > 100",
        hold="15m",
        severity=Severity.WARNING,
        summary="{{ $value }} consumers on stream {{ $labels.stream_name }}",
        description="{{ $labels.stream_name }} (account {{ $labels.account }}) has {{ $value }} consumers; the services need "
        "one for each node's work queue and a few for watches. Each one costs the server memory and, with replicas, a Raft "
        "group.",
        dashboard=NATS_DASHBOARD,
    ),
    Alert(
        name="NatsJetStreamStorageHigh",
        expr="""
        max by (job, server_name) (nats_server_total_message_bytes)
        / (max by (job, server_name) (nats_server_max_storage) > 0)
        > 0.85
        """,
        hold="15m",
        severity=Severity.WARNING,
        summary="JetStream of {{ $labels.server_name }} is {{ $value | humanizePercentage }} full",
        description="{{ $labels.server_name }} has used {{ $value | humanizePercentage }} of its JetStream storage "
        "(max_file_store). At 100 % every stream on it refuses messages.",
        dashboard=NATS_DASHBOARD,
    ),
    Alert(
        name="NatsSlowConsumers",
        expr='max by (job, server_id) (increase(nats_varz_slow_consumers{job="nats"}[15m])) > 5',
        hold="10m",
        severity=Severity.WARNING,
        summary='{{ $labels.server_id }} cut {{ $value | printf "%.0f" }} client connections that read too slowly',
        description='{{ $labels.server_id }} has cut {{ $value | printf "%.0f" }} client connections in 15 minutes because the '
        "clients did not read fast enough (max_pending).",
        dashboard=NATS_DASHBOARD,
    ),
)
