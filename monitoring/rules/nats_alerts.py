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
        summary="NATS server {{ $labels.instance }} is down or not healthy{{ with $labels.value }} ({{ . }}){{ end }}",
        description="The NATS server at {{ $labels.instance }} does not say that it is healthy ({{ if $labels.value }}{{ "
        "$labels.value }}{{ else }}its exporter does not answer{{ end }}). "
        "Of three servers one may be away; with two away streams take nothing.",
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
        description="{{ $value }} servers report stream {{ $labels.stream_name }} (account {{ $labels.account }}) and none leads "
        "it: it takes and gives nothing.",
        dashboard=NATS_DASHBOARD,
    ),
    Alert(
        name="NatsUnexpectedRequest",
        expr='sum by (job, instance) (increase(swarm_nats_api_requests_total{by="unexpected"}[1h])) > 0',
        hold="",
        severity=Severity.CRITICAL,
        summary="JetStream took requests that no role and no operator may make (seen by {{ $labels.instance }})",
        description='About {{ $value | printf "%.0f" }} requests of JetStream\'s API in an hour came neither from an operator nor '
        "from a role within its permissions: somebody has found a way to administer streams. The watch's log names the account, "
        "the request and who made it.",
        dashboard=NATS_DASHBOARD,
    ),
    Alert(
        name="NatsWatchDeaf",
        expr="swarm_nats_watch_listening == 0",
        hold="10m",
        severity=Severity.WARNING,
        summary="{{ $labels.instance }} does not hear who asks JetStream for what",
        description="`swarm nats watch` at {{ $labels.instance }} runs and is not connected to the server, or may not listen. "
        "Requests that nobody should make go unseen.",
        dashboard=NATS_DASHBOARD,
    ),
    Alert(
        name="NatsCertificateExpires",
        expr="min by (job, server) (swarm_nats_certificate_expiry_timestamp_seconds - time()) < 14 * 86400",
        hold="10m",
        severity=Severity.WARNING,
        summary="The certificate of NATS server {{ $labels.server }} runs out in {{ $value | humanizeDuration }}",
        description="{{ $labels.server }} shows a certificate that lasts less than 14 days. Once it has run out nobody connects to "
        "that server any more, neither clients nor the other servers; connections that are open stay so until they break.",
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
        description="{{ $labels.stream_name }} (account {{ $labels.account }}) is {{ $value | humanizePercentage }} full. It "
        "refuses what does not fit, and the generator waits.",
        dashboard=NATS_DASHBOARD,
    ),
    Alert(
        name="NatsConsumerCountHigh",
        expr="max by (job, account, stream_name) (nats_stream_consumer_count) > 100",
        hold="15m",
        severity=Severity.WARNING,
        summary="{{ $value }} consumers on stream {{ $labels.stream_name }}",
        description="{{ $labels.stream_name }} (account {{ $labels.account }}) has {{ $value }} consumers; the services need one "
        "per node's work queue and a few for watches. Each costs "
        "the server memory, and with replicas a Raft group.",
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
        "(max_file_store). At 100 % all streams on it refuse messages.",
        dashboard=NATS_DASHBOARD,
    ),
    Alert(
        name="NatsSlowConsumers",
        expr='max by (job, server_id) (increase(nats_varz_slow_consumers{job="nats"}[15m])) > 5',
        hold="10m",
        severity=Severity.WARNING,
        summary='{{ $labels.server_id }} cut {{ $value | printf "%.0f" }} connections that read too slowly',
        description='{{ $labels.server_id }} has cut {{ $value | printf "%.0f" }} client connections in 15 minutes because what '
        "they had asked for was not read fast enough (max_pending).",
        dashboard=NATS_DASHBOARD,
    ),
)
