"""Experiments with the real services: each run is a swarm on this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from lab.arms import PlannedRun, plan_run
from lab.records import RecordWriter
from lab.runs import RunFolder, resolved_settings
from lab.spec import Spec
from lab.step_record import check_services_run, collect
from shared.config import NodeConfig
from shared.config.load import CONFIG_FILE_VARIABLE, ENV_PREFIX
from swarm_cli.console import note
from swarm_cli.errors import CommandError
from swarm_cli.local.procfile import PORTS_PER_NODE, Layout, is_free, node_name, process_lines
from swarm_cli.local.supervisor import run_lines
from swarm_cli.toml_view import config_toml


def make_services_runs(spec: Spec, folders: Sequence[RunFolder]) -> None:
    """Do every run, one after another.

    Raises:
        SpecError: only a simulation can do one of the runs.
        CommandError: a swarm ended before its nodes had taken their steps.
    """
    planned = [(folder, plan_run(spec, folder.arm, folder.seed, node_name)) for folder in folders]
    for _, run in planned:
        check_services_run(run)
    for number, (folder, run) in enumerate(planned, start=1):
        note(f"[{number}/{len(planned)}] {folder.arm} seed {folder.seed} begins")
        started = time.monotonic()
        _make(run, folder)
        seconds = time.monotonic() - started
        folder.finish(run.rounds, seconds, spec.digest(folder.arm), resolved_settings(spec, folder.arm))


def _make(run: PlannedRun, folder: RunFolder) -> None:
    """Do one run. Its processes see none of the caller's `SWARM_` settings: only the spec decides.
    The folder is removed once its records are read, because an experiment's checkpoints would fill
    the disk; a failed run leaves it, with its logs.
    """
    work = (folder.path / "services").absolute()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    layout = Layout(len(run.nodes), *_free_ports(len(run.nodes)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    run_name = run.nodes[0].config.node.run
    environment |= {"SWARM_NODE__RUN": run_name, "SWARM_NODE__VAR_DIR": str(work)}
    outcome = run_lines(with_own_configs(process_lines(layout), write_configs(run, work)), environment)
    run_dir = work / "runs" / run_name
    if outcome.first is None:
        raise CommandError("stopped: run the same command again to do the missing runs", outcome.code)
    if outcome.code != 0:
        raise CommandError(f"{outcome.first} ended with code {outcome.code} before all steps were taken: see the logs in {run_dir}")
    writer = RecordWriter(folder.records)
    try:
        collect(run, run_dir, writer)
    finally:
        writer.close()
    shutil.rmtree(work)


def write_configs(run: PlannedRun, work: Path) -> dict[str, Path]:
    """Write each node's configuration, with the run's length as `trainer.max_steps`, and return the
    files by node.
    """
    files = {}
    for node in run.nodes:
        values = node.config.model_dump()
        values["trainer"]["max_steps"] = run.rounds
        files[node.name] = work / f"{node.name}.toml"
        config = NodeConfig(_env_prefix="NO_ENVIRONMENT_", **values)
        files[node.name].write_text(config_toml(config), encoding="utf-8")
    return files


def with_own_configs(lines: dict[str, str], files: dict[str, Path]) -> dict[str, str]:
    """The lines of `swarm up`, each with its node's configuration; the progress view gets the first
    node's.
    """
    first = next(iter(files.values()))
    told = {}
    for name, line in lines.items():
        file = files.get(name.rpartition("-")[0], first)
        told[name] = f"export {CONFIG_FILE_VARIABLE}={shlex.quote(str(file))}; {line}"
    return told


def _free_ports(nodes: int) -> tuple[int, int]:
    """A free port for the NATS server, and the first of a range of free ports for the nodes."""
    for base in range(21_000, 60_000, 100):
        if all(map(is_free, range(base, base + 1 + PORTS_PER_NODE * nodes))):
            return base, base + 1
    raise CommandError("no range of free ports was found between 21000 and 60000: stop the processes that have them")
