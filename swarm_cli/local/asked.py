"""What a running `swarm up` does when `swarm down`, `restart` or `add` ask it to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shared.roles import ROLES
from swarm_cli.errors import CommandError
from swarm_cli.local.ports import check_ports
from swarm_cli.local.procfile import MAX_NODES, Layout, process_lines
from swarm_cli.local.rules import node_of
from swarm_cli.local.supervisor import Supervisor

_STOPPED = 143


class Asked:
    """Answers questions about one run. `layout` is what runs where; it grows with `add`, and
    `on_growth` is told.
    """

    def __init__(self, supervisor: Supervisor, layout: Layout, on_growth: Callable[[Layout], None] = lambda layout: None) -> None:
        self._supervisor = supervisor
        self._layout = layout
        self._on_growth = on_growth

    async def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Do what is asked. Raises CommandError, with the remedy."""
        match question.get("do"):
            case "down":
                self._supervisor.end(_STOPPED)
                if question.get("now"):
                    self._supervisor.hurry()
                return {"processes": self._supervisor.states}
            case "restart":
                names = named(str(question.get("service", "")), self._supervisor.states)
                return {"said": [await self._supervisor.restart(name) for name in names]}
            case "add":
                return {"said": await self._add(int(question.get("nodes", 1)))}
        raise CommandError("this `swarm up` is of another version: end it and start it again")

    async def _add(self, nodes: int) -> list[str]:
        wider = replace(self._layout, nodes=self._layout.nodes + nodes)
        if nodes < 1 or wider.nodes > MAX_NODES:
            raise CommandError(f"a swarm on one machine has {MAX_NODES} nodes at most, and this one has {self._layout.nodes}")
        check_ports({port: what for port, what in wider.ports.items() if port not in self._layout.ports})
        self._layout = wider
        self._on_growth(wider)
        return await self._supervisor.change(process_lines(wider))


def named(service: str, states: Mapping[str, str]) -> list[str]:
    """The processes that a person means: one by its name, or a role's of every node.

    Raises:
        CommandError: none is called that.
    """
    if service in states:
        return [service]
    with_role = [name for name in states if node_of(name) and name.rpartition("-")[2] == service] if service in ROLES else []
    if not with_role:
        raise CommandError(
            f"nothing here is called {service[:80]!r}: name one of {', '.join(states)}, or a role ({', '.join(ROLES)})"
        )
    return with_role
