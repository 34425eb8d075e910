"""A run's folder that somebody else prepared: what is started or looked at there reads and writes
nothing outside it.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm_cli.errors import CommandError
from swarm_cli.local.control import holding_run
from swarm_cli.local.control_commands import add
from swarm_cli.running import holder, running_runs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "gift"
    (folder / "alpha" / "checkpoints").mkdir(parents=True)
    (tmp_path / "mine.txt").write_text("precious")
    (tmp_path / "mine.txt").chmod(0o644)
    return folder


def linked_log(folder: Path) -> Path:
    (folder / "alpha" / "trainer.log").symlink_to(folder.parents[1] / "mine.txt")
    return folder / "alpha" / "trainer.log"


def linked_folder(folder: Path) -> Path:
    (folder / "beta").symlink_to("../../../..")
    return folder / "beta"


def linked_lock(folder: Path) -> Path:
    (folder / "up.lock").symlink_to(folder.parents[1] / "mine.txt")
    return folder / "up.lock"


def link_to_nothing(folder: Path) -> Path:
    (folder / "alpha" / "node.nk").symlink_to("/tmp/nobody-made-this")
    return folder / "alpha" / "node.nk"


def link_by_a_link(folder: Path) -> Path:
    (folder / "a").symlink_to("..")
    (folder / "a").rename(folder / "alpha" / "checkpoints" / "a")  # still within
    (folder / "out").symlink_to("alpha/checkpoints/a/../../mine.txt")
    return folder / "out"


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "alpha" / "checkpoints" / "weights")
    return folder / "alpha" / "checkpoints" / "weights"


@pytest.mark.parametrize("make", [linked_log, linked_folder, linked_lock, link_to_nothing, link_by_a_link, pipe])
def test_a_run_is_not_started_where_something_leads_out_of_its_folder(folder: Path, make: Callable[[Path], Path]) -> None:
    made = make(folder)
    with pytest.raises(CommandError) as refused, holding_run(folder):
        pass
    assert str(made) in str(refused.value) and "which no run makes" in str(refused.value)
    mine = folder.parents[1] / "mine.txt"
    assert mine.read_text() == "precious" and mine.stat().st_mode & 0o777 == 0o644
    assert not (folder / "up.lock").exists() or make is linked_lock


def test_a_run_is_started_with_the_links_and_sockets_that_a_run_makes(folder: Path, tmp_path: Path) -> None:
    wandb = folder / "alpha" / "wandb" / "offline-run-1" / "logs"
    wandb.mkdir(parents=True)
    (wandb / "debug-core.log").symlink_to("/home/me/.cache/wandb/logs/core-debug-1.log")
    (folder / "alpha" / "wandb" / "latest-run").symlink_to("offline-run-1")
    moved = tmp_path / "large disk"
    folder.rename(moved)
    folder.symlink_to(moved)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / "up.sock"))
    with holding_run(folder):
        pass


def test_no_node_is_added_to_a_running_run_that_leads_out(folder: Path, tmp_path: Path) -> None:
    with holding_run(folder):
        linked_folder(folder)
        with pytest.raises(CommandError, match="beta is a link to"):
            add(1, "gift", tmp_path)


def test_a_link_to_another_process_s_lock_is_no_running_run(folder: Path, tmp_path: Path) -> None:
    (folder / "up.lock").symlink_to(tmp_path / "some.lock")
    with (tmp_path / "some.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert holder(folder) is None and running_runs(tmp_path) == []


def test_a_lock_of_another_user_s_is_no_running_run(folder: Path) -> None:
    with holding_run(folder):
        assert holder(folder) == os.getpid()
        if os.geteuid() == 0:
            os.chown(folder / "up.lock", 65_534, 65_534)
            assert holder(folder) is None


def test_a_pipe_in_the_lock_s_place_keeps_nobody_waiting(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(folder / "up.lock")
    assert holder(folder) is None and running_runs(tmp_path) == []


def test_a_lock_that_is_a_link_within_the_run_is_not_truncated(folder: Path) -> None:
    (folder / "kept.txt").write_text("precious")
    (folder / "up.lock").symlink_to("kept.txt")
    with pytest.raises(CommandError, match=r"up\.lock is no file"), holding_run(folder):
        pass
    assert (folder / "kept.txt").read_text() == "precious"
