"""What docs/kubernetes-trouble.md quotes of services and NATS is what they say."""

from __future__ import annotations

import asyncio
import re
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from shared.transport.base import AccessDenied
from shared.transport.connect import connect
from swarm_cli.k8s import certificates
from tests.cluster.wrongs import SHOWN
from tests.k8s import kubernetes_words
from tests.k8s.manifests import REPOSITORY
from tests.nats_server import find_binary, free_port

PAGE = (REPOSITORY / "docs" / "kubernetes-trouble.md").read_text()
TABLE = PAGE.split("## CrashLoopBackOff")[1].split("\n## ")[0]
START_TIMEOUT_S = 120.0


def quoted(words: str) -> str:
    """`words`, which the table has in its first column."""
    assert re.search(rf"^\| [^|]*`{re.escape(words)}`", TABLE, re.MULTILINE), words
    return words


def secured(folder: Path, *, ago: timedelta) -> tuple[subprocess.Popen[str], int]:
    """A server whose certificate was made `ago`."""
    began, key, authority_key = datetime.now(UTC) - ago, certificates.new_key(), certificates.new_key()
    authority = certificates.authority(authority_key, "ca", began)
    for name, text in (
        ("ca.crt", authority),
        ("tls.crt", certificates.server(key, ["127.0.0.1"], authority, authority_key, began)),
        ("tls.key", key),
    ):
        (folder / name).write_text(text)
    port = free_port()
    tls = f"tls {{ cert_file: {folder}/tls.crt, key_file: {folder}/tls.key }}"
    (folder / "nats.conf").write_text(f"host: 127.0.0.1\nport: {port}\n{tls}\n")
    return subprocess.Popen([find_binary(), "-c", str(folder / "nats.conf")], stderr=subprocess.DEVNULL, text=True), port


async def refusal(port: int, authority: Path, key: Path | None = None) -> str:
    """Return what a service says that is refused; it waits for a server that is not there yet."""
    with pytest.raises(AccessDenied) as told:
        await connect(
            f"tls://127.0.0.1:{port}",
            name="it",
            timeout_s=START_TIMEOUT_S,
            key_file=str(key) if key is not None else None,
            ca_file=str(authority),
            inbox_prefix="_INBOX_it",
        )
    return str(told.value)


@pytest.mark.slow
async def test_a_certificate_that_has_run_out_and_one_of_another_authority(tmp_path: Path) -> None:
    old, other = tmp_path / "old", tmp_path / "other"
    servers = []
    for folder, ago in ((old, certificates.SERVER_LASTS + timedelta(days=1)), (other, timedelta())):
        folder.mkdir()
        servers.append(secured(folder, ago=ago))
    try:
        expired = await refusal(servers[0][1], old / "ca.crt")
        assert quoted("the server's certificate has run out") in expired and "swarm k8s secrets" in expired
        assert quoted("the server's certificate does not pass") in await refusal(servers[1][1], old / "ca.crt")
    finally:
        for process, _ in servers:
            process.kill()
            await asyncio.to_thread(process.wait)


async def test_a_key_that_cannot_be_read(tmp_path: Path) -> None:
    """Said before any server is asked."""
    authority, key = tmp_path / "ca.crt", tmp_path / "node.nk"
    authority.write_text(certificates.authority(certificates.new_key(), "ca", datetime.now(UTC)))
    assert quoted("node.nk does not exist") in await refusal(1, authority, key)
    key.write_text("SUAKEYTHATISNONE")
    assert quoted("holds neither an nkey seed nor NATS credentials") in await refusal(1, authority, key)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("tls { cert_file: tls.crt, key_file: tls.key }", "error parsing X509 certificate/key pair"),
        ("include accounts.conf\nmax_connections: $swarm_max_connections", "variable reference for 'swarm_max_connections'"),
    ],
)
def test_a_server_without_its_certificate_or_accounts(config: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "accounts.conf").write_text("")
    (tmp_path / "nats.conf").write_text(config)
    command = [find_binary(), "-t", "-c", "nats.conf"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode != 0 and quoted(words) in done.stderr


def test_every_quote_of_kubernetes_is_shown_by_a_control_plane_or_marked_as_not_shown() -> None:
    """`make test-cluster` brings each about (tests/cluster/test_cluster_words.py)."""
    brought_about = [words for quotes in SHOWN.values() for words in quotes]
    assert sorted(brought_about) == sorted(words for words, shown in kubernetes_words.quoted().items() if shown)
