"""Writes the note that `swarm_cli.runs` reads: which servers a run's nodes use, and the command
that continues the run.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from shared.config import NodeConfig
from shared.contracts.wire import DEFAULT_SWARM_ID, is_node_name
from shared.runtime.exits import EXIT_CONFIG
from swarm_cli.console import count, note
from swarm_cli.installation import DEMO_CONFIG
from swarm_cli.local.launch import STOPPED_BY_SIGNAL, Outcome
from swarm_cli.local.procfile import DEFAULT_NATS_PORT, SWARM_URL_VARIABLE, Layout
from swarm_cli.observe.plot import where_runs_are
from swarm_cli.observe.verdict import run_verdicts
from swarm_cli.replace_file import replace_file
from swarm_cli.runs import NOTE, RunNote, killed_often, mark_as_own


def write_note(folder: Path, note: RunNote) -> None:
    """Replace the run's note, as this user's own."""
    replace_file(folder / NOTE, msgspec.json.encode(note).decode() + "\n")
    mark_as_own(folder)


def note_of(layout: Layout, goes_on: str, swarm_id: str = "") -> RunNote:
    """The note for a run with this layout, whose nodes are in this swarm.

    A configuration file's `nats.swarm_url` is not where they share: the Procfile's lines take the
    variable from outside, or else the layout's server.
    """
    return RunNote(layout.url, os.environ.get(SWARM_URL_VARIABLE) or layout.url, goes_on, swarm_id, os.getcwd())


def swarm_of_run(config: NodeConfig, layout: Layout) -> dict[str, str]:
    """The environment variable that names the swarm after the run, so that a server started here
    keeps runs apart: its folder may still hold an earlier run's groups.

    Empty with somebody else's server, or if the configuration names a swarm.
    """
    if layout.nats_url or config.nats.swarm_id != DEFAULT_SWARM_ID:
        return {}
    return {"SWARM_NATS__SWARM_ID": config.node.run}


def up_command(config: NodeConfig, layout: Layout) -> str:
    """The `swarm up` command that starts the same nodes on the same ports, from any folder."""
    return shlex.join(["swarm", "up", "--run", config.node.run, *_options(config, layout)])


def make_command(config: NodeConfig, layout: Layout) -> str:
    """The same with make."""
    flags = shlex.join(_options(config, replace(layout, nodes=Layout().nodes)))
    nodes = f" NODES={layout.nodes}" if layout.nodes != Layout().nodes else ""
    return f"make run RUN={shlex.quote(config.node.run)}{nodes}" + (f" UP_FLAGS={shlex.quote(flags)}" if flags else "")


def _options(config: NodeConfig, layout: Layout) -> Iterator[str]:
    """The options of `swarm up` that its defaults and `config` do not cover."""
    if layout.nodes != Layout().nodes:
        yield from ("--nodes", str(layout.nodes))
    for name in layout.names and layout.node_names:
        yield from ("--name", name)
    file = os.path.abspath(layout.config)
    if file != str(DEMO_CONFIG):
        yield from ("--config", file)
    if layout.nats_url:
        yield from ("--nats-url", layout.nats_url)
    elif layout.nats_port != DEFAULT_NATS_PORT:
        yield from ("--nats-port", str(layout.nats_port))
    if layout.base_port != config.http.base_port:
        yield from ("--base-port", str(layout.base_port))


class RunSummary:
    """The layout of a run. `swarm add` extends it; the run's note is kept up to date."""

    def __init__(self, config: NodeConfig, layout: Layout) -> None:
        self._config = config
        self.grow(layout)

    def grow(self, layout: Layout) -> None:
        """Take `layout` as the run's from now on."""
        self.layout = layout
        config = self._config
        swarm_id = swarm_of_run(config, layout).get("SWARM_NATS__SWARM_ID", config.nats.swarm_id)
        write_note(run_folder(config), note_of(layout, up_command(config, layout), swarm_id))


def run_folder(config: NodeConfig) -> Path:
    """The folder of the configuration's run."""
    return config.node.var_dir / "runs" / config.node.run


def nodes_before(folder: Path) -> list[str]:
    """The nodes of a run's earlier starts. They are recognised by their trainer's log, because the
    server's folder lies beside theirs.
    """
    logs = folder.glob("*/trainer.log")
    return sorted(log.parent.name for log in logs if is_node_name(log.parent.name))


def announce(config: NodeConfig, layout: Layout) -> None:
    """Print what starts, where its files are, and how to look at it and end it."""
    folder = run_folder(config)
    before = nodes_before(folder)
    steps = config.trainer.max_steps
    known = "continues where it stopped" if set(before) & set(layout.node_names) else "new"
    until = f"ends after {count(steps, 'step')}" if steps else "until Ctrl-C"
    note(f"run {config.node.run}: {known}, {count(layout.nodes, 'node')} ({', '.join(layout.node_names)}), {until}")
    if not layout.names and (left_out := [name for name in before if name not in layout.node_names]):
        note(
            f"warning: this run also has {', '.join(left_out)}, which {'is' if len(left_out) == 1 else 'are'} not started: "
            f"--nodes {layout.nodes + len(left_out)} starts every node"
        )
    note(f"files: {folder}/<node>/ (metrics.jsonl, eval.jsonl, <role>.log)")
    elsewhere = "" if layout.url == Layout().url else f" --node-url {layout.url}"
    note(f"look:  swarm top{elsewhere} (one screen, live)")
    note(f"       swarm dashboard{elsewhere} (in a browser; make dashboard)")
    note(f"end:   Ctrl-C, or swarm down {config.node.run}; only warnings are shown here (--verbose: all)")


def explain_end(outcome: Outcome, config: NodeConfig, layout: Layout) -> None:
    """Print the run's results and how to continue it, or which process ended it and why."""
    run, folder = config.node.run, run_folder(config)
    if outcome.code in STOPPED_BY_SIGNAL:
        # For a run that completed its steps the progress view has printed the verdict already.
        for line in run_verdicts(folder, list(dict.fromkeys([*layout.node_names, *nodes_before(folder)]))):
            note(line)
        note("stopped. To continue it or draw its curves:")
        note(f"  {up_command(config, layout)}    ({make_command(config, layout)})")
        note(f"  swarm plot {run}{where_runs_are(config)}    (make plot RUN={run})")
        return
    if outcome.code == 0 or outcome.first is None:
        return
    node, _, role = outcome.first.rpartition("-")
    log = folder / (Path(node) / f"{role}.log" if node else Path(f"{outcome.first}.log"))
    if often := killed_often(outcome.code):
        note(
            f"{outcome.first} {often}, so everything was stopped. It could not say why: see what kills it "
            f"(`dmesg | grep -i oom` for a lack of memory); its log is {log}"
        )
        return
    why = "cannot go on" if outcome.code == EXIT_CONFIG else f"ended with code {outcome.code}"
    note(f"{outcome.first} {why}, so everything was stopped. Its last lines are in {log}")
