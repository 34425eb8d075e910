"""Two things that run out of hand silently, as figures: a machine's clock and a server's
certificate.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import structlog
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from shared.cancelling import cancel_and_wait
from shared.contracts.status_figures import StatusFigure
from shared.contracts.streams import ensure_node_streams
from shared.runtime.metrics import PlaneMetrics
from shared.runtime.status import ClockSkew, StatusBoard, ahead_s
from shared.transport.base import Transport
from shared.transport.connect import connect
from tests.nats_server import NatsServer, own_plane
from tests.secured_server import make_certificates


async def reported(transport: Transport, clock: ClockSkew, registry: CollectorRegistry) -> tuple[StatusBoard, list[str]]:
    """A process's board after its first report, and the warnings in its log."""
    board, told = StatusBoard("alpha", "verifier", "0"), []
    with capture_logs() as logs:
        reporting = asyncio.create_task(board.report(transport, structlog.get_logger(), clock))
        try:
            for _ in range(2000):
                await asyncio.sleep(0.01)
                if registry.get_sample_value("swarm_clock_skew_seconds") is not None:
                    break
            await asyncio.sleep(0.05)
        finally:
            await cancel_and_wait(reporting)
        told = [line["event"] for line in logs if line["log_level"] == "warning"]
    return board, told


@pytest.mark.parametrize("ahead_s", [7200.0, -7200.0, 3.0])
async def test_a_clock_that_is_off_by_much_is_logged_and_shown(monkeypatch: pytest.MonkeyPatch, ahead_s: float) -> None:
    """The server runs on this machine, so this process's clock alone is made wrong."""
    transport = await own_plane()
    await ensure_node_streams(transport, "alpha")
    true_time = time.time
    monkeypatch.setattr("shared.runtime.status.time.time", lambda: true_time() + ahead_s)
    registry = CollectorRegistry()
    board, told = await reported(transport, ClockSkew(registry), registry)
    off = abs(ahead_s) > 20
    assert board.get(StatusFigure.CLOCK_AHEAD_S) == (pytest.approx(ahead_s, abs=2.0) if off else 0.0)
    assert told == (["clock_off"] if off else [])


async def test_a_process_measures_its_clock_and_reads_its_servers_certificate(tmp_path: Path) -> None:
    ca, certificate, key = make_certificates(tmp_path)
    ends_at = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    config = f'tls {{ cert_file: "{certificate}", key_file: "{key}" }}'
    server = NatsServer(tmp_path / "nats", config=config).start()
    registry = CollectorRegistry()
    try:
        transport = await connect(server.url, name="test", timeout_s=20.0, ca_file=str(ca))
        await ensure_node_streams(transport, "alpha")
        clock, planes = ClockSkew(registry), PlaneMetrics(registry)
        planes.watch("node", lambda: transport)
        planes.watch("swarm", lambda: None)
        assert registry.get_sample_value("swarm_clock_skew_seconds") is None, "absent until measured"
        await reported(transport, clock, registry)
        skew_s = registry.get_sample_value("swarm_clock_skew_seconds")
        expiry = "swarm_certificate_expiry_timestamp_seconds"
        ends, absent = (registry.get_sample_value(expiry, {"plane": plane}) for plane in ("node", "swarm"))
        await transport.close()
    finally:
        server.kill()
    assert skew_s is not None and abs(skew_s) < 1.0, "both on one machine"
    assert ends is not None and abs(ends - ends_at.timestamp()) <= 1.0 and absent is None


async def test_without_tls_there_is_no_certificate_and_the_clock_of_a_server_on_this_machine_is_the_same() -> None:
    transport = await own_plane()
    await ensure_node_streams(transport, "alpha")
    registry = CollectorRegistry()
    before = time.time()
    await reported(transport, ClockSkew(registry), registry)
    assert abs(registry.get_sample_value("swarm_clock_skew_seconds") or 0.0) <= time.time() - before
    assert transport.certificate_expires_at is None


@given(st.floats(0, 1e9), st.floats(0, 30), st.floats(0, 1), st.floats(-1e4, 1e4))
def test_what_a_slow_answer_leaves_open_is_not_held_against_a_clock(sent: float, took: float, part: float, off: float) -> None:
    stored = sent + part * took - off  # the server's clock shows `off` seconds less than ours
    found = ahead_s(sent, stored, sent + took)
    assert abs(found) <= abs(off) + 1e-3 and abs(found - off) <= took + 1e-3
