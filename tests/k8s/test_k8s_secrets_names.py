"""`swarm k8s secrets` refuses what is no node, namespace or server's name before it writes
anything, and tells such names that a certificate still has.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm_cli.app import app
from swarm_cli.errors import CommandError
from swarm_cli.k8s.secret_objects import checked_namespace, checked_server_name


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--nodes", ""), "--nodes is empty: name every node that the servers admit; if it is a variable, set it"),
        (("--nodes", "alpha,,beta"), "--nodes 'alpha,,beta' has an empty name between its commas"),
        (("--nodes", "alpha,"), "--nodes 'alpha,' has an empty name between its commas"),
        (("--nodes", "alpha", "--nodes", ""), "--nodes is empty"),
        (("--nodes", "alpha", "--namespace", "Sw arm"), "--namespace 'Sw arm' is no Kubernetes namespace"),
        (("--nodes", "alpha", "--namespace", ""), "--namespace '' is no Kubernetes namespace"),
        (("--nodes", "alpha", "--server-name", "nope nope"), "--server-name 'nope nope' is neither a DNS name nor an IP address"),
        (("--nodes", "alpha", "--server-name", ""), "--server-name '' is neither a DNS name nor an IP address"),
        (("--nodes", "alpha", "--domain", "the hub"), "--domain 'the hub' is no JetStream domain"),
    ],
)
def test_what_is_no_name_is_refused_before_anything_is_written(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    keys = tmp_path / "keys"
    result = CliRunner().invoke(app, ["k8s", "secrets", *arguments, "--keys", str(keys)])
    assert isinstance(result.exception, CommandError), result.output
    assert told in str(result.exception)
    assert not result.stdout and not keys.exists()


@pytest.mark.parametrize("name", ["swarm", "a", "swarm-2", "2swarm", "s" * 63])
def test_every_kubernetes_namespace_is_taken(name: str) -> None:
    assert checked_namespace(name) == name


@pytest.mark.parametrize("name", ["-swarm", "swarm-", "sw.arm", "s" * 64, "swarm\n", "Swarm", "schwärm"])
def test_no_other_namespace_is_taken(name: str) -> None:
    with pytest.raises(CommandError, match="is no Kubernetes namespace"):
        checked_namespace(name)


@pytest.mark.parametrize(
    "name", ["hub", "Hub.Example.org", "*.example.org", "nats_hub", "192.0.2.10", "2001:db8::1", ".".join(["a" * 63] * 3)]
)
def test_every_name_of_a_server_is_taken(name: str) -> None:
    assert checked_server_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "hub.",
        ".hub",
        "a..b",
        "-hub",
        "hub-.org",
        "hub\n",
        "tls://hub",
        "hub:4222",
        "hub,other",
        "a" * 64,
        ".".join(["a" * 60] * 5),
        "*",
        "a.*",
        "höhle",
        "1.2.3",
        "1.2.3.400",
    ],
)
def test_no_other_name_of_a_server_is_taken(name: str) -> None:
    with pytest.raises(CommandError, match="is neither a DNS name nor an IP address"):
        checked_server_name(name)
