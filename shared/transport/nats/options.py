"""Address and credentials of a connection to a NATS server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """How to reach a server. Secrets are given as files, never as values."""

    url: str
    name: str
    key_file: str | None = None
    """An nkey seed (`SU...`) or NATS credentials (`.creds`)."""
    ca_file: str | None = None
    inbox_prefix: str = "_INBOX"
    domain: str = ""
    """JetStream domain behind the server; for a client of a leaf server, the hub's. Empty: the
    server's own.
    """

    may_ask: bool = True
    """Whether this user may ask the server about streams (`STREAM.INFO`)."""

    @property
    def servers(self) -> list[str]:
        """The addresses in `url`, each once."""
        return list(dict.fromkeys(self.url.split(",")))

    @property
    def api_prefix(self) -> str:
        """First tokens of JetStream's API subjects."""
        return f"$JS.{self.domain}.API" if self.domain else "$JS.API"

    @property
    def demands_tls(self) -> bool:
        """Whether this connection must be encrypted: it has an authority file or a `tls://` url."""
        return self.ca_file is not None or any(url.startswith("tls://") for url in self.servers)
