"""Spans that show a group's path as one trace. Each service emits a span for what it did with a
group. No trace context is passed between services, because the ids of trace and root span follow
from the group's content id.

Without a sink `emit` costs one comparison. If an endpoint is configured, the sink sends the spans
to an OpenTelemetry collector: OTLP over HTTP (extra `otel`). A thread sends them from a queue of
`QUEUE` spans; when it is full the oldest are lost. An endpoint that does not answer delays only
that thread, and causes one warning in the log. It can neither redirect the spans nor make this
process read more than a few kilobytes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Protocol

from shared.config.node_sections import ProcessConfig
from shared.runtime.logs import Log
from shared.seeds import number_from
from shared.text import without_secrets
from shared.version import VERSION

AttributeValue = str | int | float | bool
GENERATE, SCORE, SHARE, BORDER, BATCH, TRAIN = "generate", "score", "share", "border check", "batch", "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpan:
    """Something that this process did with a group. start_s, end_s: Unix time. error: whether it
    failed; a refusal is not an error. same_as: the content id of the same group in the form without
    token ids in which it was shared.
    """

    group_id: str
    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    error: bool = False
    same_as: str | None = None


class SpanSink(Protocol):
    """Receives spans. Must not block or raise."""

    def take(self, span: GroupSpan) -> None:
        """Accept one span."""

    def close(self) -> None:
        """Send the remaining spans, within a second or so."""


_sink: SpanSink | None = None


def send_to(sink: SpanSink | None) -> None:
    """Send this process's spans to `sink` from now on."""
    global _sink
    _sink = sink


def wanted() -> bool:
    """Check whether there is a sink."""
    return _sink is not None


def emit(
    group_id: str, name: str, *, seconds: float = 0.0, same_as: str | None = None, **attributes: AttributeValue | None
) -> None:
    """Emit a span called `name` that ends now and took `seconds`. Attributes that are None are left
    out.
    """
    if _sink is not None:
        now = time.time()
        known = {key: value for key, value in attributes.items() if value is not None}
        same = same_as if same_as != group_id else None
        _sink.take(
            GroupSpan(group_id=group_id, name=name, start_s=now - max(0.0, seconds), end_s=now, attributes=known, same_as=same)
        )


def trace_id_of(group_id: str) -> int:
    """The first 32 digits of the content id. A rollout id is the first 16 of them, so it identifies
    the trace.
    """
    return int(group_id[:32], 16)


def root_span_id_of(group_id: str) -> int:
    """Id of the generator's span, the root of the trace."""
    return _number(f"root/{group_id}")


def span_id_of(span: GroupSpan, node: str) -> int:
    """The same id whenever `node` emits the same span for a group, so that work repeated after a
    crash appears once.
    """
    if span.name == GENERATE:
        return root_span_id_of(span.group_id)
    apart = [span.attributes.get(key, "") for key in ("step", "outcome", "reason")]
    return _number(f"{span.name}/{node}/{apart}/{span.group_id}")


def _number(text: str) -> int:
    return number_from(text) or 1


QUEUE = 4096
SEND_EVERY_S = 2.0
TIMEOUT_S = 5.0
STUCK_S = 4 * TIMEOUT_S
"""When a batch counts as stuck. `TIMEOUT_S` limits only the time between two bytes of an answer, so
an answer that trickles in would never time out.
"""
CLOSE_S = 1.5
ANSWER_BYTES = 4096
"""Most bytes read of an answer, whose content is not needed. If an answer is longer, or does not
state its length, it is not read and its connection is closed.
"""
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_NS = 1_000_000_000
_OWN_SESSION = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER"
_MISSING = "needs the packages of the extra otel, which are not installed: pip install 'swarm-rl[otel]'"


def asking_variable(environment: Mapping[str, str]) -> str:
    """The variable of OpenTelemetry that asks for spans; empty if none does."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    return next(filter(environment.get, ENDPOINT_VARIABLES), "")


def tracing_warnings(environment: Mapping[str, str]) -> list[str]:
    """A sentence with the remedy if spans are wanted and cannot be sent; else nothing."""
    asking = asking_variable(environment)
    return [f"{asking} {_MISSING}"] if asking and not is_installed() else []


def is_installed() -> bool:
    """Check whether the packages of the extra are installed."""
    try:
        return all(find_spec(name) for name in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http"))
    except ImportError:
        return False


def open_spans(config: ProcessConfig, role: str, log: Log) -> SpanSink | None:
    """The sink for this process's spans; None without an endpoint. A missing extra is not fatal, as
    the variable may be meant for other programs.
    """
    if not asking_variable(os.environ):
        return None
    if warnings := tracing_warnings(os.environ):
        log.warning("spans_not_sent", reason=warnings[0], consequence="the service runs as if the variable were not set")
        return None
    return OtlpSpans(config, role, lambda reason: log.warning("spans_not_sent", reason=reason, consequence="some spans are lost"))


class OtlpSpans:
    """Sends spans to the endpoint. warn: called once with the reason when spans are lost."""

    def __init__(self, config: ProcessConfig, role: str, warn: Callable[[str], None]) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        # OpenTelemetry warns about every lost batch; `warn` does so once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)
        session = None if os.environ.get(_OWN_SESSION) else _session()
        inner = OTLPSpanExporter(timeout=TIMEOUT_S, session=session)
        self._exporter = _ReportingExporter(inner, os.environ[asking_variable(os.environ)], warn)
        self._processor = BatchSpanProcessor(
            self._exporter, max_queue_size=QUEUE, schedule_delay_millis=SEND_EVERY_S * 1000, max_export_batch_size=512
        )
        self._node, self._lock, self._ids = config.node.id, threading.Lock(), _GivenIds()
        resource = Resource.create(
            {
                "service.name": f"swarm-{role}",
                "service.version": VERSION,
                "service.instance.id": f"{config.node.id}-{config.node.replica}",
                "swarm.node": config.node.id,
                "swarm.run": config.node.run,
            }
        )
        provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("swarm", VERSION)

    def take(self, span: GroupSpan) -> None:
        """Queue a span; never waits for the endpoint."""
        from opentelemetry import trace

        self._exporter.tell_if_stuck()
        sampled = trace.TraceFlags(trace.TraceFlags.SAMPLED)

        def place(group_id: str) -> trace.SpanContext:
            return trace.SpanContext(trace_id_of(group_id), root_span_id_of(group_id), is_remote=True, trace_flags=sampled)

        root = trace.NonRecordingSpan(place(span.group_id))
        attributes = {"swarm.rollout_id": span.group_id[:16], **{f"swarm.{key}": value for key, value in span.attributes.items()}}
        with self._lock:
            self._ids.given = trace_id_of(span.group_id), span_id_of(span, self._node)
            sent = self._tracer.start_span(
                span.name,
                context=trace.Context() if span.name == GENERATE else trace.set_span_in_context(root, trace.Context()),
                attributes=attributes,
                links=[trace.Link(place(span.same_as))] if span.same_as else None,
                start_time=int(span.start_s * _NS),
            )
        if span.error:
            sent.set_status(trace.StatusCode.ERROR)
        sent.end(int(span.end_s * _NS))

    def close(self) -> None:
        """Send the queued spans for at most `CLOSE_S`, so that the process's end is not delayed."""
        closing = threading.Thread(target=self._processor.shutdown, name="spans-close", daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def _session() -> Any:
    """The HTTP session for the endpoint. `requests` alone would read an answer of any size into
    memory. The exporter takes a redirect as success, or follows it and sends along the headers that
    hold a key.
    """
    import requests

    class Session(requests.Session):
        def send(self, request: Any, **settings: Any) -> Any:
            settings |= {"stream": True, "allow_redirects": False}
            response = super().send(request, **settings)
            size = response.headers.get("Content-Length", "")
            if not (size.isdecimal() and int(size) <= ANSWER_BYTES):
                response._content, response._content_consumed = b"", True
                response.close()
            if 300 <= response.status_code < 400:
                response.status_code, response.reason = 421, "the endpoint redirects, and redirects are not followed"
            return response

    return Session()


class _GivenIds:
    """An id generator that returns the ids set in `given`."""

    given: tuple[int, int] = (1, 1)

    def generate_trace_id(self) -> int:
        return self.given[0]

    def generate_span_id(self) -> int:
        return self.given[1]

    def is_trace_id_random(self) -> bool:
        return False


class _ReportingExporter:
    """Wraps the exporter `inner` and reports its first failure."""

    def __init__(self, inner: Any, address: str, warn: Callable[[str], None]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._inner, self._address, self._warn, self._results = inner, without_secrets(address), warn, SpanExportResult
        self._told = False
        self._since_s: float | None = None

    def tell_if_stuck(self) -> None:
        """Report it if the endpoint has been busy with one batch for long. Called for each new
        span, because the sending thread is the one that waits.
        """
        since_s = self._since_s
        if since_s is not None and time.monotonic() - since_s > STUCK_S:
            self._tell(f"{self._address} has been answering for more than {STUCK_S:g} s")

    def _tell(self, reason: str) -> None:
        if not self._told:
            self._told = True
            self._warn(reason)

    def export(self, spans: Sequence[Any]) -> Any:
        reason = f"{self._address} did not take {len(spans)} spans"
        self._since_s = time.monotonic()
        try:
            result = self._inner.export(spans)
        except Exception as error:  # noqa: BLE001  # an HTTP client may raise anything
            said = without_secrets(str(error))[:200]
            result, reason = self._results.FAILURE, f"{reason} ({type(error).__name__}: {said})"
        finally:
            self._since_s = None
        if result is not self._results.SUCCESS:
            self._tell(reason)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()
