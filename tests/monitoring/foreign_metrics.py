"""Metrics that rules and panels read but other programs export, each with the place that defines
it, because no test here runs all of those programs.
"""

from __future__ import annotations

PROMETHEUS = {
    "up": "Prometheus: 1 while a target answers",
    "ALERTS": "Prometheus: alerts that are pending or firing",
}

PROCESS = {
    "process_cpu_seconds_total": "prometheus_client.ProcessCollector",
    "process_resident_memory_bytes": "prometheus_client.ProcessCollector",
    "process_start_time_seconds": "prometheus_client.ProcessCollector",
}

_JSZ = "prometheus-nats-exporter collector/jsz.go, with -jsz=all -prefix=nats"
_VARZ = "prometheus-nats-exporter collector/collector.go: every number of the server's /varz, with -varz"
NATS = {
    "nats_stream_total_messages": _JSZ,
    "nats_stream_total_bytes": _JSZ,
    "nats_stream_limit_bytes": _JSZ,
    "nats_stream_limit_messages": _JSZ,
    "nats_stream_first_seq": _JSZ,
    "nats_stream_last_seq": _JSZ,
    "nats_stream_consumer_count": _JSZ,
    "nats_consumer_num_pending": _JSZ,
    "nats_consumer_num_ack_pending": _JSZ,
    "nats_consumer_num_redelivered": _JSZ,
    "nats_consumer_num_waiting": _JSZ,
    "nats_server_total_streams": _JSZ,
    "nats_server_total_message_bytes": _JSZ,
    "nats_server_max_storage": _JSZ,
    "nats_healthz_status_value": "prometheus-nats-exporter collector/healthz.go, with -healthz: 1 when ok",
    "nats_varz_connections": _VARZ,
    "nats_varz_cpu": _VARZ,
    "nats_varz_in_bytes": _VARZ,
    "nats_varz_jetstream_config_max_storage": _VARZ,
    "nats_varz_jetstream_stats_api_errors": _VARZ,
    "nats_varz_jetstream_stats_reserved_storage": _VARZ,
    "nats_varz_mem": _VARZ,
    "nats_varz_out_bytes": _VARZ,
    "nats_varz_slow_consumers": _VARZ,
    "nats_varz_start": _VARZ,
}

_VLLM = "vLLM 0.32 vllm/v1/metrics/loggers.py"
VLLM = {
    "vllm:num_requests_running": _VLLM,
    "vllm:num_requests_waiting": _VLLM,
    "vllm:kv_cache_usage_perc": _VLLM,
    "vllm:prefix_cache_hits_total": _VLLM,
    "vllm:prefix_cache_queries_total": _VLLM,
    "vllm:generation_tokens_total": _VLLM,
    "vllm:prompt_tokens_total": _VLLM,
    "vllm:num_preemptions_total": _VLLM,
    "vllm:time_to_first_token_seconds": _VLLM,
    "vllm:e2e_request_latency_seconds": _VLLM,
    "vllm:inter_token_latency_seconds": _VLLM,
}

FOREIGN = {**PROMETHEUS, **PROCESS, **NATS, **VLLM}
"""Histograms are listed by name, without `_bucket`, `_sum` and `_count`."""
