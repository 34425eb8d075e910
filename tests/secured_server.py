"""A nats-server with TLS, and with the keys and permissions that `swarm nats` makes. Its
certificate is made at test time.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from typer.testing import CliRunner

from shared.config import NodeConfig, load_config
from shared.identity.permissions import SWARM_ACCOUNT, node_account_name, user_account
from shared.roles import OPERATOR
from shared.transport.nats.claims import key_of, user_claims
from swarm_cli.app import app
from tests.nats_server import NatsServer, free_port


def make_certificates(folder: Path, host: str = "127.0.0.1") -> tuple[Path, Path, Path]:
    """Make a certificate authority, and a server certificate and key signed by it. Returns the
    paths of the PEM files (authority, certificate, key).
    """
    folder.mkdir(parents=True, exist_ok=True)
    authority_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
    authority = (
        _certificate(issuer, issuer, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    server = (
        _certificate(subject, issuer, server_key.public_key())
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    paths = folder / "ca.pem", folder / "server.pem", folder / "server.key"
    paths[0].write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(server.public_bytes(serialization.Encoding.PEM))
    paths[2].write_bytes(
        server_key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths


def _certificate(subject: x509.Name, issuer: x509.Name, public_key: Any) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
    )


def swarm(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """Run a `swarm` command and return its standard output."""
    result = CliRunner().invoke(app, list(arguments), env=environment, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


class SecuredServer(NatsServer):
    """A server for the planes given to `swarm nats config --plane`. Key files are in
    `folder/keys`.
    """

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[str],
        *,
        plane: str = "both",
        keys: Path | None = None,
        more: Sequence[str] = (),
        accounts: str = "text",
    ) -> None:
        """`more`: further arguments of `swarm nats config`."""
        self.nodes = list(nodes)
        self.accounts = accounts
        self.keys = keys or folder / "keys"
        self.ca_file, cert, key = make_certificates(folder / "tls")
        swarm("nats", "keys", *nodes, "operator", "--folder", str(self.keys))
        where = ("--folder", str(self.keys), "--tls-cert", str(cert), "--tls-key", str(key), "--sync-interval", "1m")
        self._text = swarm("nats", "config", "--nodes", ",".join(nodes), "--plane", plane, "--accounts", accounts, *where, *more)
        super().__init__(folder, port=free_port())

    def configure(self, config: str = "", jetstream: str = "") -> None:
        """Write the output of `swarm nats config`."""
        self._config_file.write_text(self._text + config)

    @property
    def url(self) -> str:
        return f"tls://127.0.0.1:{self.port}"

    def signing_in(self, key_file: Path) -> dict[str, Any]:
        """Arguments of nats-py's `connect` for the holder of a key file."""
        if self.accounts == "text":
            return {"nkeys_seed": str(key_file)}
        key, (node, name) = key_of(key_file.read_text()), key_file.with_suffix("").parts[-2:]
        streams = SWARM_ACCOUNT if name == "swarm" or node == OPERATOR else node_account_name(node)
        account = "WATCH" if name == "watch" else user_account(streams, node if name == "swarm" else name)
        claims = user_claims(key, account).encode()
        return {"user_jwt_cb": lambda: claims, "signature_cb": lambda nonce: base64.b64encode(key.sign(nonce.encode()))}

    def violations(self) -> list[str]:
        """The permission violations in the server's log."""
        return [line for line in self.log_file.read_text().splitlines() if "Violation" in line]

    def config(self, node: str, var_dir: Path, **sections: Any) -> NodeConfig:
        """A node's configuration for this server."""
        nats = {
            "node_url": self.url,
            "swarm_url": self.url,
            "node_key_file": str(self.keys / "{node}" / "{role}.nk"),
            "swarm_key_file": str(self.keys / "{node}" / "swarm.nk"),
            "node_ca_file": str(self.ca_file),
            "swarm_ca_file": str(self.ca_file),
            "create_streams": False,
            "connect_timeout_s": 5.0,
        }
        nats |= sections.pop("nats", {})
        given = {"node": {"id": node, "var_dir": str(var_dir), "run": "test"}, "nats": nats, "tasks": [{"dataset": "gcd"}]}
        return load_config(None, {**given, **sections})

    def init(self, plane: str, config: NodeConfig, *flags: str) -> None:
        """Create the streams as the operator: `swarm nats init`."""
        nats = config.nats
        key = str(self.keys / "operator" / "swarm.nk") if plane == "swarm" else str(self.keys / config.node.id / "operator.nk")
        environment = {
            "SWARM_NODE__ID": config.node.id,
            "SWARM_NATS__NODE_URL": nats.node_url,
            "SWARM_NATS__SWARM_URL": str(nats.swarm_url),
            "SWARM_NATS__NODE_CA_FILE": nats.node_ca_file,
            "SWARM_NATS__SWARM_CA_FILE": nats.swarm_ca_file,
        }
        swarm("nats", "init", "--plane", plane, "--key", key, *flags, environment=environment)
