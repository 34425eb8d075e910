"""`swarm k8s secrets` keeps which nodes there are, so that no later run shuts one out by leaving it
out of a list.
"""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from shared.identity.keys import SigningKey, load, new_seed
from swarm_cli.app import app
from swarm_cli.errors import CommandError
from swarm_cli.k8s import certificates

ROOT = Path(__file__).parents[2]
REFUSED = "the servers will refuse them"


def run(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["k8s", "secrets", "--keys", str(folder), *arguments])


def test_later_runs_print_the_same_without_naming_the_nodes_and_know_those_that_were_added(tmp_path: Path) -> None:
    first = run(tmp_path, "--nodes", "alpha,beta")
    again = run(tmp_path)
    assert first.exit_code == again.exit_code == 0 and again.stdout == first.stdout and not again.stderr
    run(tmp_path, "--nodes", "alpha,beta,delta")
    renewed = run(tmp_path, "--server-name", "hub.example.org")
    assert "name: delta-signing" in renewed.stdout and REFUSED not in renewed.stderr


def test_a_node_outside_is_added_without_naming_those_of_the_cluster(tmp_path: Path) -> None:
    before = run(tmp_path, "--nodes", "alpha,beta")
    outside = SigningKey(new_seed()).public_key
    done = run(tmp_path, "--nodes", f"laptop={outside}")
    assert done.exit_code == 0 and REFUSED not in done.stderr
    assert done.stdout.count("\nkind: ") == before.stdout.count("\nkind: ")
    assert (tmp_path / "nodes.txt").read_text().split() == ["alpha", "beta"]
    assert (tmp_path / "guests.txt").read_text() == f"laptop {outside}\n"


def test_a_node_that_is_left_out_once_is_refused_until_it_is_named_again(tmp_path: Path) -> None:
    run(tmp_path, "--nodes", "alpha,beta")
    assert f"{REFUSED} after the next reload: beta" in run(tmp_path, "--nodes", "alpha").stderr
    assert f"{REFUSED} after the next reload: beta" in run(tmp_path).stderr
    assert REFUSED not in run(tmp_path, "--nodes", "alpha,beta").stderr


def test_files_set_aside_in_the_folder_old_are_no_nodes(tmp_path: Path) -> None:
    run(tmp_path, "--nodes", "alpha")
    (tmp_path / "old").mkdir()
    (tmp_path / "alpha" / "signing.nk").rename(tmp_path / "old" / "signing.nk")
    done = run(tmp_path)
    assert done.stderr.splitlines() == ["new keys: alpha/signing.nk"]


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        (None, "which nodes? Name all of the overlay with --nodes alpha,beta"),
        ("", "write the name of a node of the cluster on each line"),
        ("alpha\nbeta=U\n", "nodes.txt: "),
        ("no name\x00\n", "nodes.txt: "),
    ],
)
def test_without_nodes_nothing_is_written_and_the_remedy_is_told(tmp_path: Path, kept: str | None, told: str) -> None:
    if kept is not None:
        (tmp_path / "nodes.txt").write_text(kept)
    before = sorted(tmp_path.iterdir())
    done = run(tmp_path)
    assert done.exit_code == 1 and told in str(done.exception) and sorted(tmp_path.iterdir()) == before


OUTSIDE = SigningKey(new_seed()).public_key


@pytest.mark.parametrize(
    ("files", "arguments", "told"),
    [
        ({}, ("--nodes", f"laptop={OUTSIDE[:-1]}{'A' if OUTSIDE[-1] != 'A' else 'Q'}"), "ends with a checksum: copy it again"),
        ({}, ("--nodes", "laptop={alpha}"), "have the same public key"),
        ({"guests.txt": "laptop {outside}"}, ("--nodes", "laptop={other}"), "has another key for laptop, which would be shut out"),
        ({}, ("--nodes", "laptop={outside},laptop={other}"), "gives two public keys to laptop"),
        ({"guests.txt": "laptop UAAA"}, (), "guests.txt: 'UAAA' is not a user's public key"),
        ({"domain.txt": "hub # mine"}, (), "domain.txt: 'hub # mine' is no JetStream domain"),
        ({"domain.txt": "hub\nsite"}, (), "is no JetStream domain"),
        ({"roster.txt": "no roster"}, ("--nodes", "laptop={outside}"), "roster.txt"),
        ({}, ("--nodes", "alpha,old"), "no node may be called 'old', the folder for keys that were replaced"),
        ({}, ("--nodes", "alpha,swarm"), "no node may be called 'swarm'"),
        ({}, ("--nodes", "alpha,a-"), "no label of Kubernetes ends in a hyphen"),
        ({}, ("--nodes", "observer={outside}"), "no node may be called 'observer'"),
    ],
)
def test_what_would_shut_nodes_out_or_stop_the_servers_is_refused_and_changes_no_list(
    tmp_path: Path, files: dict[str, str], arguments: tuple[str, ...], told: str
) -> None:
    run(tmp_path, "--nodes", "alpha")
    keys = {"alpha": load(tmp_path / "alpha" / "swarm.nk").public_key, "outside": OUTSIDE}
    keys["other"] = SigningKey(new_seed()).public_key
    for name, text in files.items():
        (tmp_path / name).write_text(text.format(**keys) + "\n")
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.txt")}
    done = run(tmp_path, *(each.format(**keys) for each in arguments))
    assert done.exit_code == 1 and told in str(done.exception), done.exception
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.txt")} == before
    for name in files:
        (tmp_path / name).unlink()
    assert run(tmp_path).exit_code == 0, "the next run is as before"


@pytest.mark.parametrize("name", ["nodes.txt", "guests.txt", "domain.txt"])
def test_a_list_that_is_no_text_is_a_sentence(tmp_path: Path, name: str) -> None:
    run(tmp_path, "--nodes", "alpha")
    (tmp_path / name).write_bytes(b"\xff\xfe\n")
    done = run(tmp_path)
    assert isinstance(done.exception, CommandError) and f"{name} cannot be read" in str(done.exception)


def test_runs_at_the_same_time_make_one_set_of_keys(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "swarm_cli", "k8s", "secrets", "--nodes", "alpha", "--keys", str(tmp_path / "keys")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) for _ in range(4)]
    printed = {each.communicate(timeout=180)[0] for each in started}
    assert len(printed) == 1 and not any(each.returncode for each in started)


def test_a_key_that_others_can_read_is_told(tmp_path: Path) -> None:
    run(tmp_path, "--nodes", "alpha")
    (tmp_path / "tls.key").chmod(0o644)
    assert run(tmp_path).stderr == f"{tmp_path}/tls.key is readable by other users: run `chmod 600 {tmp_path}/tls.key`\n"


def test_an_authority_that_ends_soon_is_told(tmp_path: Path) -> None:
    run(tmp_path, "--nodes", "alpha")
    made = datetime.now(UTC) - certificates.AUTHORITY_LASTS + timedelta(days=3)
    (tmp_path / "ca.crt").write_text(certificates.authority((tmp_path / "ca.key").read_text(), "swarm-nats-ca", made))
    assert "ca.crt expires on " in run(tmp_path).stderr
