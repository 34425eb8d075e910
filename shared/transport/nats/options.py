"""Address and credentials of a connection to a NATS server."""

from __future__ import annotations

from dataclasses import dataclass

_HUB = "check the network on the way and the hub's server"


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
    hub: bool = False
    """Whether the server is a swarm's hub, which nobody here can start."""

    @property
    def servers(self) -> list[str]:
        """The addresses in `url`, each once."""
        return list(dict.fromkeys(self.url.split(",")))

    @property
    def if_absent(self) -> str:
        """What to do if the server does not answer a first connection."""
        return f"{_HUB}, or set nats.swarm_url" if self.hub else "start one with `swarm up` (`make run`), or set nats.node_url"

    @property
    def if_lost(self) -> str:
        """What to do if the server does not come back."""
        again = "start it again (`swarm restart nats` in a running swarm, `swarm up` otherwise)"
        return f"if it stays away, {_HUB if self.hub else again}"

    @property
    def api_prefix(self) -> str:
        """First tokens of JetStream's API subjects."""
        return f"$JS.{self.domain}.API" if self.domain else "$JS.API"

    @property
    def demands_tls(self) -> bool:
        """Whether this connection must be encrypted: it has an authority file or a `tls://` url."""
        return self.ca_file is not None or any(url.startswith("tls://") for url in self.servers)
