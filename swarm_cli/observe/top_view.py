"""The screen of `swarm top`, as rich's renderables: a panel per node, or a row per node if panels
do not fit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shared.runtime.status import STARTING, STOPPED
from shared.text import visible
from swarm_cli.observe.node_state import duration
from swarm_cli.observe.run_files import gain_of, scored
from swarm_cli.observe.top_model import PHASES, Fill, HeldOut, NodeModel, ProcessLine, TopModel

SPARKS = "▁▂▃▄▅▆▇█"
PANEL_WIDTH = 78
"""Columns that a panel needs; on a screen twice as wide, panels are in pairs."""
PANEL_LINES = 10
MOST_PANELS = 24
"""The most panels if the height is unlimited; more nodes are shown as rows."""
SPARK_COLUMNS = 22
PHASE_NAMES = {"forward_backward": "compute"}
PHASE_STYLES = dict(zip(PHASES, ("bright_black", "cyan", "green", "yellow", "magenta", "blue"), strict=True))
FILL_WARNS = 0.8
HUGE = 10**12
"""No true count is this large. A larger one is invented, and must not push the rest of its line off
the screen.
"""
NAME_CHARACTERS = 32
"""Longest text for a node's name, a state or a reason: the length that a name may have."""


def screen(
    model: TopModel, *, width: int, height: int | None, headline: str, notice: str = "", calm: bool = False, closing: str = ""
) -> RenderableType:
    """The whole screen. `height` in lines; None: unlimited. `notice`: what is wrong with the view
    itself or, if `calm`, a message that is no cause for concern. `closing`: a last line.
    """
    per_row = 2 if width >= 2 * PANEL_WIDTH and len(model.nodes) > 1 else 1
    rows = -(-len(model.nodes) // per_row)
    fits = len(model.nodes) <= MOST_PANELS if height is None else rows * PANEL_LINES + 2 + bool(notice) + bool(closing) <= height
    parts: list[RenderableType] = [_headline(model, headline)]
    if notice:
        parts.append(Text(visible(notice), style="bold" if calm else "bold red"))
    parts.append(_panels(model.nodes, per_row) if fits else _table(model.nodes, width))
    parts.append(_swarm_line(model))
    if closing:
        parts.append(Text(f" {visible(closing)}", style="bold", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


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
    """A step rate, in the unit that gives a digit other than 0 before the point."""
    if steps_per_minute is None:
        return "– steps/s"
    if steps_per_minute >= HUGE:
        return f"{steps_per_minute / 60:.0e} steps/s"
    if steps_per_minute >= 6:
        return f"{steps_per_minute / 60:.2f} steps/s"
    return f"{steps_per_minute:.1f} steps/min" if steps_per_minute >= 1 else f"{steps_per_minute * 60:.1f} steps/h"


def _headline(model: TopModel, headline: str) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(model.at))
    count = f"{len(model.nodes)} node" + ("s" if len(model.nodes) != 1 else "")
    return Text.assemble(
        (" swarm top ", "reverse bold"), f"  {count}  {clock}  ", (visible(headline), "dim"), overflow="ellipsis", no_wrap=True
    )


def _panels(nodes: Sequence[NodeModel], per_row: int) -> RenderableType:
    grid = Table.grid(expand=True)
    for _ in range(per_row):
        grid.add_column(ratio=1)
    for first in range(0, len(nodes), per_row):
        row: list[RenderableType] = [_panel(node) for node in nodes[first : first + per_row]]
        grid.add_row(*row, *[""] * (per_row - len(row)))
    return grid


def _panel(node: NodeModel) -> Panel:
    """One node's panel. Names and figures come from other nodes' messages, so `visible` removes
    control characters. Values are cut, never wrapped: a panel that grew by a line would move all
    panels below it.
    """
    body = Table.grid(padding=(0, 2), expand=True)
    body.add_column(style="dim", no_wrap=True)
    body.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    body.add_row("held-out", _held_out(node.held_out))
    body.add_row("reward", _rewards(node))
    body.add_row("local", _local_groups(node))
    body.add_row("foreign", _foreign_groups(node))
    body.add_row("trainer", _phases(node))
    unheard = "on another server: its processes cannot be seen here" if node.elsewhere else "no process has reported yet"
    for line, label in zip(_processes(node.processes, unheard), ("alive", ""), strict=False):
        body.add_row(label, line)
    body.add_row("streams", _fills(node.fills))
    title = Text.assemble(
        (f" {visible(node.node, NAME_CHARACTERS)} ", "bold"),
        f" step {_number(node.step)}  {rate(node.steps_per_minute)}  policy {_number(node.version)}",
        f" (sampling with {_number(node.generating_version)}) " if node.generating_version is not None else " ",
        f" held by {visible(', '.join(node.held_on), NAME_CHARACTERS)} " if node.held_on else "",
    )
    batch = (
        None
        if node.wanted_local is None
        else f" a batch: {_number(node.wanted_local)} local + {_number(node.wanted_external)} foreign groups "
    )
    return Panel(
        body, title=title, title_align="left", subtitle=batch, subtitle_align="right", border_style=_health(node), padding=(0, 1)
    )


def _health(node: NodeModel) -> str:
    """A node's colour; green only if it is known to be well now."""
    if node.known_s > 0:
        return "yellow"
    if node.ended:
        return "dim"
    if node.missing:
        return "red" if node.step else "yellow"
    if node.starting:
        return "yellow"
    if node.elsewhere:
        return "yellow" if node.trouble else "dim"
    if not node.trouble:
        return "green"
    return "red" if node.stands_still else "yellow"


def _state(node: NodeModel) -> str:
    """A node's state in words."""
    if node.known_s > 0:
        return f"as of {duration(node.known_s)} ago"
    if node.trouble and not node.heard:
        return node.trouble[0]
    if node.missing:
        return "no " + ",".join(node.missing)
    if node.starting:
        return "starting: " + ",".join(node.starting)
    if node.ended:
        return "finished, ended" if node.finished else "ended"
    if node.elsewhere:
        return "elsewhere"
    if node.trouble:
        return node.trouble[0]
    if node.takes_none_s is not None:
        return f"none taken {duration(node.takes_none_s)}"
    return "finished" if node.finished else "ok"


def _held_out(held_out: HeldOut) -> Text:
    """The newest score, beside the base policy's by the same measure, and their course."""
    newest, base = held_out.newest, held_out.base
    if newest is None:
        return Text("not evaluated yet", style="dim")
    text = Text.assemble((str(newest), "bold"), f" @{_number(newest.policy_version)} of {_number(newest.n)}")
    if newest.unknown:
        text.append(f" ({_number(newest.unknown)} unknown)", style="yellow")
    if held_out.unsigned:
        text.append(" unsigned", style="yellow")
    if base and base is not newest:
        gain = gain_of(newest, base)
        text.append(f"  base {base} ")
        if gain is not None:
            text.append(f"{gain:+.3f}", style="green" if gain > 0 else "red")
    if newest.pass_rate is None:
        text.append(" no pass defined", style="yellow")
    return text.append("  " + sparkline([value for _, value in scored(held_out.history)], SPARK_COLUMNS), style="cyan")


def _rewards(node: NodeModel) -> Text:
    staleness = (
        "–" if node.staleness_mean is None else f"{_ratio(node.staleness_mean, 1)} (max {_ratio(node.staleness_max or 0.0, 0)})"
    )
    text = Text(f"local {_ratio(node.reward_local)}  foreign {_ratio(node.reward_external)}  stale {staleness}  ")
    if node.unknown_rewards:
        text.append(f"unknown {node.unknown_rewards:,}  ", style="yellow")
    return text.append(f"scorer kills {_number(node.scorer_kills)}", style="yellow" if node.scorer_kills else "")


def _local_groups(node: NodeModel) -> Text:
    pool = f"{_number(node.pool_local)}+{_number(node.pool_external)}"
    made = f"made {_number(node.made)}  to score {_number(node.to_score)}  shared {_number(node.shared)}"
    return Text(f"{made}  outbox {_number(node.outbox)}  pool {pool}")


def _foreign_groups(node: NodeModel) -> Text:
    """Of a node that takes none, what waits is left out: the line would be too long."""
    if node.takes_none_s is None:
        text = Text(f"waiting {_number(node.intake)}  taken in {_number(node.taken)}  ")
    else:
        text = Text(f"taken in {_number(node.taken)}, none for {duration(node.takes_none_s)}  ")
    refused = f"refused {_number(node.refused)}" + (f": {visible(node.top_reason, NAME_CHARACTERS)}" if node.top_reason else "")
    return text.append(refused, style="yellow" if node.refused else "")


def _phases(node: NodeModel) -> Text:
    """The trainer's use of time: a bar of ten blocks, then the four longest phases. If something
    has stalled, that is shown instead.
    """
    if node.known_s > 0 or node.trouble or node.ended or node.elsewhere:
        return Text(f"{'  '.join(node.trouble) or _state(node)}", style=f"bold {_health(node)}")
    shares = sorted(node.phase_shares.items(), key=lambda item: -item[1])
    if not shares:
        return Text("no step in progress" if node.step else "no step yet", style="dim")
    text = Text()
    for phase, share in shares:
        text.append("█" * round(10 * share), style=PHASE_STYLES[phase])
    text.append(" ")
    for phase, share in shares[:4]:
        if share > 0:
            text.append(f" {PHASE_NAMES.get(phase, phase)} {share:.0%}", style=PHASE_STYLES[phase])
    return text


def _processes(processes: Sequence[ProcessLine], unheard: str) -> list[Text]:
    """Two lines: generators and verifiers, then sampler and trainer. What does not answer or get on
    is first in its line, because a long line is cut at its end. unheard: what is said if there are
    none.
    """
    if not processes:
        return [Text(unheard, style="yellow")]
    lines = []
    for roles in (("generator", "verifier"), ("sampler", "trainer")):
        line = Text()
        of_role = {role: [process for process in processes if process.role == role] for role in roles}
        for role, replicas in sorted(of_role.items(), key=lambda each: _wellness(each[1])):
            line.append(_process(role, replicas).append(" " * 3))
        lines.append(line)
    return lines


def _wellness(replicas: Sequence[ProcessLine]) -> int:
    """0 for what does not answer, 1 for what does not get on, 2 for what is well."""
    if not replicas or not replicas[0].alive:
        return 0
    return 1 if replicas[0].instead else 2


def _process(role: str, replicas: Sequence[ProcessLine]) -> Text:
    if not replicas:
        return Text(f"{role} never seen", style="yellow")
    first = replicas[0]
    if not first.alive:
        if first.state == STARTING:
            return Text(f"{role} starting", style="dim")
        if first.state == STOPPED:
            return Text(f"{role} ended {duration(first.silent_s)} ago", style="yellow")
        return Text(f"{role} not answering for {duration(first.silent_s)}", style="bold red")
    count = f" x{len(replicas)}" if len(replicas) > 1 else ""
    if first.instead:
        return Text(f"{role}{count} {visible(first.instead, 2 * NAME_CHARACTERS)}", style="yellow")
    return Text.assemble((f"{role}{count}", "green"), f" {visible(first.state, NAME_CHARACTERS)}, up {duration(first.age_s)}")


def _fills(fills: Sequence[Fill]) -> Text:
    if not fills:
        return Text("none seen", style="dim")
    text = Text()
    for fill in fills:
        if fill.name == "dead":
            text.append(f"dead letters {_number(fill.messages)}  ", style="red" if fill.messages else "")
            continue
        ratio = f"{_number(fill.messages)}" if fill.ratio is None else f"{fill.ratio:.0%}"
        nearly_full = fill.ratio is not None and fill.ratio >= FILL_WARNS and not fill.full_is_normal
        text.append(f"{visible(fill.name, NAME_CHARACTERS)} {ratio}  ", style="red" if nearly_full else "")
    sizes = [fill.size_bytes for fill in fills if fill.size_bytes is not None]
    return text.append(_size(sum(sizes)) if sizes else "", style="dim")


def _swarm_line(model: TopModel) -> Text:
    if model.swarm_reachable is None:
        return Text(" no swarm plane: these nodes train alone", style="dim")
    if model.swarm_denied:
        return Text(" the swarm's streams are not shown: its server refuses this command (nats.swarm_key_file)", style="dim")
    if not model.swarm_reachable:
        return Text(" the swarm plane cannot be reached; nodes train alone until it is back", style="bold yellow")
    return Text(" shared streams  ", style="dim").append(_fills(model.swarm_fills)).append(_omissions(model))


def _omissions(model: TopModel) -> Text:
    """How much of the directory is not on the screen."""
    text = Text()
    if model.left_out:
        text.append(f"  {model.left_out:,} more nodes: `swarm top NODE`", style="yellow")
    if model.unreadable:
        text.append(f"  {model.unreadable:,} unreadable entries", style="yellow")
    return text


def _table(nodes: Sequence[NodeModel], width: int) -> Table:
    """One row per node, for swarms whose panels do not fit. On screens narrower than 120
    characters, columns with results are kept and those that explain them are left out.
    """
    wide = width >= 120
    columns = ["node", "step", "steps/s", "policy", "held-out", "history", "reward", "taken", "refused"]
    columns += ["external", "stale", "made", "shared", "dead", "kills", "state"] if wide else ["state"]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0) if wide else (0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in ("node", "history", "state") else "right", no_wrap=True)
    for node in nodes:
        newest = node.held_out.newest
        per_s = None if node.steps_per_minute is None else node.steps_per_minute / 60
        cells = [
            visible(node.node, NAME_CHARACTERS),
            f"{_number(node.step)}",
            _ratio(per_s, 2),
            f"{_number(node.version)}",
            (str(newest) if newest else "–") + ("?" if node.held_out.unsigned else ""),
        ]
        cells += [sparkline([value for _, value in scored(node.held_out.history)], 12 if wide else 8), _ratio(node.reward_local)]
        cells += [f"{_number(node.taken)}", f"{_number(node.refused)}"]
        if wide:
            cells += [
                _ratio(node.reward_external),
                _ratio(node.staleness_mean, 1),
                f"{_number(node.made)}",
                f"{_number(node.shared)}",
            ]
            cells += [_number(node.dead), _number(node.scorer_kills)]
        table.add_row(*(Text(each) for each in cells), Text(visible(_state(node)), style=_health(node)))
    return table


def _ratio(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "–"
    return f"{value:.{digits}f}" if abs(value) < HUGE else f"{value:.0e}"


def _number(value: int | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if abs(value) < HUGE else f"{value:.0e}"


def _size(size_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} B"
