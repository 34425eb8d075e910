"""Who is in a swarm and how they do, from what its hub shows to anybody who may look: directory,
held-out scores, and how many groups each node shares. Pure.

Nodes write all of it themselves. What a key signed is shown as its node's; what nobody signed is
marked, and what is badly signed left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from shared.contracts import subjects
from shared.contracts.control import EvalReport, NodeRecord
from shared.identity.statements import OTHER_SWARM, Heard
from shared.identity.statements import Standing as Statement
from shared.text import visible
from swarm_cli.console import cell
from swarm_cli.observe.kept_names import with_places

SILENT_S = 30.0
"""A node renews its entry every 10 s."""
UNSIGNED_SHOWN = 10
"""Whoever reaches an open hub makes up unsigned names as fast as it takes them."""
LONG_S = 3600.0
"""The server forgets an entry after 15 minutes; a node whose clock is wrong may say anything."""

_COLUMNS = ("node", "held-out", "gain", "version", "shares", "seen", "model")


@dataclass(frozen=True, slots=True)
class Score:
    """A held-out result: `pass_rate` of `n` tasks by `policy_version`."""

    policy_version: int
    pass_rate: float
    n: int


@dataclass(frozen=True, slots=True)
class Standing:
    """One node. `seen_s`: since it renewed its entry, None where it has none. `shared`: its groups
    in the hub's window.
    """

    node: str
    model: str
    tasks: tuple[str, ...]
    policy_version: int | None
    seen_s: float | None
    first: Score | None
    newest: Score | None
    shared: int
    signed: bool = True
    """False: anybody may have written what is shown of it."""
    known: bool = True
    """Whether its key has signed scores for long enough to keep its place, or a roster lists it."""

    @property
    def gain(self) -> float | None:
        """Newest pass rate less the first one that is kept; None before there are two."""
        if self.first is None or self.newest is None or self.first == self.newest:
            return None
        return self.newest.pass_rate - self.first.pass_rate


@dataclass(frozen=True, slots=True)
class Standings:
    """A swarm at one time. `left_out`: nodes that are not among `nodes`; `groups`: all that
    are in the window.
    """

    at: float
    nodes: tuple[Standing, ...]
    groups: int
    left_out: int = 0
    unreadable: int = 0
    elsewhere: int = 0
    """Entries that are signed for another swarm."""


def standings(
    at: float,
    entries: Sequence[Heard[NodeRecord]],
    reports: Sequence[EvalReport],
    counts: Mapping[str, int],
    *,
    most: int,
    unsigned: Collection[str] = (),
    known: Collection[str] = (),
    left_out: int = 0,
    unreadable: int = 0,
) -> Standings:
    """Put together what was read. Nodes with signed words come first, of them that with the best
    newest score; of the others there are `UNSIGNED_SHOWN` at most.

    Args:
        at: Unix time of the look.
        entries: The directory's, checked.
        reports: Held-out scores whose signature is not refused, each node's in order.
        counts: Messages in the stream of groups by subject. Subjects that are no node's count
            nowhere.
        most: How many nodes are shown.
        unsigned: Nodes of which only unsigned scores are known.
        known: Nodes that are shown before others where there are more than `most`.
        left_out, unreadable: Of the directory.
    """
    believed = [entry for entry in entries if entry.standing is not Statement.REFUSED]
    signing = {entry.said.node for entry in believed if entry.standing is Statement.SIGNED}
    signing |= {report.node for report in reports if report.node not in unsigned}
    # Of a node that signs nothing unsigned is taken: anybody may have written it over its own word.
    by_node = {
        entry.said.node: entry.said for entry in believed if entry.standing is Statement.SIGNED or entry.said.node not in signing
    }
    known = frozenset(known)
    shared = {node: count for subject, count in counts.items() if (node := subjects.rollouts_author(subject))}
    scores: dict[str, list[Score]] = {}
    for report in reports:
        if report.node in signing and report.node in unsigned:
            continue
        scores.setdefault(report.node, []).append(Score(report.policy_version, report.pass_rate, report.n))
    found = [
        _standing(name, by_node.get(name), scores.get(name, []), shared.get(name, 0), at, name in signing, name in known)
        for name in {*by_node, *shared, *scores}
    ]
    found.sort(key=lambda each: (not each.signed, each.newest is None, -(each.newest.pass_rate if each.newest else 0.0), each.node))
    signed = [each for each in found if each.signed]
    shown = with_places([*signed, *found[len(signed) :][:UNSIGNED_SHOWN]], most, lambda each: each.signed and each.known)
    elsewhere = sum(entry.problem == OTHER_SWARM for entry in entries)
    return Standings(at, tuple(shown), sum(shared.values()), left_out + len(found) - len(shown), unreadable, elsewhere)


def _standing(
    name: str, record: NodeRecord | None, scores: Sequence[Score], shared: int, at: float, signed: bool, known: bool
) -> Standing:
    # What a name has not said of itself is left open, never made up.
    return Standing(
        name,
        record.model.name if record else "",
        tuple(record.tasks) if record else (),
        record.policy_version if record else None,
        max(0.0, at - record.updated_at) if record else None,
        scores[0] if scores else None,
        scores[-1] if scores else None,
        shared,
        signed,
        known,
    )


def as_object(found: Standings, url: str) -> dict[str, Any]:
    """As JSON."""
    nodes = [{**asdict(node), "gain": node.gain} for node in found.nodes]
    return {
        "at": found.at,
        "url": url,
        "nodes": nodes,
        "groups_in_window": found.groups,
        "left_out": found.left_out,
        "unreadable_entries": found.unreadable,
        "other_swarms_entries": found.elsewhere,
    }


def table(found: Standings, url: str) -> Group:
    """The leaderboard."""
    rows = Table(title=cell(url), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    names = _marked(found.nodes)
    longest = max(map(len, names), default=4)
    for column, width in zip(_COLUMNS, (longest, 9, 6, 7, 7, 10, 5), strict=True):
        rows.add_column(column, no_wrap=True, min_width=width)
    for name, node in zip(names, found.nodes, strict=True):
        gain = "–" if node.gain is None else f"{node.gain:+.3f}"
        version = "–" if node.policy_version is None else str(node.policy_version)
        shares, seen = f"{node.shared:,}" if node.shared else "nothing", _seen(node.seen_s)
        rows.add_row(cell(name), _score(node.newest), gain, version, shares, seen, cell(node.model, 32))
    return Group(rows, Text(visible(_caption(found))))


def _marked(nodes: Sequence[Standing]) -> list[str]:
    """Names, each with what makes it less than the others: as long as nobody is known, new is no
    mark.
    """
    some_are_known = any(node.signed and node.known for node in nodes)
    return [
        f"{node.node} (unsigned)" if not node.signed else f"{node.node} (new)" if some_are_known and not node.known else node.node
        for node in nodes
    ]


def _caption(found: Standings) -> str:
    parts = [
        f"nodes: {len(found.nodes)}; groups in the hub's window: {found.groups:,}; held-out: pass rate / number of tasks, as each "
        "node says it of its own tasks"
    ]
    if not found.nodes:
        parts = ["no node is there yet"]
    if found.left_out:
        parts.append(f"{found.left_out:,} more nodes are not shown")
    if found.elsewhere:
        parts.append(f"{found.elsewhere:,} entries are signed for other swarms: a token says which one is meant")
    if found.unreadable:
        parts.append(f"{found.unreadable:,} unreadable entries in the directory")
    return "; ".join(parts)


def _score(score: Score | None) -> str:
    return f"{score.pass_rate:.3f}/{score.n}" if score else "–"


def _seen(seen_s: float | None) -> str:
    if seen_s is None:
        return "not listed"
    if seen_s < SILENT_S:
        return "now"
    if seen_s < LONG_S:
        return f"{seen_s / 60:.0f} min ago" if seen_s >= 120 else f"{seen_s:.0f} s ago"
    return "long ago"
