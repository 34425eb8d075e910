"""Two things that run out of hand silently, as figures: a machine's clock and a server's
certificate.
"""

from __future__ import annotations

import time
from pathlib import Path

from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from shared.contracts.streams import ensure_node_streams
from shared.runtime.metrics import PlaneMetrics
from shared.runtime.status import ClockSkew, StatusBoard, ahead_s
from shared.transport.connect import connect
from tests.nats_server import NatsServer, own_plane
from tests.secured_server import make_certificates


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
        await StatusBoard("alpha", "verifier", "0").report_once(transport, clock)
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
    await StatusBoard("alpha", "verifier", "0").report_once(transport, ClockSkew(registry))
    assert abs(registry.get_sample_value("swarm_clock_skew_seconds") or 0.0) <= time.time() - before
    assert transport.certificate_expires_at is None


@given(st.floats(0, 1e9), st.floats(0, 30), st.floats(0, 1), st.floats(-1e4, 1e4))
def test_what_a_slow_answer_leaves_open_is_not_held_against_a_clock(sent: float, took: float, part: float, off: float) -> None:
    stored = sent + part * took - off  # the server's clock shows `off` seconds less than ours
    found = ahead_s(sent, stored, sent + took)
    assert abs(found) <= abs(off) + 1e-3 and abs(found - off) <= took + 1e-3
