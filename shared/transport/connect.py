"""Opens a transport from the URL of a server: `nats://...` or `tls://...`."""

from __future__ import annotations

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
    may_ask: bool = True,
    hub: bool = False,
    refused_s: float = 0.0,
    accounts: tuple[str, ...] = (),
) -> Transport:
    """Connect to one plane.

    Args:
        url: One server or several separated by commas.
        name: How the server's monitoring shows this connection, for example `alpha/verifier/0`.
        timeout_s: Deadline of the first connection. After that, reconnecting never ends.
        key_file: The nkey seed (`SU...`) or NATS credentials (`.creds`) of this process's user.
        ca_file: Certificate authority of a server with TLS, if the system does not know it.
        inbox_prefix: Subject prefix for replies; a server with permissions allows each user only
            its own.
        domain: JetStream domain of the streams, if they are behind a leaf server. Empty: the
            server's own.
        may_ask: Whether this user may ask the server about streams. If not, `stream_state` and
            `counts` fail at once, and what a stream accepts is not asked before publishing.
        hub: Whether the server is a swarm's hub, which nobody here can start: errors then name
            another remedy.
        refused_s: For how long a key that the server refuses is tried again.
        accounts: Names of the accounts that the key may be of, if the server's are claims.

    Raises:
        NotConnected: no answer in time.
        AccessDenied: the server refuses the key, its certificate is not trusted, or a file cannot
            be used.
    """
    # Imported with the first connection, so that commands without one start half a second sooner.
    from shared.transport.nats.connection import Connection, Options
    from shared.transport.nats.transport import NatsTransport

    connection = Connection(
        Options(
            url=url,
            name=name,
            key_file=key_file,
            ca_file=ca_file,
            inbox_prefix=inbox_prefix,
            domain=domain,
            may_ask=may_ask,
            hub=hub,
            accounts=accounts,
        )
    )
    await connection.open(timeout_s, refused_s)
    return NatsTransport(connection)
