"""What `swarm nats config` refuses to write, and what it writes for hubs, sites and the watch."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm_cli.app import app
from swarm_cli.nats.account_list import public_key_of
from tests.nats_server import find_binary

NODE = ("--plane", "node", "--nodes", "alpha")
SWARM = ("--plane", "swarm", "--nodes", "alpha")


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["nats", *arguments, "--folder", str(folder)])
    told = f"{result.output} {result.exception or ''}"
    return result.exit_code, " ".join(told.split())


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    assert run(tmp_path, "keys", "alpha", "operator")[0] == 0
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((*SWARM, "--leaf-port", "7422"), "--leaf-port needs --domain"),
        ((*SWARM, "--hub-url", "tls://hub:7422"), "--hub-url is for a site's server"),
        ((*NODE, "--hub-url", "nats://hub:7422"), "anyone on the network path can read and change"),
        ((*NODE, "--leaf-port", "7422", "--domain", "hub", "--accounts-only"), "--accounts-only prints no leaf port"),
        ((*SWARM, "--host", "0.0.0.0"), "needs --tls-cert and --tls-key"),
        ((*NODE, "--tls-cert", "c.pem"), "give both or neither"),
        ((*NODE, "--store-dir", "/data", "--accounts-only"), "omit --store-dir and set it in the file"),
        ((*SWARM, "--push", "tls://hub:4222"), "give --plane swarm --accounts claims with it"),
        ((*SWARM, "--accounts", "claims", "--accounts-only"), "leave out --accounts claims, or --accounts-only"),
        ((*NODE, "--accounts", "claims"), "a node's own server takes text"),
        ((*SWARM, "--node-connections", "0"), "0, which shuts nodes out, needs --push"),
        (("--plane", "swarm", "--nodes", ""), "--nodes is empty: name"),
        (("--plane", "node", "--nodes", "alpha,,alpha"), "--nodes 'alpha,,alpha' has an empty name between its commas"),
        ((*SWARM, "--domain", "the hub"), "--domain 'the hub' is no JetStream domain"),
    ],
)
def test_what_would_not_be_safe_is_refused_with_the_remedy(keys: Path, arguments: tuple[str, ...], told: str) -> None:
    code, output = run(keys, "config", *arguments)
    assert code != 0 and told in output, output


def test_what_is_no_nodes_name_gets_no_key(tmp_path: Path) -> None:
    for arguments in (["nats", "keys", "", "--folder"], ["keys", "new", "--name", "Sw arm", "--out"]):
        result = CliRunner().invoke(app, [*arguments, str(tmp_path / "new")])
        assert result.exit_code != 0 and "is not a node name" in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_a_site_connects_as_its_node_and_no_seed_is_printed(keys: Path) -> None:
    code, text = run(keys, "config", *NODE, "--hub-url", "tls://hub:7422", "--hub-ca", "ca.pem")
    assert code == 0
    assert 'url: "tls://hub:7422", nkey: $SWARM_KEY_ALPHA, account: "HUB_ALPHA", tls { ca_file: "ca.pem" }' in text
    assert 'domain: "site"' in text
    for file in keys.rglob("*.nk"):
        assert file.read_text().strip() not in text


def test_the_watch_is_listed_if_its_key_is_there(keys: Path) -> None:
    assert "WATCH {" in run(keys, "config", *NODE)[1]
    (keys / "operator" / "watch.nk").unlink()
    code, text = run(keys, "config", *NODE)
    assert code == 0 and "WATCH" not in text


@pytest.mark.parametrize(("given", "kept_in"), [((), "nats-node"), (("--store-dir", "/var/lib/nats/a b"), "/var/lib/nats/a b")])
def test_streams_are_kept_in_a_folder_that_outlives_the_machine(keys: Path, given: tuple[str, ...], kept_in: str) -> None:
    """nats-server's default is the temporary folder."""
    code, text = run(keys, "config", *NODE, *given)
    assert code == 0 and f'store_dir: "{kept_in}"' in text


@pytest.mark.parametrize("more", [(), ("--accounts-only",)])
def test_a_configuration_that_cannot_be_made_leaves_the_file_as_it_was(keys: Path, more: tuple[str, ...]) -> None:
    """The shell's `>` empties it first, and a server started from an empty file lets everybody
    in.
    """
    file = keys / "nats.conf"
    file.write_text("as it was")
    code, told = run(keys, "config", "--plane", "node", "--nodes", "alpha,nobody", "--out", str(file), *more)
    assert code != 0 and "make it with `swarm nats keys nobody`" in told
    assert file.read_text() == "as it was"
    absent = keys / "absent.conf"
    assert run(keys, "config", "--plane", "node", "--nodes", "nobody", "--out", str(absent), *more)[0] != 0
    assert not absent.exists()


def test_a_full_disk_leaves_the_file_as_it_was_and_nothing_beside_it(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync fails in its place, since a full disk cannot be had in a test without being root."""
    file = keys / "conf" / "nats.conf"
    file.parent.mkdir()
    file.write_text("as it was")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    code, told = run(keys, "config", *NODE, "--out", str(file))
    assert code != 0 and "No space left on device" in told and "is unchanged" in told
    assert file.read_text() == "as it was" and list(file.parent.iterdir()) == [file]


def test_out_writes_what_is_printed_keeps_the_mode_and_the_link_and_the_server_takes_it(keys: Path) -> None:
    file, link = keys / "nats.conf", keys / "link.conf"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    printed = CliRunner().invoke(app, ["nats", "config", *NODE, "--folder", str(keys)]).stdout
    assert run(keys, "config", *NODE, "--out", str(link))[0] == 0
    assert file.read_text() == printed != "" and file.stat().st_mode & 0o777 == 0o640 and link.is_symlink()
    checked = subprocess.run([find_binary(), "-t", "-c", str(file)], capture_output=True, text=True, timeout=180, check=False)
    assert checked.returncode == 0, checked.stderr


def test_a_newcomers_line_with_a_members_key_is_refused_because_no_server_would_take_the_file(keys: Path) -> None:
    """Nor would a server that runs take any later change, or start again."""
    out = keys / "accounts.conf"
    for holder in ("alpha", "operator"):
        taken = public_key_of(keys / holder / "swarm.nk")
        nodes = ("--plane", "swarm", "--nodes", f"alpha,evil={taken}")
        code, told = run(keys, "config", *nodes, "--accounts-only", "--out", str(out))
        assert code and "have the same public key" in told and holder in told and "evil of SWARM" in told, told
        assert not out.exists()
    code, told = run(keys, "config", "--plane", "swarm", "--nodes", "alpha,x=")
    assert code and "'x=' has no public key" in told


@pytest.mark.parametrize("interval", ["10", "10 s", "never", "", "0s", "10s\n  max_file_store: 1", "9999999h"])
def test_an_interval_that_no_server_takes_is_refused(interval: str) -> None:
    done = CliRunner().invoke(app, ["nats", "config", "--plane", "swarm", "--nodes", "alpha", "--sync-interval", interval])
    assert "is no interval" in str(done.exception)
