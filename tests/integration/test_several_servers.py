"""A url with several servers, of which some are not what they should be: the others are tried, and
nobody is spoken to in the clear.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.transport.base import AccessDenied, NotConnected
from shared.transport.connect import connect
from tests.nats_server import NatsServer, free_port
from tests.secured_server import make_certificates

LONG_S = 60.0
"""What nobody waits for."""


class Servers:
    """`trusted` shows a certificate of the client's authority, `impostors` one of another."""

    def __init__(self, folder: Path) -> None:
        self.authority, certificate, key = make_certificates(folder / "ours")
        _, other_certificate, other_key = make_certificates(folder / "theirs")
        self.trusted = self._start(folder / "trusted", certificate, key)
        self.impostors = [self._start(folder / f"impostor-{number}", other_certificate, other_key) for number in range(2)]
        self.plain = NatsServer(folder / "plain", config="debug: true\ntrace: true").start()

    @staticmethod
    def _start(folder: Path, certificate: Path, key: Path) -> NatsServer:
        return NatsServer(
            folder, config=f'debug: true\ntrace: true\ntls {{ cert_file: "{certificate}", key_file: "{key}" }}'
        ).start()

    def stop(self) -> None:
        for server in (self.trusted, *self.impostors, self.plain):
            server.kill()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    made = Servers(tmp_path_factory.mktemp("servers"))
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers are tried as they are given."""
    monkeypatch.setattr("nats.aio.client.shuffle", lambda servers: None)


def tls(*servers: NatsServer) -> str:
    return ",".join(f"tls://127.0.0.1:{server.port}" for server in servers)


async def test_a_certificate_that_does_not_pass_at_the_first_server_does_not_keep_a_client_from_the_second(
    servers: Servers,
) -> None:
    url = tls(servers.impostors[0], servers.trusted)
    plane = await connect(url, name="test", timeout_s=LONG_S, ca_file=str(servers.authority))
    assert plane.certificate_expires_at is not None
    assert str(plane.connection.client.connected_url.port) == str(servers.trusted.port)  # type: ignore[attr-defined]
    await plane.close()
    assert said_connect(servers.trusted)


async def test_where_no_server_passes_each_is_named_and_nobody_waits(servers: Servers) -> None:
    began = time.monotonic()
    with pytest.raises(AccessDenied) as refused:
        await connect(tls(*servers.impostors), name="test", timeout_s=LONG_S, ca_file=str(servers.authority))
    assert time.monotonic() - began < LONG_S
    told = str(refused.value).splitlines()
    assert [line.split(": ")[0] for line in told] == [tls(server) for server in servers.impostors]
    assert all("certificate does not pass" in line for line in told)


def said_connect(server: NatsServer) -> bool:
    """Return whether a client has spoken to it beyond its greeting."""
    return "CONNECT" in server.log_file.read_text()


@pytest.mark.parametrize("address", [tls, lambda server: server.url], ids=["as-tls", "as-nats"])
async def test_a_server_without_tls_after_one_whose_certificate_does_not_pass_is_told_nothing(
    address: Callable[[NatsServer], str], servers: Servers
) -> None:
    url = f"{tls(servers.impostors[0])},{address(servers.plain)}"
    with pytest.raises(AccessDenied, match=r"certificate does not pass.*\n.*offers no TLS"):
        await connect(url, name="test", timeout_s=LONG_S, ca_file=str(servers.authority))
    assert "Client connection created" in servers.plain.log_file.read_text()
    assert not said_connect(servers.plain) and not said_connect(servers.impostors[0])


async def test_a_refused_certificate_is_told_also_where_the_other_server_is_away(servers: Servers) -> None:
    url = f"{tls(servers.impostors[0])},tls://127.0.0.1:{free_port()}"
    with pytest.raises(NotConnected, match="certificate does not pass"):
        await connect(url, name="test", timeout_s=1.5, ca_file=str(servers.authority))
