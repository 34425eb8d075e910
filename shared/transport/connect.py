"""Opens a transport from a URL: `nats://...` (or `tls://`) for a server, `memory://name` for
tests.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from shared.transport.base import Transport


async def connect(
    url: str,
    *,
    name: str,
    timeout_s: float = 10.0,
    key_file: str | None = None,
    ca_file: str | None = None,
    inbox_prefix: str = "_INBOX",
    domain: str = "",
) -> Transport:
    """Connect to one plane.

    Args:
        url: One server or several separated by commas. `memory://<name>` names a server inside this
            process.
        name: How the server's monitoring shows this connection, for example `alpha/verifier/0`.
        timeout_s: Deadline of the first connection. Afterwards reconnecting never ends.
        key_file: The nkey seed (`SU...`) or NATS credentials (`.creds`) of this process's user.
        ca_file: Certificate authority of a server with TLS, where the system does not know it.
        inbox_prefix: Where replies arrive; a server with permissions allows only one's own.
        domain: JetStream domain of the streams, where they lie behind a leaf server. Empty: the
            server's own.

    Raises:
        NotConnected: nothing answers in time.
        AccessDenied: the server refuses the key, its certificate is not trusted, or a file cannot
            be used.
    """
    if url.startswith("memory://"):
        from shared.transport.memory.transport import MemoryTransport, shared_server

        return MemoryTransport(shared_server(urlsplit(url).netloc))
    # Imported with the first connection: commands that make none start half a second sooner.
    from shared.transport.nats.connection import Connection
    from shared.transport.nats.options import Options
    from shared.transport.nats.transport import NatsTransport

    connection = Connection(
        Options(url=url, name=name, key_file=key_file, ca_file=ca_file, inbox_prefix=inbox_prefix, domain=domain)
    )
    await connection.open(timeout_s)
    return NatsTransport(connection)
