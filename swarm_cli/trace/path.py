"""The path of one group as plain values: what is known about it, with times, and what is no longer
known. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from swarm_cli.rollouts.fates import Fate


@dataclass(frozen=True, slots=True, order=True)
class Station:
    """Something that happened to the group. time: Unix time, by the writer's clock."""

    time: float
    node: str
    what: str
    detail: str


@dataclass(frozen=True, slots=True)
class Maker:
    """The node that made the group, and the number of its draw, which is unique on the node."""

    node: str
    draw: int


@dataclass(slots=True)
class Path:
    """All that was found about one group. ids: its content ids; if token ids are not shared, the
    shared bytes have a different id. unknown: sentences about what is not known.
    """

    ids: set[str] = field(default_factory=set)
    makers: set[Maker] = field(default_factory=set)
    stations: set[Station] = field(default_factory=set)
    unknown: list[str] = field(default_factory=list)

    def add(self, time_s: float, node: str, what: str, detail: str = "") -> None:
        """Add an event; an event that is found twice is kept once."""
        self.stations.add(Station(time_s, node, what, detail))

    def at(self, what: str, node: str | None = None) -> list[Station]:
        """The stations of one kind, of one node or of all."""
        return sorted(each for each in self.stations if each.what == what and node in (None, each.node))

    def as_object(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "ids": sorted(self.ids),
            "makers": [{"node": maker.node, "draw": maker.draw} for maker in sorted(self.makers, key=lambda each: each.node)],
            "path": [
                {"time": each.time, "node": each.node, "what": each.what, "detail": each.detail} for each in sorted(self.stations)
            ],
            "unknown": self.unknown,
        }


GENERATED, SCORED, SHARED, TAKEN, REFUSED, BATCHED, TRAINED = (
    "generated",
    "scored",
    "shared",
    "taken in",
    "refused",
    "in a batch",
    "trainer",
)


def trained_detail(fate: Fate) -> str:
    """How a step used the group, and the advantages of its answers."""
    group = fate.group
    if group is None:
        return fate.sentence()
    used = [f"#{answer.place} {answer.advantage:+.3g}" for answer in group.answers if answer.advantage and not answer.left_out]
    pushed = f"; advantages {', '.join(used[:16])}{' ...' if len(used) > 16 else ''}" if used else ""
    left_out = [f"#{answer.place} {answer.left_out}" for answer in group.answers if answer.left_out]
    if left_out:
        pushed += f"; left out {', '.join(left_out[:16])}{' ...' if len(left_out) > 16 else ''}"
    return fate.sentence() + pushed


def say_what_is_missing(path: Path, nodes: Iterable[str], windows: dict[str, str]) -> None:
    """Add to `path.unknown` a sentence for each usual part of the path that left no trace. nodes:
    those whose streams were searched. windows: a sentence by node, and under "" for the swarm's
    stream, about how far back the search went.
    """
    here = set(nodes)
    for maker in path.makers:
        if maker.node not in here:
            path.unknown.append(f"what {maker.node} did with it: its streams are not on this server (--node-url)")
        elif not path.at(SCORED, maker.node):
            path.unknown.append(f"when {maker.node} scored it: {windows.get(maker.node, 'its stream of scored groups is empty')}")
    if not path.at(SHARED):
        swarm = windows.get("", "the swarm's stream was not searched (--swarm-url)")
        path.unknown.append(f"whether and when it was shared: {swarm}")
    makers = {maker.node for maker in path.makers}
    for node in sorted(here - makers):
        if not path.at(TAKEN, node) and not path.at(REFUSED, node):
            held = windows.get(node, "its stream of scored groups is empty")
            path.unknown.append(f"whether {node} ever received it: neither taken in nor among the refusals on record; {held}")
    for node in sorted(here):
        held_by = path.at(SCORED, node) + path.at(TAKEN, node)
        if held_by and not path.at(BATCHED, node) and not path.at(TRAINED, node):
            path.unknown.append(
                f"whether {node} trains on it: it is in no batch that is kept; it may be waiting, dropped, or in an older batch"
            )
        if path.at(BATCHED, node) and not path.at(TRAINED, node):
            path.unknown.append(f"how the trainer of {node} used it: not on record here (--run), or not trained on yet")
