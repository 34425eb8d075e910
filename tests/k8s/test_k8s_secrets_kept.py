"""`swarm k8s secrets` keeps which nodes there are, so that no later run shuts one out by leaving it
out of a list.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from shared.identity.keys import SigningKey, new_seed
from swarm_cli.app import app

REFUSED = "the servers will refuse them"


def run(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["k8s", "secrets", "--keys", str(folder), *arguments])


def test_later_runs_print_the_same_without_naming_the_nodes_and_know_those_that_were_added(tmp_path: Path) -> None:
    first = run(tmp_path, "--nodes", "alpha,beta")
    again = run(tmp_path)
    assert first.exit_code == again.exit_code == 0 and again.stdout == first.stdout and not again.stderr
    run(tmp_path, "--nodes", "alpha,beta,delta")
    renewed = run(tmp_path, "--renew-certificate")
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


def test_a_run_that_is_refused_changes_no_list(tmp_path: Path) -> None:
    run(tmp_path, "--nodes", "alpha")
    assert run(tmp_path, "--nodes", "alpha,beta", "--existing", "-").exit_code == 1  # nothing was given
    assert (tmp_path / "nodes.txt").read_text() == "alpha\n"
