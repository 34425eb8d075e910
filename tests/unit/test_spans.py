"""Spans of a group are one trace whoever sends them, and an endpoint that is away costs nothing.
That four real services send theirs is in tests/e2e/test_extension_examples.py.
"""

from __future__ import annotations

import gc
import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import structlog

from shared.config import NodeConfig, load_config
from shared.runtime import spans
from shared.runtime.spans import QUEUE, OtlpSpans, open_spans, tracing_warnings
from tests.otlp_collector import collecting

GROUP, SHARED = (hashlib.sha256(name).hexdigest() for name in (b"one", b"as the swarm knows it"))


def configured(endpoint: str = "", node: str = "alpha") -> NodeConfig:
    if endpoint:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
    return load_config(None, {"tasks": [{"dataset": "gcd"}], "node": {"id": node}})


@pytest.fixture(autouse=True)
def _no_variables_and_no_sink_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    yield
    os.environ.pop("OTEL_EXPORTER_OTLP_ENDPOINT", None)
    spans.send_to(None)


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_spans_of_different_processes_are_below_the_generators_in_one_trace() -> None:
    pytest.importorskip("opentelemetry.sdk")
    told: list[str] = []
    with collecting() as collector:
        for node, role, name in (("alpha", "generator", spans.GENERATE), ("beta", "verifier", spans.BORDER)):
            sink = OtlpSpans(configured(collector.url + "/", node), role, told.append)
            spans.send_to(sink)
            spans.emit(GROUP, name, seconds=1.5, outcome="refused", reason=None)
            sink.close()
    generated, refused = collector.spans
    assert collector.paths == {"/v1/traces"} and not told
    assert generated.trace_id == refused.trace_id == GROUP[:32]
    assert generated.parent_id == "" and refused.parent_id == generated.span_id != refused.span_id
    assert (generated.service, refused.service, refused.node) == ("swarm-generator", "swarm-verifier", "beta")
    assert refused.attributes == {"swarm.rollout_id": GROUP[:16], "swarm.outcome": "refused"}
    assert refused.seconds == pytest.approx(1.5, abs=0.01)


def test_a_group_that_was_shared_under_another_id_leads_to_its_other_trace() -> None:
    pytest.importorskip("opentelemetry.sdk")
    with collecting() as collector:
        sink = OtlpSpans(configured(collector.url), "verifier", print)
        spans.send_to(sink)
        spans.emit(GROUP, spans.SHARE, same_as=SHARED)
        spans.emit(GROUP, spans.SHARE, same_as=GROUP)
        sink.close()
    assert [span.links for span in collector.spans] == [(SHARED[:32],), ()]


def test_what_is_said_twice_is_one_span_and_two_outcomes_are_two() -> None:
    def id_of(**attributes: Any) -> int:
        return spans.span_id_of(spans.GroupSpan(group_id=GROUP, name="train", start_s=0, end_s=1, attributes=attributes), "alpha")

    assert id_of(step=3) == id_of(step=3) and len({id_of(step=3), id_of(step=4), id_of(outcome="refused")}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True], ids=["refuses", "hangs"])
def test_a_dead_endpoint_costs_a_service_nothing(hangs: bool) -> None:
    """Many more spans than the queue holds; the process ends in time, and the log says it once."""
    pytest.importorskip("opentelemetry.sdk")
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}" if hangs else closed_port()
        sink = OtlpSpans(configured(url), "sampler", told.append)
        spans.send_to(sink)
        gc.disable()  # of whatever else this process holds; a service's own is small
        started, slowest = time.monotonic(), 0.0
        for number in range(2 * QUEUE):
            before = time.thread_time()
            spans.emit(GROUP, spans.BATCH, step=number)
            slowest = max(slowest, time.thread_time() - before)
        each_s = (time.monotonic() - started) / (2 * QUEUE)
        gc.enable()
        closing = time.monotonic()
        sink.close()
        assert time.monotonic() - closing < 10
    assert each_s < 0.005 and slowest < 0.2, f"{1e6 * each_s:.0f} us a span, the slowest {1e3 * slowest:.1f} ms"
    assert len(told) <= 1 and all(sentence.startswith(f"{url} did not take ") for sentence in told)
    if not hangs:
        deadline = time.monotonic() + 30
        while not told and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(told) == 1


class Hostile(BaseHTTPRequestHandler):
    """Answers as its server's `answer` says."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked += 1  # type: ignore[attr-defined]
        self.server.answer(self)  # type: ignore[attr-defined]

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        """Not to the terminal."""


@contextmanager
def endpoint(answer: Callable[[Hostile], None]) -> Iterator[Any]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    server.answer, server.asked, server.daemon_threads = answer, 0, True  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def told_of(url: str, answered: Callable[[], bool]) -> list[str]:
    """Return what the log is told where one span goes to `url`, once that has answered."""
    told: list[str] = []
    sink = OtlpSpans(configured(url), "sampler", told.append)
    spans.send_to(sink)
    spans.emit(GROUP, spans.BATCH, step=1)
    sink.close()
    deadline = time.monotonic() + 30
    while not answered() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert answered()
    return told


@pytest.mark.parametrize("code", [302, 307])
def test_an_endpoint_that_sends_spans_elsewhere_is_told_and_not_followed(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret")

    def redirect(request: Hostile) -> None:
        request.send_response(code)
        request.send_header("Location", f"http://127.0.0.1:{other.server_port}/v1/traces")
        request.send_header("Content-Length", "0")
        request.end_headers()

    with endpoint(lambda request: request.send_response(200)) as other, endpoint(redirect) as first:
        told = told_of(f"http://127.0.0.1:{first.server_port}", lambda: first.asked > 0)
        assert [sentence.partition(" did not take ")[2] for sentence in told] == ["1 spans"]
        assert other.asked == 0


def test_an_answer_without_end_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk")
    sent, hung_up = [0], threading.Event()

    def flood(request: Hostile) -> None:
        request.send_response(200)
        request.end_headers()
        try:
            while sent[0] < 2**30:
                sent[0] += request.wfile.write(bytes(2**16))
        except OSError:
            hung_up.set()

    with endpoint(flood) as server:
        assert told_of(f"http://127.0.0.1:{server.server_port}", hung_up.is_set) == []
    assert sent[0] < 2**26, f"{sent[0]} bytes were taken"


@pytest.mark.slow
def test_an_endpoint_that_answers_a_byte_at_a_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk")
    monkeypatch.setattr(spans, "STUCK_S", 0.3)
    over, told = threading.Event(), list[str]()

    def dribble(request: Hostile) -> None:
        request.wfile.write(b"HTTP/1.1 200 ")
        while not over.wait(0.1):
            request.wfile.write(b"O")

    with endpoint(dribble) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        sink = OtlpSpans(configured(url), "sampler", told.append)
        deadline = time.monotonic() + 30
        while not told and time.monotonic() < deadline:
            sink.take(spans.GroupSpan(group_id=GROUP, name=spans.BATCH, start_s=1.0, end_s=2.0))
            time.sleep(0.05)
        over.set()
        sink.close()
    assert told == [f"{url} has been answering for more than 0.3 s"]


@pytest.mark.slow
def test_what_is_secret_in_an_address_is_in_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk")
    where = closed_port().removeprefix("http://")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://me:hidden@{where}/v1/traces?key=hidden")
    told = list[str]()
    sink = OtlpSpans(configured(), "sampler", told.append)
    sink.take(spans.GroupSpan(group_id=GROUP, name=spans.BATCH, start_s=1.0, end_s=2.0))
    sink.close()
    deadline = time.monotonic() + 30
    while not told and time.monotonic() < deadline:
        time.sleep(0.02)
    assert told[0].startswith(f"http://{where}/v1/traces") and "hidden" not in told[0]


def test_without_an_endpoint_nothing_is_made_and_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_spans(configured(), "trainer", structlog.get_logger()) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", closed_port())
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert open_spans(configured(), "trainer", structlog.get_logger()) is None
    spans.emit("no content id", spans.TRAIN)
    assert not spans.wanted()


def test_a_missing_extra_is_a_warning_that_names_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The packages are here, so looking for them is replaced."""
    monkeypatch.setattr(spans, "find_spec", lambda name: None if name.startswith("opentelemetry") else pytest.fail(name))
    sentence = "which are not installed: pip install 'swarm-rl[otel]'"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    (told,) = tracing_warnings(os.environ)
    assert told.startswith("OTEL_EXPORTER_OTLP_ENDPOINT needs the packages") and sentence in told
    with structlog.testing.capture_logs() as logged:
        assert open_spans(configured(), "trainer", structlog.get_logger()) is None
    assert [event["event"] for event in logged] == ["spans_not_sent"]
