"""The folder of a node that has joined trusts the authority that it trusted before: an invitation
may take older certificates of it away, and neither add one nor take the newest away; and a server
whose certificate does not pass is not the folder's hub.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from shared.config import load_config
from swarm_cli.errors import CommandError
from swarm_cli.invitation import Invitation
from swarm_cli.join import findings
from swarm_cli.join.command import prepare
from swarm_cli.join.hub import look_at_hub
from swarm_cli.join.newcomer import JoinFolder
from swarm_cli.k8s import certificates
from tests.nats_server import NatsServer
from tests.secured_server import make_certificates
from tests.unit.test_invitation import KEY, invitation

AUTHORITIES = {
    name: certificates.authority(certificates.new_key(), f"authority {name}", datetime(2026, 1, day, tzinfo=UTC))
    for day, name in enumerate("ABC", 1)
}
"""Each made a day after the one before."""


def with_authority(names: str) -> Invitation:
    return invitation(url="tls://hub:4222", authority="".join(AUTHORITIES[each] for each in names).encode())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JoinFolder:
    monkeypatch.setenv("SWARM_NODE__VAR_DIR", str(tmp_path))
    return JoinFolder(tmp_path / "joined" / "demo")


@pytest.mark.parametrize(
    ("trusted", "later", "admitted"),
    [("AB", "B", True), ("AB", "BA", True), ("AB", "A", False), ("A", "AB", False), ("AB", "C", False), ("A", "", False)],
)
def test_a_token_may_take_older_certificates_of_the_authority_away(
    folder: JoinFolder, trusted: str, later: str, admitted: bool
) -> None:
    first, second = with_authority(trusted), with_authority(later)
    key = prepare(first).hub_key
    folder.confirm()
    folder.keep_authority(first.authority)
    if admitted:
        assert prepare(second).hub_key == key
        folder.keep_authority(second.authority)
        assert json.loads(folder.hub_file.read_text())["reached"]
        return
    with pytest.raises(CommandError, match="belongs to tls://hub:4222"):
        prepare(second)
    assert prepare(first).hub_key == key


def test_a_certificate_that_cannot_be_read_takes_nothing_away(folder: JoinFolder) -> None:
    block = b"-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"
    first = invitation(url="tls://hub:4222", authority=2 * block)
    prepare(first)
    folder.confirm()
    folder.keep_authority(first.authority)
    with pytest.raises(CommandError, match="belongs to tls://hub:4222"):
        prepare(invitation(url="tls://hub:4222", authority=block))


def test_a_server_whose_certificate_does_not_pass_is_told_as_that_and_was_not_reached(tmp_path: Path) -> None:
    _, certificate, key = make_certificates(tmp_path / "tls")
    server = NatsServer(tmp_path / "server", config=f'tls {{ cert_file: "{certificate}", key_file: "{key}" }}').start()
    (tmp_path / "other.crt").write_text(AUTHORITIES["A"])
    url = server.url.replace("nats://", "tls://")
    try:
        nats = {"node_url": url, "swarm_url": url, "swarm_ca_file": str(tmp_path / "other.crt")}
        look = asyncio.run(look_at_hub(load_config(overrides={"nats": nats, "tasks": [{"dataset": "gcd"}]})))
    finally:
        server.kill()
    assert not look.reached and "certificate does not pass" in look.refused
    told = findings.connection(look, invitation(url=url), "nova", KEY, KEY)
    assert told.ok is False and "certificate does not pass" in told.told and "Send its operator" not in told.told
    listed = findings.connection(replace(look, reached=True), invitation(url=url), "nova", KEY, KEY)
    assert "Send its operator this line" in listed.told
