"""How a running `swarm up` handles requests from `swarm down`, `restart` and `add`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shared.registry import did_you_mean
from shared.roles import ROLES
from swarm_cli.errors import CommandError
from swarm_cli.local.ports import check_ports
from swarm_cli.local.procfile import MAX_NODES, Layout, process_lines
from swarm_cli.local.rules import node_of
from swarm_cli.local.supervisor import Supervisor

_STOPPED = 143
_WRONG_CALL = 2
"""The exit code of a command that was called wrongly."""


class ControlHandler:
    """Handles the requests for one run. `layout` is what runs where; `add` extends it and then
    calls `on_growth` with it.
    """

    def __init__(self, supervisor: Supervisor, layout: Layout, on_growth: Callable[[Layout], None] = lambda layout: None) -> None:
        self._supervisor = supervisor
        self._layout = layout
        self._on_growth = on_growth

    async def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out one request. Raises CommandError, with the remedy."""
        match question.get("do"):
            case "down":
                self._supervisor.end(_STOPPED)
                if question.get("now"):
                    self._supervisor.hurry()
                return {"processes": self._supervisor.states}
            case "states":
                return {"processes": self._supervisor.states, "grace_s": self._supervisor.grace_s}
            case "restart":
                names = named(str(question.get("service", "")), self._supervisor.states)
                grace_s = question.get("grace_s")
                grace_s = None if grace_s is None else max(0.0, float(grace_s))
                return {"said": [await self._supervisor.restart(name, grace_s) for name in names]}
            case "add":
                return {"said": await self._add(int(question.get("nodes", 1)))}
        raise CommandError("this `swarm up` runs another version of the software: end it and start it again")

    async def _add(self, nodes: int) -> list[str]:
        wider = replace(self._layout, nodes=self._layout.nodes + nodes)
        if nodes < 1 or wider.nodes > MAX_NODES:
            raise CommandError(f"at most {MAX_NODES} nodes fit on one machine, and this swarm has {self._layout.nodes}: add fewer")
        new = {port: what for port, what in wider.ports.items() if port not in self._layout.ports}
        check_ports(new, "stop those processes: the ports of a run's nodes follow one another")
        self._layout = wider
        self._on_growth(wider)
        return await self._supervisor.change(process_lines(wider))


def named(service: str, states: Mapping[str, str]) -> list[str]:
    """The processes that `service` names: one by its name, or every node's process of that role.

    Raises:
        CommandError: there is no such process or role, or none is named.
    """
    if service in states:
        return [service]
    choice = f"name one of {', '.join(states)}, or a role ({', '.join(ROLES)}) for every node's"
    if not service:
        raise CommandError(f"no service is named: {choice}", _WRONG_CALL)
    with_role = [name for name in states if node_of(name) and name.rpartition("-")[2] == service] if service in ROLES else []
    if not with_role:
        meant = did_you_mean(service.replace("_", "-"), [*states, *ROLES])
        raise CommandError(f"no process here is called {service[:80]!r}: {f'{meant} Or ' if meant else ''}{choice}")
    return with_role
