"""The row of dashboard "Node" with vLLM's own metrics; empty with other engines.

Metric names: vLLM 0.32, `vllm/v1/metrics/loggers.py`.
"""

from __future__ import annotations

from monitoring.panels import Panel, Row, quantiles, series

NODE = 'job=~"$job", node=~"$node"'
PER_SECOND = "suffix: /s"

VLLM = Row(
    title="vLLM",
    collapsed=True,
    panels=(
        Panel(
            title="vLLM requests",
            description="Completions running and waiting, summed over all generators.",
            unit="short",
            minimum=0,
            width=6,
            queries=(
                series(f"sum by (node) (vllm:num_requests_running{{{NODE}}})", "running"),
                series(f"sum by (node) (vllm:num_requests_waiting{{{NODE}}})", "waiting"),
            ),
        ),
        Panel(
            title="vLLM KV cache",
            description="Share of the key-value cache in use. At 1 requests are preempted: lower generator.groups_per_call or "
            "give vLLM more memory.",
            unit="percentunit",
            minimum=0,
            maximum=1,
            width=6,
            queries=(series(f"vllm:kv_cache_usage_perc{{{NODE}}}", "{{instance}}"),),
        ),
        Panel(
            title="vLLM prefix cache hits",
            description="Share of looked-up prompt tokens that were in the prefix cache. The completions of a group share "
            "their prompt.",
            unit="percentunit",
            minimum=0,
            maximum=1,
            width=6,
            queries=(
                series(
                    f"sum by (node) (rate(vllm:prefix_cache_hits_total{{{NODE}}}[$__rate_interval])) / "
                    f"(sum by (node) (rate(vllm:prefix_cache_queries_total{{{NODE}}}[$__rate_interval])) > 0)",
                    "hits",
                ),
            ),
        ),
        Panel(
            title="vLLM tokens",
            description="Tokens sampled and prompt tokens read per second.",
            unit=PER_SECOND,
            minimum=0,
            width=6,
            queries=(
                series(f"sum by (node) (rate(vllm:generation_tokens_total{{{NODE}}}[$__rate_interval]))", "sampled"),
                series(f"sum by (node) (rate(vllm:prompt_tokens_total{{{NODE}}}[$__rate_interval]))", "prompt"),
            ),
        ),
        Panel(
            title="vLLM time to the first token",
            description="Seconds from a request to its first token; grows with the queue.",
            unit="s",
            minimum=0,
            width=6,
            queries=quantiles("vllm:time_to_first_token_seconds", NODE, "node", ""),
        ),
        Panel(
            title="vLLM time per completion",
            description="Seconds from a request to its last token.",
            unit="s",
            minimum=0,
            width=6,
            queries=quantiles("vllm:e2e_request_latency_seconds", NODE, "node", ""),
        ),
        Panel(
            title="vLLM time between tokens",
            description="Seconds between two tokens of one completion.",
            unit="s",
            minimum=0,
            width=6,
            queries=quantiles("vllm:inter_token_latency_seconds", NODE, "node", ""),
        ),
        Panel(
            title="vLLM preemptions",
            description="Requests per second that lost their place in the cache and are recomputed.",
            unit=PER_SECOND,
            minimum=0,
            width=6,
            queries=(series(f"sum by (node) (rate(vllm:num_preemptions_total{{{NODE}}}[$__rate_interval]))", "preempted"),),
        ),
    ),
)
