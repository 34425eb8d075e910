"""What `swarm up` prints at the start of a run and at its end."""

from __future__ import annotations

from pathlib import Path

from shared.config import NodeConfig
from shared.contracts.wire import is_node_name
from shared.runtime.errors import EXIT_CONFIG
from swarm_cli.console import count, note
from swarm_cli.local.launch import STOPPED_BY_SIGNAL, Outcome
from swarm_cli.local.procfile import Layout
from swarm_cli.local.run_note import make_command, note_of, swarm_of_run, up_command, write_note
from swarm_cli.observe.plot import where_runs_are
from swarm_cli.observe.verdict import run_verdicts
from swarm_cli.run_end import killed_often


class Ran:
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
