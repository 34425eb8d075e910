"""A node in three lines, as `swarm status` prints them and `swarm top` keeps them up to date: how
far it is, whose groups it trains on, and what its processes do or what is wrong with them. Nodes on
other servers are rows of a table, as a spectator of a hub sees all of them.

Names and figures come from other nodes' messages, so `visible` removes control characters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from rich.table import Table
from rich.text import Text

from shared.contracts import subjects
from shared.contracts.status_figures import EVALUATING_LAST, FigureFamily, StatusFigure
from shared.contracts.streams import node_streams
from shared.text import visible
from swarm_cli.console import cell
from swarm_cli.observe.node_state import NodeState, duration

SPARKS = "▁▂▃▄▅▆▇█"
SPARK_COLUMNS = 16
STYLES = {"good": "green", "warn": "yellow", "bad": "bold red", "rest": "dim"}
MARKS = {
    "running": "●", "starting": "◔", "finished": "✓", "stopped": "■", "silent": "!", "lost": "!", "unread": "?", "elsewhere": "○",
}  # fmt: skip
PHASES = {"wait": "wait", "intake": "intake", "forward_backward": "compute", "optimizer": "optimizer", "publish": "publish"}
"""Phases of a trainer step, as in its status (`<phase>_share`), and the words for them."""
FILL_WARNS = 0.8
SILENT_S = 30.0
"""A node renews its entry of the directory every 10 s."""
LONG_S = 3600.0
"""The server forgets an entry after 15 minutes; a node whose clock is wrong may say anything."""
HUGE = 10**12
"""No true count is this large. A larger one is invented, and must not push the rest of its line off
the screen.
"""
NAME_CHARACTERS = 32
"""Longest text for a node's name, a state or a reason: the length that a name may have."""


def node_lines(node: NodeState, *, fresh: bool = True) -> list[Text]:
    """The three lines; two for a node of an ended run, one for a node whose streams are gone or
    unread. fresh: what is shown is of now; else it was seen last, and no rate holds.
    """
    if node.lost or node.unread:
        words = f"  {MARKS[node.kind]} {visible(node.words)}"
        return [Text.assemble((visible(node.node, NAME_CHARACTERS), "bold"), (words, STYLES[node.health]))]
    groups = [] if node.verdict else [Text("  ").append(_groups(node))]
    return [_head(node, fresh), *groups, Text("  ").append(_doings(node, fresh))]


def sparkline(values: Sequence[float], columns: int) -> str:
    """`values` as at most `columns` bars. The lowest bar is their minimum, the highest their
    maximum, at least 0.05 above it.
    """
    if not values:
        return ""
    step = max(1.0, len(values) / columns)
    picked = [values[int(position * step)] for position in range(min(columns, len(values)))]
    picked[-1] = values[-1]
    low = min(picked)
    span = max(max(picked) - low, 0.05)
    return "".join(SPARKS[round((value - low) / span * (len(SPARKS) - 1))] for value in picked)


def rate(steps_per_minute: float | None) -> str:
    """A step rate, always by the hour: a rate that varies must not change its unit."""
    if steps_per_minute is None:
        return "– steps/h"
    if steps_per_minute >= HUGE:
        return f"{steps_per_minute * 60:.0e} steps/h"
    return f"{steps_per_minute * 60:,.{0 if steps_per_minute * 60 >= 99.95 else 1}f} steps/h"


def left_s(node: NodeState) -> float | None:
    """Seconds that the steps up to `max_steps` take at the present rate; None if that or the number
    of steps is not known.
    """
    per_minute, left = node.steps_per_minute, node.max_steps - node.step
    return 60.0 * left / per_minute if per_minute and node.step and left > 0 else None


def rough(seconds: float) -> str:
    """A time that is only estimated: `40 s`, `63 min` or `3.4 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:,.1f} h" if seconds < HUGE else "ages"


def number(value: float | None) -> str:
    """A count with separators; `–` if it is not known."""
    if value is None:
        return "–"
    return f"{int(value):,}" if abs(value) < HUGE else f"{value:.0e}"


def _head(node: NodeState, fresh: bool) -> Text:
    """The node's progress, and its newest score beside the base policy's by the same measure."""
    style = STYLES[node.health] if fresh else "yellow"
    pace = rate(node.steps_per_minute if fresh else None)
    left = left_s(node) if fresh else None
    pace += f", about {rough(left)} left" if left is not None else ""
    text = Text.assemble(
        (visible(node.node, NAME_CHARACTERS), "bold"),
        "  ",
        (f"{MARKS[node.kind]} {node.kind}" if fresh else f"? {node.kind} when seen last", style),
        f"  step {number(node.step)}  {pace}  version {number(node.version)}  held-out "
        if "trainer" in node.needed
        else "  no trainer  held-out ",
    )
    newest, compared = node.newest_score, node.comparison
    warns = node.unscored or not node.signed or (newest is not None and newest.unknown)
    text.append(node.held_out, style="yellow" if warns else "bold")
    if runs := last_evaluation(node):
        text.append(f" ({runs})", style="yellow")
    if (gain := compared.gain) is not None:
        text.append(f" base {compared.base} ").append(f"{gain:+.3f}", style="green" if gain > 0 else "red")
    if newest is not None and newest.n and newest.pass_rate is None:
        text.append(" no pass defined", style="yellow")
    return text.append("  " + sparkline([value for _, value in compared.values], SPARK_COLUMNS), style="cyan")


def _groups(node: NodeState) -> Text:
    """Counts of groups since the node was started, with the reason for most refusals."""
    made, shared, taken, refused = (
        None if node.newest(role, figure) is None else node.total(role, figure)
        for role, figure in (
            ("generator", StatusFigure.GROUPS_GENERATED),
            ("verifier", StatusFigure.SHARED),
            ("verifier", StatusFigure.ACCEPTED),
            ("verifier", StatusFigure.REFUSED),
        )
    )
    waits = node.figure("verifier", StatusFigure.OUTBOX)
    sent = f"shared {number(shared)}{f' (outbox {number(waits)})' if waits else ''}"
    text = Text(f"this start: made {number(made)}")
    if not node.alone or taken or refused:
        text.append(f"  {sent}  taken {number(taken)}  ")
        reasons = node.refusals()
        text.append(f"refused {number(refused)}{f': {reasons}' if reasons else ''}", style="yellow" if refused else "")
    dead = next((fill.state.messages for fill in node.streams if fill.stream == subjects.node_dead_letters_stream(node.node)), 0)
    if dead:
        text.append(f"  dead letters {number(dead)}", style="red")
    for name, figure, digits, unit in (
        ("reward", StatusFigure.REWARD_LOCAL, 3, ""),
        ("foreign", StatusFigure.REWARD_EXTERNAL, 3, ""),
        ("stale by", StatusFigure.STALENESS_MEAN, 1, " steps"),
    ):
        if (value := node.newest("trainer", figure)) is not None:
            text.append(f"  {name} {value:.{digits}f}{unit}" if abs(value) < HUGE else f"  {name} {value:.0e}{unit}")
    return text


def _doings(node: NodeState, fresh: bool) -> Text:
    """The findings, if there are any, and the state of each process."""
    text = Text()
    for words in findings(node):
        text.append(f"{words}; ", style=STYLES[node.health] if node.health in ("bad", "warn") else "yellow")
    unwell = (*node.gone, *node.late)
    roles = sorted(node.needed, key=lambda role: role not in unwell)  # a long line is cut at its end
    text.append(" · ".join(f"{role} {visible(node.role_words(role), 2 * NAME_CHARACTERS)}" for role in roles))
    if fresh and node.alive("trainer") and not node.trouble:
        shares = {words: node.figure("trainer", FigureFamily.SHARE.of(phase)) for phase, words in PHASES.items()}
        largest = sorted(shares.items(), key=lambda each: -each[1])[:2]
        told = ", ".join(f"{words} {min(1.0, share):.0%}" for words, share in largest if share > 0)
        text.append(f" ({told})" if told else "", style="dim")
    return text


def last_evaluation(node: NodeState) -> str:
    """Say that the newest score is not the result yet, because the last policy is being evaluated,
    or the generator has yet to load it; empty if neither is so.
    """
    newest, alive = node.newest_score, node.alive("generator")
    if not (node.finished and alive and newest is not None and newest.policy_version < node.step):
        return ""
    loaded = node.figure("generator", StatusFigure.POLICY_VERSION) >= node.step
    return "" if loaded and not alive[0].state.startswith(EVALUATING_LAST) else "last evaluation runs"


def findings(node: NodeState) -> list[str]:
    """List what a person should act on or know: first what keeps the node from its work. A process
    that is late with its word is shown where its role is.
    """
    found = node.absent or list(filter(None, [node.none_scored, node.stall.words if node.stall else ""]))
    if node.unwritten:
        found.append(node.unwritten)
    if node.none_taken:
        found.append(node.none_taken + (f" (mostly {visible(node.mostly_refused, 40)})" if node.mostly_refused else ""))
    if others := node.held_on():
        found.append(f"another machine holds this name: {visible(', '.join(others), 200)}")
    found += [f"no stream space: {name} is {ratio:.0%} full" for name, ratio in nearly_full(node)]
    if (unknown := sum(node.unknown_rewards.values())) and node.none_scored not in found:
        found.append(f"the rewards of {unknown:,} answers are unknown")
    return found


def nearly_full(node: NodeState) -> Iterator[tuple[str, float]]:
    """The node's streams that soon make their writers wait, each with the part of its limit that is
    used. A stream that drops its oldest messages is always full.
    """
    specs = {spec.name: spec for spec in node_streams(node.node) if spec.discard_new}
    for fill in node.streams:
        spec = specs.get(fill.stream)
        if spec is None:
            continue
        by_count = fill.state.messages / spec.max_msgs if spec.max_msgs > 0 else 0.0
        by_size = (fill.state.size_bytes or 0) / spec.max_bytes if spec.max_bytes > 0 else 0.0
        if (ratio := max(by_count, by_size)) >= FILL_WARNS:
            yield fill.stream.rpartition("_")[2].lower(), ratio


def elsewhere_table(nodes: Sequence[NodeState], known: Collection[str] = ()) -> Table:
    """The nodes on other servers. known: names that have signed for long, or that a roster lists;
    once there are some, the others are marked as new.
    """
    rows = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("node", "held-out", "gain", "version", "shares", "seen", "model"):
        rows.add_column(column, no_wrap=True)
    some_are_known = any(node.signed and node.node in known for node in nodes)
    for node in nodes:
        mark = " (unsigned)" if not node.signed else " (new)" if some_are_known and node.node not in known else ""
        shares = "–" if node.shared_window is None else number(node.shared_window) if node.shared_window else "nothing"
        entry = node.entry
        rows.add_row(
            cell(f"{node.node}{mark}"),
            cell(_score_cell(node)),
            "–" if (gain := node.comparison.gain) is None else f"{gain:+.3f}",
            number(entry.said.policy_version if entry else None),
            shares,
            _seen(node),
            cell(node.doubt or (entry.said.model.name if entry else ""), NAME_CHARACTERS),
        )
    return rows


def _score_cell(node: NodeState) -> str:
    newest = node.newest_score
    if newest is None:
        return "–"
    return f"{newest}/{newest.n + newest.unknown}" + (f", {newest.n} known" if newest.unknown else "")


def _seen(node: NodeState) -> str:
    if node.entry is None:
        return "not listed"
    seen_s = node.at - node.entry.said.updated_at
    if seen_s < SILENT_S:
        return "now"
    return f"{duration(seen_s)} ago" if seen_s < LONG_S else "long ago"
