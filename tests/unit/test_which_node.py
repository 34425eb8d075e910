"""`swarm rollouts` without a node says whose groups it shows, and which others there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.config import NodeConfig, load_config
from shared.run_records import TRAINED_FILE
from swarm_cli.rollouts.command import node_shown


def config(folder: Path) -> NodeConfig:
    return load_config(None, {"node": {"var_dir": str(folder)}, "tasks": [{"dataset": "gcd"}]})


def run_of(folder: Path, run: str, *nodes: str) -> None:
    for node in nodes:
        (folder / "runs" / run / node).mkdir(parents=True)
        (folder / "runs" / run / node / "trainer.log").write_text("")
        (folder / "runs" / run / node / TRAINED_FILE).write_text("{}\n")


def test_the_other_nodes_of_the_run_are_named(tmp_path: Path) -> None:
    assert node_shown(config(tmp_path), "") == "this is node alpha: `swarm rollouts NODE` shows another"
    run_of(tmp_path, "one", "alpha", "beta", "gamma", "Not a node")
    run_of(tmp_path, "two", "alpha")
    assert node_shown(config(tmp_path), "one") == "this is node alpha; `swarm rollouts NODE` shows another: beta, gamma"
    assert "beta" not in node_shown(config(tmp_path), "two")
    run_of(tmp_path, "many", "alpha", *(f"n{number}" for number in range(20)))
    assert node_shown(config(tmp_path), "many").endswith(" and 12 more")


@pytest.mark.parametrize("run", ["none", "../x"])
def test_a_run_that_is_not_here_has_no_other_nodes(tmp_path: Path, run: str) -> None:
    assert node_shown(config(tmp_path), run).startswith("this is node alpha: ")
