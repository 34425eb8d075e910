"""`swarm status` names the protections that a node's scorers go without."""

from __future__ import annotations

import io

from prometheus_client import CollectorRegistry
from rich.console import Console

from services.verifier.figures import Figures
from shared.runtime.status import StatusBoard
from shared.tasks.sandbox.confine import PROTECTIONS
from swarm_cli.observe.snapshot import NodeSnapshot, SwarmSnapshot
from swarm_cli.observe.status import show
from swarm_cli.observe.view import NodeView


def shown(missing: set[str]) -> str:
    board, registry = StatusBoard("alpha", "verifier", "0"), CollectorRegistry()
    Figures(registry, board).scoring.protections(missing)
    for protection in PROTECTIONS:
        had = registry.get_sample_value("swarm_sandbox_protections", {"protection": protection})
        assert had == float(protection not in missing)
    node = NodeSnapshot(NodeView("alpha", (board.snapshot(),)), (), True)
    text = io.StringIO()
    show(SwarmSnapshot(0.0, (node,), (), None), Console(file=text, width=300))
    return text.getvalue()


def test_what_is_missing_is_named_and_where_to_read_the_remedy() -> None:
    said = shown({"landlock", "network_namespace"})
    assert "alpha: its scorers run without these protections: landlock, network namespace; the verifier's log has the cause" in said


def test_a_node_that_has_all_of_them_needs_no_word() -> None:
    assert "run without" not in shown(set())
