"""Dashboard "NATS": streams, consumers, leaders and storage. The metrics come from the
prometheus-nats-exporter that runs beside each server.

Every replica reports its stream, so a sum would count the stream three times. Streams are therefore
`max by (account, stream_name)`, and consumers are read from their leader, the only replica that
knows what is pending. Metric names: `collector/jsz.go` and `collector/healthz.go` of
prometheus-nats-exporter, with `-varz -jsz=all -healthz -prefix=nats -use_internal_server_name`.
"""

from __future__ import annotations

from monitoring.panels import Dashboard, Panel, PanelKind, Row, Threshold, Variable, series

SERVER = 'job=~"$job"'
STREAM = 'job=~"$job", stream_name=~"$stream"'
CONSUMER = 'job=~"$job", stream_name=~"$stream", is_consumer_leader="true"'
BY_STREAM = "max by (account, stream_name)"
BY_CONSUMER = "max by (account, stream_name, consumer_name)"
PER_SECOND = "suffix: /s"


def _stat(title: str, description: str, expr: str, legend: str, *thresholds: Threshold) -> Panel:
    return Panel(
        title=title,
        description=description,
        unit="short",
        kind=PanelKind.STAT,
        width=4,
        height=4,
        thresholds=thresholds,
        queries=(series(expr, legend),),
    )


_NOW = Row(
    title="Now",
    panels=(
        _stat(
            "Healthy servers",
            "Servers whose /healthz answers ok: JetStream is up and its streams have caught up.",
            f"sum(nats_healthz_status_value{{{SERVER}}})",
            "healthy",
            Threshold(value=1, color="green"),
        ),
        _stat(
            "Streams",
            "Number of streams; replicas are not counted.",
            f"count({BY_STREAM} (nats_stream_total_messages{{{STREAM}}}))",
            "streams",
        ),
        _stat(
            "Consumers",
            "Number of consumers; replicas are not counted.",
            f"count({BY_CONSUMER} (nats_consumer_num_pending{{{CONSUMER}}}))",
            "consumers",
        ),
        _stat(
            "Streams without a leader",
            "Streams without a leader can be neither written nor read until two of three replicas are back.",
            f"count({BY_STREAM} (nats_stream_total_messages{{{STREAM}}})) - "
            f'(count({BY_STREAM} (nats_stream_total_messages{{{STREAM}, is_stream_leader="true"}})) or vector(0))',
            "leaderless",
            Threshold(value=1, color="red"),
        ),
        _stat("Connections", "Client connections to all servers.", f"sum(nats_varz_connections{{{SERVER}}})", "connections"),
        _stat(
            "Slow consumers",
            "Connections that servers have cut since they started, because the client read too slowly.",
            f"sum(nats_varz_slow_consumers{{{SERVER}}})",
            "cut",
            Threshold(value=1, color="orange"),
        ),
    ),
)

_STREAMS = Row(
    title="Streams",
    panels=(
        Panel(
            title="Messages",
            description="Messages in each stream. NODE_*_ROLLOUTS is a work queue, near 0 while verifiers keep up. The other "
            "streams keep a window of recent messages.",
            unit="short",
            minimum=0,
            queries=(series(f"{BY_STREAM} (nats_stream_total_messages{{{STREAM}}})", "{{account}} {{stream_name}}"),),
        ),
        Panel(
            title="Size",
            description="Bytes in each stream, counting one replica.",
            unit="bytes",
            minimum=0,
            queries=(series(f"{BY_STREAM} (nats_stream_total_bytes{{{STREAM}}})", "{{account}} {{stream_name}}"),),
        ),
        Panel(
            title="Filled",
            description="Bytes as a share of the stream's limit. Windows fill to 1 and stay there. A work queue at 1 refuses "
            "messages, and its writers wait.",
            unit="percentunit",
            minimum=0,
            maximum=1,
            queries=(
                series(
                    f"{BY_STREAM} (nats_stream_total_bytes{{{STREAM}}}) / ({BY_STREAM} (nats_stream_limit_bytes{{{STREAM}}}) > 0)",
                    "{{account}} {{stream_name}}",
                ),
            ),
        ),
        Panel(
            title="Messages stored",
            description="Messages stored per second, by stream.",
            unit=PER_SECOND,
            minimum=0,
            queries=(
                series(f"{BY_STREAM} (rate(nats_stream_last_seq{{{STREAM}}}[$__rate_interval]))", "{{account}} {{stream_name}}"),
            ),
        ),
        Panel(
            title="Messages removed",
            description="Messages removed per second, by the stream's limits or by acknowledgement.",
            unit=PER_SECOND,
            minimum=0,
            queries=(
                series(f"{BY_STREAM} (rate(nats_stream_first_seq{{{STREAM}}}[$__rate_interval]))", "{{account}} {{stream_name}}"),
            ),
        ),
        Panel(
            title="Consumers by stream",
            description="Consumers of each stream. Expect one for each node's work queue and a few short-lived ones from "
            "watches; the services read other streams without a consumer.",
            unit="short",
            minimum=0,
            decimals=0,
            queries=(series(f"{BY_STREAM} (nats_stream_consumer_count{{{STREAM}}})", "{{account}} {{stream_name}}"),),
        ),
    ),
)

_CONSUMERS = Row(
    title="Consumers",
    panels=(
        Panel(
            title="Pending",
            description="Messages not yet delivered to the consumer. Verifiers are scaled by this lag.",
            unit="short",
            minimum=0,
            width=6,
            queries=(series(f"{BY_CONSUMER} (nats_consumer_num_pending{{{CONSUMER}}})", "{{stream_name}} {{consumer_name}}"),),
        ),
        Panel(
            title="Unacknowledged",
            description="Messages delivered and not yet acknowledged: groups being scored.",
            unit="short",
            minimum=0,
            width=6,
            queries=(series(f"{BY_CONSUMER} (nats_consumer_num_ack_pending{{{CONSUMER}}})", "{{stream_name}} {{consumer_name}}"),),
        ),
        Panel(
            title="Redelivered",
            description="Unacknowledged messages that were delivered more than once, because a verifier died or took too long.",
            unit="short",
            minimum=0,
            width=6,
            queries=(series(f"{BY_CONSUMER} (nats_consumer_num_redelivered{{{CONSUMER}}})", "{{stream_name}} {{consumer_name}}"),),
        ),
        Panel(
            title="Waiting fetches",
            description="Open requests for messages. 0 while messages are pending: no verifier is asking for work.",
            unit="short",
            minimum=0,
            width=6,
            queries=(series(f"{BY_CONSUMER} (nats_consumer_num_waiting{{{CONSUMER}}})", "{{stream_name}} {{consumer_name}}"),),
        ),
    ),
)

_LEADERS = Row(
    title="Leaders",
    panels=(
        Panel(
            title="Servers",
            description="Streams that each server stores and leads. The meta leader decides where streams are placed.",
            unit="short",
            kind=PanelKind.TABLE,
            width=12,
            height=7,
            labels=("server_name",),
            queries=(
                series(f'count by (server_name) (nats_stream_total_messages{{{SERVER}, is_stream_leader="true"}})', "streams led"),
                series(f"max by (server_name) (nats_server_total_streams{{{SERVER}}})", "streams held"),
                series(f'count by (server_name) (nats_server_total_streams{{{SERVER}, is_meta_leader="true"}})', "meta leader"),
                series(f"max by (server_name) (nats_server_total_message_bytes{{{SERVER}}})", "stored", "bytes"),
            ),
        ),
        Panel(
            title="Streams led by server",
            description="A server that leads no stream after a restart is normal: leadership moves only when a leader goes away.",
            unit="short",
            minimum=0,
            decimals=0,
            width=6,
            height=7,
            queries=(
                series(
                    f'count by (server_name) (nats_stream_total_messages{{{SERVER}, is_stream_leader="true"}})', "{{server_name}}"
                ),
            ),
        ),
        Panel(
            title="Replicas reported by stream",
            description="Servers that report each stream: 3 in the cluster, 1 on a single server. A lower count means that a "
            "replica is missing.",
            unit="short",
            minimum=0,
            decimals=0,
            width=6,
            height=7,
            queries=(
                series(f"count by (account, stream_name) (nats_stream_total_messages{{{STREAM}}})", "{{account}} {{stream_name}}"),
            ),
        ),
    ),
)

_SERVERS = Row(
    title="Servers",
    panels=(
        Panel(
            title="Storage used",
            description="Bytes stored as a share of JetStream's limit (max_file_store), by server.",
            unit="percentunit",
            minimum=0,
            width=6,
            queries=(
                series(
                    f"max by (server_name) (nats_server_total_message_bytes{{{SERVER}}}) / "
                    f"(max by (server_name) (nats_server_max_storage{{{SERVER}}}) > 0)",
                    "{{server_name}}",
                ),
            ),
        ),
        Panel(
            title="Storage reserved",
            description="Sum of the streams' byte limits as a share of JetStream's limit. At 1 there is no room for another "
            "node's streams.",
            unit="percentunit",
            minimum=0,
            width=6,
            queries=(
                series(
                    f"max by (server_id) (nats_varz_jetstream_stats_reserved_storage{{{SERVER}}}) / "
                    f"(max by (server_id) (nats_varz_jetstream_config_max_storage{{{SERVER}}}) > 0)",
                    "{{server_id}}",
                ),
            ),
        ),
        Panel(
            title="Traffic",
            description="Bytes per second from and to clients, routes and leaf servers.",
            unit="Bps",
            minimum=0,
            width=6,
            queries=(
                series(f"sum by (server_id) (rate(nats_varz_in_bytes{{{SERVER}}}[$__rate_interval]))", "{{server_id}} in"),
                series(f"sum by (server_id) (rate(nats_varz_out_bytes{{{SERVER}}}[$__rate_interval]))", "{{server_id}} out"),
            ),
        ),
        Panel(
            title="Failed JetStream requests",
            description="JetStream API requests per second that were answered with an error. Looking up a stream that does not "
            "exist yet counts as one.",
            unit=PER_SECOND,
            minimum=0,
            width=6,
            queries=(
                series(
                    f"sum by (server_id) (rate(nats_varz_jetstream_stats_api_errors{{{SERVER}}}[$__rate_interval]))",
                    "{{server_id}}",
                ),
            ),
        ),
        Panel(
            title="Memory",
            description="Resident memory of each server.",
            unit="bytes",
            minimum=0,
            width=6,
            queries=(series(f"max by (server_id) (nats_varz_mem{{{SERVER}}})", "{{server_id}}"),),
        ),
        Panel(
            title="CPU",
            description="As reported by the server: 100 % is one core.",
            unit="percent",
            minimum=0,
            width=6,
            queries=(series(f"max by (server_id) (nats_varz_cpu{{{SERVER}}})", "{{server_id}}"),),
        ),
        Panel(
            title="Connections by server",
            description="Client connections, without routes between servers and without leaf servers.",
            unit="short",
            minimum=0,
            decimals=0,
            width=6,
            queries=(series(f"max by (server_id) (nats_varz_connections{{{SERVER}}})", "{{server_id}}"),),
        ),
        Panel(
            title="Certificate time left",
            description="Time until the certificate that each server presents expires. Alert NatsCertificateExpires fires "
            "below 14 days. No value without TLS.",
            unit="s",
            width=6,
            thresholds=(Threshold(value=14 * 86_400, color="green"),),
            queries=(
                series(f"min by (server) (swarm_nats_certificate_expiry_timestamp_seconds{{{SERVER}}}) - time()", "{{server}}"),
            ),
        ),
        Panel(
            title="Uptime",
            description="Time since each server started. A drop to zero is a restart.",
            unit="s",
            minimum=0,
            width=6,
            queries=(series(f"time() - max by (server_id) (nats_varz_start{{{SERVER}}})", "{{server_id}}"),),
        ),
    ),
)

NATS = Dashboard(
    uid="swarm-nats",
    title="Swarm NATS",
    description="The NATS servers: streams, consumers, leaders, storage.",
    variables=(
        # Certificates are read by `swarm nats watch --monitor`, which has a job of its own.
        Variable(
            name="job",
            label="Job",
            query='label_values({__name__=~"nats_server_total_streams|swarm_nats_certificate_expiry_timestamp_seconds"}, job)',
        ),
        Variable(name="stream", label="Stream", query='label_values(nats_stream_total_messages{job=~"$job"}, stream_name)'),
    ),
    rows=(_NOW, _STREAMS, _CONSUMERS, _LEADERS, _SERVERS),
)
