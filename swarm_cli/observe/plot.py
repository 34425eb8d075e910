"""`swarm plot`: a run's learning curves as one PNG."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared.atomic_files import draft_in, keep_draft
from shared.run_records import EVAL_FILE, EVAL_SETS_FILE, METRICS_FILE, reward_changes
from shared.text import visible
from swarm_cli.console import count, note
from swarm_cli.errors import CommandError
from swarm_cli.file_names import file_names
from swarm_cli.observe.run_files import Comparison, SetCurve, SetResult, compared, read_evaluations, read_sets, read_steps
from swarm_cli.observe.verdict import run_verdicts
from swarm_cli.runs import DEFAULT_VAR_DIR, VAR_DIR_VARIABLE, read_end
from swarm_cli.target import find_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run, or the path of its folder.")],
    out: Annotated[Path | None, typer.Option(help="PNG to write.  [default: curves.png in the run's folder]")] = None,
    var_dir: Annotated[Path, typer.Option(help="Folder that holds runs/.", envvar=VAR_DIR_VARIABLE)] = DEFAULT_VAR_DIR,
) -> None:
    """Draw a run's learning curves: held-out pass rate, evaluation sets, rewards, loss, gradient
    norm, entropy, staleness.
    """
    run_dir = find_run(run, var_dir)
    target = out or run_dir / "curves.png"
    nodes = sorted(folder for folder in run_dir.iterdir() if _has_curves(folder))
    if not nodes:
        raise CommandError(f"{run_dir}: no node has written {METRICS_FILE} or {EVAL_FILE} yet: let the run take a step first")
    target.parent.mkdir(parents=True, exist_ok=True)
    draw_curves(run_dir.resolve().name, nodes, target, through=out is not None)
    for line in run_verdicts(run_dir, [node.name for node in nodes], ended=read_end(run_dir) is not None):
        note(line)
    note(f"{count(len(nodes), 'node')} ({visible(', '.join(node.name for node in nodes))})")
    typer.echo(str(target))


def _has_curves(folder: Path) -> bool:
    return folder.is_dir() and any((folder / name).is_file() for name in (EVAL_FILE, EVAL_SETS_FILE, METRICS_FILE))


MOST_TASKS = 12
"""The most datasets with their own diagram; the mean over all would hide which one is learned."""
_LARGEST = 1e100
SMOOTHED_POINTS = 60
"""A curve is smoothed with a window that leaves about this many independent points."""
THINNEST, WIDER, MOST_WIDER = 1.2, 1.6, 4
"""Line width of the node drawn last. Each one below it is wider, up to this many times, so that
equal curves do not hide each other.
"""
NOTHING = "nothing on record"
_SCORE, _ZERO = "score", "zero"


@dataclass(frozen=True, slots=True)
class Look:
    """The style of a node's curves."""

    colour: Any
    width: float

    @property
    def options(self) -> dict[str, Any]:
        return {"color": self.colour, "linewidth": self.width, "markersize": self.width + 2.0}


@dataclass(frozen=True, slots=True)
class Panel:
    """One small diagram over training steps, of fields of `metrics.jsonl`: the first is solid, the
    second dashed. axis: `_ZERO` begins at 0, and that of a `_SCORE` must not enlarge noise.
    """

    title: str
    unit: str
    fields: tuple[str, ...]
    labels: tuple[str, ...] = ()
    log_scale: bool = False
    axis: str = ""


PANELS = (
    Panel("Reward of local rollouts (sampled)", "mean reward", ("reward_local",), axis=_SCORE),
    Panel("Reward of foreign rollouts (as it counts here)", "mean reward", ("reward_external",), axis=_SCORE),
    Panel("Loss", "loss", ("loss",)),
    Panel("Gradient norm before clipping", "L2 norm, log scale", ("grad_norm",), log_scale=True),
    Panel("Entropy of the policy", "nats per token", ("entropy",), axis=_ZERO),
    Panel("Staleness of local rollouts", "policy versions", ("staleness_mean", "staleness_max"), ("mean", "largest"), axis=_ZERO),
    Panel(
        "Rollout groups in a batch, with and without an advantage",
        "groups per step",
        ("groups_local", "groups_external"),
        ("local", "foreign"),
        axis=_ZERO,
    ),
)


def draw_curves(run: str, node_dirs: Sequence[Path], target: Path, *, through: bool = False) -> None:
    """Write the PNG. `node_dirs` hold `metrics.jsonl` and `eval.jsonl`; each node keeps one colour
    and width in all diagrams.

    through: write to `target` itself, because the user named it, in the format that its name ends
        with. Otherwise what is there is replaced: it may be a link in a run that somebody else
        made.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # the backend is chosen first

    palette = matplotlib.colormaps["tab10"]
    looks = {
        folder: Look(palette(position % 10), THINNEST + WIDER * min(MOST_WIDER, len(node_dirs) - 1 - position))
        for position, folder in enumerate(node_dirs)
    }
    comparisons = {folder: compared(read_evaluations(folder)) for folder in node_dirs}
    tasks = sorted({name for each in comparisons.values() for name in each.curves if name})[:MOST_TASKS]
    tasks = tasks if len(tasks) > 1 else []  # that of all tasks is the same
    names = file_names(node_dirs[0].parent if node_dirs else None)
    sets = {folder: read_sets(folder) for folder in node_dirs}
    steps = {folder: read_steps(folder) for folder in node_dirs}
    panels = [panel for panel in PANELS if any(_has_values(records, panel) for records in steps.values())]
    set_names = sorted({name for curves in sets.values() for name in curves})
    drawn: list[Callable[[Axes], None]] = [
        lambda axis: _draw_held_out(axis, comparisons, looks),
        *(partial(_draw_set, name=name, sets=sets, looks=looks) for name in set_names),
        *(partial(_draw_panel, panel=panel, steps=steps, looks=looks) for panel in panels),
        *(partial(_draw_task, name=name, title=names.shown(name), comparisons=comparisons, looks=looks) for name in tasks),
    ]
    rows = -(-len(drawn) // 2)
    figure, grid = plt.subplots(rows, 2, figsize=(13, 3.75 * rows), constrained_layout=True, squeeze=False)
    axes = list(grid.flat)
    for axis, draw in zip(axes, drawn, strict=False):
        draw(axis)
    for axis in axes[len(drawn) :]:
        axis.set_axis_off()
    figure.suptitle(f"Run {_plain(run)}", fontsize=15)
    if through:
        figure.savefig(target, dpi=110)
    else:
        with draft_in(target.parent) as (stream, draft):
            figure.savefig(stream, dpi=110, format="png")
            keep_draft(stream, draft, target)
    plt.close(figure)


def _draw_task(axis: Axes, name: str, title: str, comparisons: Mapping[Path, Comparison], looks: dict[Path, Look]) -> None:
    """Draw one dataset's results by the measure of the newest, because a pass may have gone."""
    axis.set_title(f"Held-out: {_plain(title)}", fontsize=11)
    axis.set_xlabel("policy version")
    newest = [each.newest.per_task[name] for each in comparisons.values() if each.newest and name in each.newest.per_task]
    by_reward = any(each.pass_rate is None for each in newest)
    axis.set_ylabel("mean reward (no pass defined)" if by_reward else "share of tasks solved")
    for folder, comparison in comparisons.items():
        if points := comparison.curves.get(name):
            axis.plot(*zip(*points, strict=True), **looks[folder].options, marker="o", label=_plain(folder.name))
    _finish(axis)
    _honest_limits(axis, [score for each in comparisons.values() for _, score in each.curves.get(name, ())])


def _draw_held_out(axis: Axes, by_node: Mapping[Path, Comparison], looks: dict[Path, Look]) -> None:
    """Draw all nodes in one panel from 0 to 1, because on an axis that fits the data noise looks
    like learning. Bars are 95 % intervals, from each evaluation's number of tasks, as on the page.
    Results that cannot be compared with a node's newest are not drawn, and the legend says so.
    """
    from shared.tasks.evaluation import rate_interval  # tasks are not loaded where a run is only named

    by_reward = any(each.newest.pass_rate is None for each in by_node.values() if each.newest is not None)
    axis.set_title(f"Held-out {'mean reward, no pass defined' if by_reward else 'pass rate'} (tasks never trained on)", fontsize=11)
    axis.set_xlabel("policy version")
    axis.set_ylabel("mean reward" if by_reward else "share of tasks solved")
    sizes = set()
    for folder, comparison in by_node.items():
        if not comparison.alike:
            continue
        sizes |= {evaluation.n for evaluation in comparison.alike}
        points = comparison.values
        versions, rates = [each.policy_version for each, _ in points], [value for _, value in points]
        bars = None if by_reward else _lengths([(value, *rate_interval(value, each.n)) for each, value in points])
        label = _plain(folder.name) + (f" ({comparison.why_no_base})" if comparison.why_no_base else "")
        axis.errorbar(versions, rates, yerr=bars, **looks[folder].options, marker="o", capsize=2, label=label)
    _finish(axis)
    _honest_limits(axis, [value for each in by_node.values() for _, value in each.values])
    if sizes:
        counts = " or ".join(str(size) for size in sorted(sizes))
        axis.set_xlabel(f"policy version  ({counts} tasks{'' if by_reward else ', bars: 95 % interval'})")


def _draw_set(axis: Axes, name: str, sets: Mapping[Path, dict[str, SetCurve]], looks: dict[Path, Look]) -> None:
    """Draw avg@k with bars of a 95 % interval over questions, pass@k dashed, and the base policy's
    avg@k as a dotted line.
    """
    curves = {folder: curves[name] for folder, curves in sets.items() if name in curves}
    newest = next(iter(curves.values())).newest
    axis.set_title(
        f"Evaluation set {_plain(name)}: {newest.words()}{f', pass@{newest.k} dashed' if newest.pass_at else ''}", fontsize=11
    )
    axis.set_xlabel(f"policy version  ({newest.questions} questions, bars: 95 % interval)")
    axis.set_ylabel(newest.words())
    values: list[float] = []
    for folder, curve in curves.items():
        versions, scores = [each.policy_version for each in curve.results], [each.score or 0.0 for each in curve.results]
        axis.errorbar(
            versions,
            scores,
            yerr=_set_bars(curve.results),
            **looks[folder].options,
            marker="o",
            capsize=2,
            label=_plain(folder.name),
        )
        if all(each.at_k is not None for each in curve.results) and newest.k > 1:
            axis.plot(versions, [each.at_k or 0.0 for each in curve.results], **looks[folder].options, linestyle="--")
        if curve.base is not None:
            axis.axhline(curve.base.score or 0.0, color=looks[folder].colour, linewidth=0.8, linestyle=":")
        values += scores
    _finish(axis)
    _honest_limits(axis, values)


def _honest_limits(axis: Axes, values: Sequence[float]) -> None:
    """Show scores between 0 and 1 on an axis from 0 to 1, and others from 0: on an axis that fits
    the data, noise looks like learning.
    """
    low, high = min(values, default=0.0), max(values, default=0.0)
    if low >= 0.0 and high <= 1.0:
        axis.set_ylim(0, 1)
    elif low >= 0.0:
        axis.set_ylim(bottom=0)
    elif high <= 0.0:
        axis.set_ylim(top=0)


def _has_values(records: Sequence[Mapping[str, Any]], panel: Panel) -> bool:
    return any(_is_drawable(record.get(name)) for record in records for name in panel.fields)


def _draw_panel(axis: Axes, panel: Panel, steps: dict[Path, list[dict[str, Any]]], looks: dict[Path, Look]) -> None:
    """Draw one panel. Single steps are noisy, so they are drawn faintly behind their trailing mean.
    A second field is dashed in its node's colour over the pale first one, with its own legend. The
    axis is logarithmic only if a value is above 0: otherwise matplotlib warns and draws nothing.
    """
    axis.set_title(panel.title, fontsize=11)
    axis.set_xlabel("training step")
    axis.set_ylabel(panel.unit)
    from matplotlib.lines import Line2D

    positive, drawn = False, []
    for folder, records in steps.items():
        for position, name in enumerate(panel.fields):
            drawable = [record for record in records if _is_drawable(record.get(name))]
            if not drawable:
                continue
            xs, ys = [record["step"] for record in drawable], [float(record[name]) for record in drawable]
            positive |= any(y > 0 for y in ys)
            drawn += ys
            window = max(1, len(ys) // SMOOTHED_POINTS)
            label = _plain(folder.name)
            if window > 1:
                axis.plot(xs, ys, color=looks[folder].colour, alpha=0.2, linewidth=0.8)
                label += f" (mean of {window})"
            style, label = ("-", label) if position == 0 else ("--", "_beside its node's other curve")
            alpha = 0.4 if position == 0 and len(panel.fields) > 1 else 1.0
            # A mean of rewards does not go over a change of the reward.
            changes = reward_changes(record.get("scorer") if panel.axis == _SCORE else None for record in drawable)
            for each in range(changes[-1] + 1):
                part = slice(bisect_left(changes, each), bisect_right(changes, each))
                means = trailing_mean(ys[part], window)
                axis.plot(xs[part], means, **looks[folder].options, alpha=alpha, linestyle=style, label=label)
                label = "_after a change of the reward"
    if panel.log_scale and positive:
        axis.set_yscale("log")
    _finish(axis)
    if panel.axis == _SCORE:
        _honest_limits(axis, drawn)
    elif panel.axis == _ZERO:
        axis.set_ylim(bottom=0)
    if panel.labels and axis.lines:
        styles = [Line2D([], [], color="black", linestyle=style) for style in ("-", "--")]
        axis.legend(styles, panel.labels, fontsize=8)


def _is_drawable(value: Any) -> bool:
    """Check whether matplotlib can draw it. It leaves gaps for NaN and infinity, and fails for
    numbers near the largest.
    """
    return isinstance(value, int | float) and (not abs(value) > _LARGEST or value in (math.inf, -math.inf))


def _plain(text: str) -> str:
    """`text` as matplotlib shows it unchanged: dollar signs are not the borders of formulas."""
    return visible(text, 80).replace("$", r"\$")


def _finish(axis: Axes) -> None:
    """Add what all diagrams have. Steps and versions are whole numbers, so the ticks are too."""
    from matplotlib.ticker import MaxNLocator

    axis.grid(True, alpha=0.3)
    low, high = axis.get_xlim()
    if high - low < 1:  # a single one
        axis.set_xticks([round((low + high) / 2)])
    else:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)
    else:
        axis.text(0.5, 0.5, NOTHING, transform=axis.transAxes, ha="center", va="center", color="grey")


def trailing_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and the `window` - 1 before it; of fewer values at the start."""
    means, running = [], 0.0
    for position, value in enumerate(values):
        running += value
        if position >= window:
            running -= values[position - window]
        means.append(running / min(window, position + 1))
    return means


def _set_bars(results: Sequence[SetResult]) -> list[list[float]]:
    """How far the 95 % interval of each result extends below and above it."""
    from shared.tasks.evaluation import Z_95, rate_interval

    spans = []
    for each in results:
        score = each.score or 0.0
        if each.pass_rate is None:
            spans.append((score, score - Z_95 * each.error, score + Z_95 * each.error))
        else:
            spans.append((score, *rate_interval(score, each.questions or each.n, each.error)))
    return _lengths(spans)


def _lengths(spans: Sequence[tuple[float, float, float]]) -> list[list[float]]:
    """Of values with the ends of their intervals: the lengths below, and those above."""
    return [[value - low for value, low, _ in spans], [high - value for value, _, high in spans]]
