"""The path of one group as plain values: what is known of it, when, and what can no longer be
known. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from swarm_cli.rollouts.fates import Fate


@dataclass(frozen=True, slots=True, order=True)
class Station:
    """Something that happened to the group. time: Unix time, by the clock of who wrote it down."""

    time: float
    node: str
    what: str
    detail: str


@dataclass(frozen=True, slots=True)
class Maker:
    """Whose group it is, and the number of its draw: no two groups of a node carry the same one."""

    node: str
    draw: int


@dataclass(slots=True)
class Path:
    """All that was found of one group. ids: its content ids; where token ids are kept from the
    swarm the shared bytes have another one. unknown: sentences.
    """

    ids: set[str] = field(default_factory=set)
    makers: set[Maker] = field(default_factory=set)
    stations: set[Station] = field(default_factory=set)
    unknown: list[str] = field(default_factory=list)

    def add(self, time_s: float, node: str, what: str, detail: str = "") -> None:
        """Something happened; what was found twice is there once."""
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
    """What a step made of the group, and how its answers were pushed."""
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
    """Add to `path.unknown` a sentence for each part of the usual way that left no trace. nodes:
    those whose streams were looked at. windows: by node, and "" for the swarm's stream, since when
    that stream keeps groups.
    """
    here = set(nodes)
    for maker in path.makers:
        if maker.node not in here:
            path.unknown.append(f"what {maker.node} itself did with it: its streams are not on this server (--node-url)")
        elif not path.at(SCORED, maker.node):
            path.unknown.append(f"when {maker.node} scored it: {windows.get(maker.node, 'its stream of scored groups is empty')}")
    if not path.at(SHARED):
        swarm = windows.get("", "the swarm's stream was not looked at (--swarm-url)")
        path.unknown.append(f"whether and when it was shared: {swarm}")
    makers = {maker.node for maker in path.makers}
    for node in sorted(here - makers):
        if not path.at(TAKEN, node) and not path.at(REFUSED, node):
            held = windows.get(node, "its stream of scored groups is empty")
            path.unknown.append(f"whether {node} ever looked at it: neither taken in nor among the refusals on record; {held}")
    for node in sorted(here):
        held_by = path.at(SCORED, node) + path.at(TAKEN, node)
        if held_by and not path.at(BATCHED, node) and not path.at(TRAINED, node):
            path.unknown.append(
                f"whether {node} trains on it: in no batch that is kept; it may wait, be dropped, or be in an older one"
            )
        if path.at(BATCHED, node) and not path.at(TRAINED, node):
            path.unknown.append(f"what the trainer of {node} made of it: not on record here (--run), or not trained on yet")
