"""`swarm status` names the protections that a node's scorers go without."""

from __future__ import annotations

import io

from prometheus_client import CollectorRegistry
from rich.console import Console

from services.verifier.figures import Figures
from shared.runtime.status import StatusBoard
from shared.tasks.sandbox.confinement import PROTECTIONS
from swarm_cli.observe.node_state import NodeState
from swarm_cli.observe.snapshot import SwarmState
from swarm_cli.observe.status import show


def without(missing: set[str], name: str = "alpha") -> NodeState:
    board, registry = StatusBoard(name, "verifier", "0"), CollectorRegistry()
    Figures(registry, board).scoring.protections(missing)
    for protection in PROTECTIONS:
        had = registry.get_sample_value("swarm_sandbox_protections", {"protection": protection})
        assert had == float(protection not in missing)
    return NodeState(name, (board.snapshot(),))


def shown(*nodes: NodeState) -> str:
    text = io.StringIO()
    show(SwarmState(0.0, nodes), Console(file=text, width=300))
    return text.getvalue()


def test_what_is_missing_is_named_and_where_to_read_the_remedy() -> None:
    said = shown(without({"landlock", "network_namespace"}))
    assert "alpha: its scorers run without these protections: landlock, network namespace; the verifier's log has the cause" in said


def test_a_node_that_has_all_of_them_needs_no_word() -> None:
    assert "run without" not in shown(without(set()))


def test_nodes_that_lack_the_same_protections_are_named_in_one_line() -> None:
    nodes = [without({"landlock"}, name) for name in ("alpha", "beta")]
    said = shown(*nodes, without({"seccomp"}, "gamma"), without(set(), "delta"), without({"landlock"}, "epsilon"))
    lines = [line for line in said.splitlines() if "run without" in line]
    assert len(lines) == 2, lines
    assert lines[0].startswith(
        "alpha, beta, epsilon: their scorers run without these protections: landlock; the verifiers' logs have"
    )
    assert lines[1].startswith("gamma: its scorers run without these protections: seccomp; the verifier's log has")
    many = shown(*(without({"landlock"}, f"n{number}") for number in range(9)))
    assert many.count("run without") == 1 and "n0, n1, n2, n3, n4 and 4 more: their scorers" in many
