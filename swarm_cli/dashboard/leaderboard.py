"""How much each node learned: held-out scores, compared only within the same held-out set. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from shared.contracts.control import EvalReport, TaskScore
from shared.identity.statements import Heard, Standing
from swarm_cli.observe.recorded_scores import NO_NODES, NO_SETS, ByNode, BySet

CURVE_POINTS = 24
"""Points of a node's curve in the table; the node's page has all that are kept."""
SETS_A_KEY = 2
"""How many of the newest held-out sets that a key reported on are shown: after a change of set the
previous one stays visible, and no key can fill the table with invented sets.
"""
THIS_SERVER = "this server's own"
"""Standing of a score from the node plane, where no signature is needed."""
ON_RECORD = "on record"
"""Standing of a score from the records of a run that has ended."""


@dataclass(frozen=True, slots=True)
class Row:
    """One key's scores on one held-out set: pass rates, or mean rewards (`by_reward`) where the
    newest report has no pass. `base` is the score of version 0 on the same set, and `gain` the
    newest minus that; None if it is not known. `trusted`: the row may be ranked.
    """

    node: str
    public_key: str
    standing: str
    problem: str
    held_out: str
    n: int
    base: float | None
    newest: float
    policy_version: int
    at: float
    curve: tuple[tuple[int, float], ...]
    trusted: bool
    by_reward: bool = False
    unknown: int = 0
    """Of the `n` answers to the set, those of the newest report whose reward is unknown."""

    @property
    def gain(self) -> float | None:
        """Newest score minus the base policy's."""
        return None if self.base is None else self.newest - self.base


def leaderboard(
    heard: Iterable[Heard[EvalReport]],
    own: Iterable[EvalReport] = (),
    known: Collection[str] = (),
    recorded: ByNode = NO_NODES,
    own_standing: str = THIS_SERVER,
) -> list[Row]:
    """Rows by held-out set, the set with most nodes first, and within a set by gain; rows that may
    not be ranked come last. Each key has its newest `SETS_A_KEY` sets. `own`: reports of nodes on
    this server, shown if the swarm has none of theirs. `known`: nodes that count before all others,
    so that a crowd of invented nodes cannot put its set on top. `recorded`: what the nodes have on
    record, for the base policy's score if a row that may be ranked lacks it.
    """
    by_key: dict[tuple[str, str, str], dict[tuple[str, int], list[Heard[EvalReport]]]] = {}
    for each in heard:
        said = each.said
        sets = by_key.setdefault((said.node, each.public_key or "", each.standing.value), {})
        sets.setdefault((said.held_out or "", _asked(said)), []).append(each)
    rows = [row for sets in by_key.values() for row in _newest_sets(sets.values())]
    told = {row.node for row in rows if row.trusted}
    untold: dict[str, dict[tuple[str, int], list[Heard[EvalReport]]]] = {}
    for report in own:
        if report.node not in told:
            sets = untold.setdefault(report.node, {})
            sets.setdefault((report.held_out or "", _asked(report)), []).append(Heard(report, Standing.SIGNED))
    rows += [replace(row, standing=own_standing) for sets in untold.values() for row in _newest_sets(sets.values())]
    rows = [_completed(row, recorded.get(row.node, NO_SETS)) if row.trusted else row for row in rows]
    nodes, those_known = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for row in rows:
        nodes[row.held_out, row.n] += row.trusted
        those_known[row.held_out, row.n] += row.trusted and row.node in known
    return sorted(
        rows,
        key=lambda row: (
            not row.trusted,
            -those_known[row.held_out, row.n],
            -nodes[row.held_out, row.n],
            row.held_out,
            row.n,
            *_rank(row),
        ),
    )


def _completed(row: Row, recorded: BySet) -> Row:
    known = recorded.get((row.held_out, row.n))
    if known is None or known.base is None or row.base is not None:
        return row
    base = _score(known.base, row.by_reward)
    return row if base is None else replace(row, base=base, curve=thinned([(0, base), *row.curve], CURVE_POINTS))


def _newest_sets(sets: Iterable[Sequence[Heard[EvalReport]]]) -> list[Row]:
    newest_first = sorted(sets, key=lambda reports: -max(each.said.created_at for each in reports))
    return [_row(reports) for reports in newest_first[:SETS_A_KEY]]


def _rank(row: Row) -> tuple[float, float, str]:
    return (-row.gain if row.gain is not None else 2.0, -row.newest, row.node)


def _row(reports: Sequence[Heard[EvalReport]]) -> Row:
    """The row of one key, set and standing. Reports are ordered by their signed time, so that a
    repeated report changes nothing; if a version was evaluated again, the later result counts.
    """
    in_order = sorted((each.said for each in reports), key=attrgetter("created_at"))
    newest, last = in_order[-1], reports[-1]
    by_reward = newest.pass_rate is None
    curve = _curve(in_order, by_reward)
    base = dict(curve).get(0)
    return Row(
        node=newest.node,
        public_key=last.public_key or "",
        standing=last.standing.value,
        problem=last.problem,
        held_out=newest.held_out or "",
        n=_asked(newest),
        base=base,
        newest=newest.score,
        policy_version=newest.policy_version,
        at=newest.created_at,
        curve=thinned(curve, CURVE_POINTS),
        trusted=last.standing is Standing.SIGNED,
        by_reward=by_reward,
        unknown=newest.unknown,
    )


def _asked(report: EvalReport) -> int:
    """The number of tasks in the held-out set."""
    return report.n + report.unknown


def _score(report: EvalReport | TaskScore, by_reward: bool) -> float | None:
    return report.mean_reward if by_reward else report.pass_rate


def _curve(in_order: Sequence[EvalReport], by_reward: bool) -> list[tuple[int, float]]:
    """Score by policy version. A version below the previous one means that training started
    again: results of later versions from before that are dropped.
    """
    by_version: dict[int, float] = {}
    for report in in_order:
        by_version = {version: rate for version, rate in by_version.items() if version < report.policy_version}
        if (score := _score(report, by_reward)) is not None:
            by_version[report.policy_version] = score
    return sorted(by_version.items())


def thinned(curve: Sequence[tuple[int, float]], most: int) -> tuple[tuple[int, float], ...]:
    """At most `most` points, including the first and the last."""
    if len(curve) <= most:
        return tuple(curve)
    return tuple(curve[round(place * (len(curve) - 1) / (most - 1))] for place in range(most))


def curves_by_task(
    heard: Iterable[Heard[EvalReport]], node: str, public_key: str, recorded: BySet = NO_SETS
) -> dict[str, list[tuple[int, float]]]:
    """One key's pass rates by dataset, and over all datasets under "", on the held-out set that it
    last reported on; mean rewards where the newest report has no pass rate. Reports with a refused
    signature are left out. `recorded`: as in `leaderboard`, for this node; without a key, its
    curves are those on record.
    """
    mine = [each for each in heard if each.said.node == node and (each.public_key or "") == public_key]
    mine = [each for each in mine if each.standing is not Standing.REFUSED]
    in_order = sorted((each.said for each in mine), key=attrgetter("created_at"))
    trusted = bool(mine) and mine[-1].standing is Standing.SIGNED
    known = recorded.get((in_order[-1].held_out or "", _asked(in_order[-1]))) if trusted else None
    if not in_order and not public_key and recorded:
        in_order = list(max(recorded.values(), key=lambda each: each.newest.created_at).every)
    same_set = [report for report in in_order if report.held_out == in_order[-1].held_out]
    kept = {version for version, _ in _curve(same_set, by_reward=True)}
    newest = [list(reports)[-1] for _, reports in groupby(same_set, key=attrgetter("policy_version"))]
    if known is not None and known.base is not None and 0 not in kept:
        kept.add(0)
        newest.append(known.base)
    by_reward = {"": bool(in_order) and in_order[-1].pass_rate is None}
    by_reward |= {name: each.pass_rate is None for name, each in in_order[-1].per_task.items()} if in_order else {}
    curves: dict[str, dict[int, float]] = {}
    for report in newest:
        if report.policy_version in kept:
            of_all = TaskScore(n=report.n, pass_rate=report.pass_rate, mean_reward=report.mean_reward)
            for dataset, score in {"": of_all, **report.per_task}.items():
                if (value := _score(score, by_reward.get(dataset, False))) is not None:
                    curves.setdefault(dataset, {})[report.policy_version] = value
    return {dataset: sorted(curve.items()) for dataset, curve in sorted(curves.items())}
