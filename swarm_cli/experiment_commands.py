"""`swarm experiment`."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lab.arms import PlannedRun, plan_run
from lab.records import RecordWriter
from lab.resolved import resolved_settings
from lab.runs import RunFolder
from lab.services_records import check_services_run, collect
from lab.spec import Spec
from shared.config import NodeConfig
from shared.config.environment import CONFIG_FILE_VARIABLE, ENV_PREFIX
from shared.os_words import in_words
from shared.runtime.errors import FatalError
from swarm_cli.console import note, say
from swarm_cli.errors import CommandError
from swarm_cli.local.launch import STOPPED_BY_SIGNAL, run_lines
from swarm_cli.local.ports import is_free
from swarm_cli.local.procfile import PORTS_PER_NODE, Layout, node_name, process_lines
from swarm_cli.toml_view import config_toml

if TYPE_CHECKING:
    from lab.check import ModelProblem
    from lab.floors import Floor
    from lab.spec import Spec


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
    if outcome.code in STOPPED_BY_SIGNAL:
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


experiment_app = typer.Typer(name="experiment", help="Run experiments and report on their records.", no_args_is_help=True)

RESULTS = Path("experiments/results")


@experiment_app.command()
def run(
    spec_file: Annotated[Path, typer.Argument(help="The experiment's TOML file.", metavar="SPEC")],
    out: Annotated[Path | None, typer.Option(help="Folder for the records.  [default: experiments/results/NAME]")] = None,
    arms: Annotated[str | None, typer.Option(help="Only these arms, separated by commas.")] = None,
    seeds: Annotated[str | None, typer.Option(help="These seeds instead of the spec's, separated by commas.")] = None,
    driver: Annotated[str, typer.Option(help="simulate: in one process; services: the real services over NATS.")] = "simulate",
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Concurrent runs, one process each (simulate).")] = 1,
    threads: Annotated[int, typer.Option(min=1, max=256, help="CPU threads per run (simulate).")] = 1,
) -> None:
    """Run an experiment. Complete runs are skipped; an interrupted run starts over."""
    from lab.check import check_spec
    from lab.floors import read_floors
    from lab.floors_table import out_lines
    from lab.jobs import make_runs
    from lab.runs import holds_manifest, runs_to_make, write_manifest
    from lab.spec import SpecError, load_spec

    chosen = _driver(driver)
    try:
        spec = load_spec(spec_file)
        folder = out or RESULTS / spec.name
        check_spec(spec, _model_problem(chosen))
        todo = runs_to_make(spec, folder, _names(arms), _numbers(seeds))
        if holds_manifest(folder, spec, chosen) and not todo:
            # The manifest says what code made the runs: a command that makes none leaves it alone.
            note(f"no runs to make: those in {folder} are complete; to make them again, give another --out")
            typer.echo(str(folder))
            return
        write_manifest(folder, spec, chosen)
        if todo:
            floors = read_floors(folder)
            if floors is None:
                note("first, measuring the pass rate of answers without skill on each dataset")
                floors = _screened(spec, folder)
            for line in out_lines(floors):
                note(line)
        note(f"{len(todo)} runs to make in {folder}")
        if chosen == "simulate":
            make_runs(spec, todo, jobs, note, threads)
        else:
            from swarm_cli.experiment_commands import make_services_runs

            make_services_runs(spec, todo)
    except (SpecError, FatalError, ValueError) as error:
        raise CommandError(str(error)) from None
    typer.echo(str(folder))


@experiment_app.command()
def screen(
    spec_file: Annotated[Path, typer.Argument(help="The experiment's TOML file.", metavar="SPEC")],
    out: Annotated[Path | None, typer.Option(help="Folder of the records.  [default: experiments/results/NAME]")] = None,
    questions: Annotated[
        int, typer.Option(min=10, max=10_000, help="Questions per dataset, and as many again to choose the constant.")
    ] = 200,
) -> None:
    """Print the pass rate of answers without skill on each dataset: a constant, a copy from the
    question. Exits with code 1 if a constant passes a tenth.

    `experiment run` does this automatically; use this command to choose datasets.
    """
    from lab.check import check_datasets
    from lab.spec import SpecError, load_spec

    try:
        spec = load_spec(spec_file)
        check_datasets(spec)
        floors = _screened(spec, out or RESULTS / spec.name, questions)
    except SpecError as error:
        raise CommandError(str(error)) from None
    from lab.floors_table import floors_table

    typer.echo(floors_table(floors))
    if any(floor.out for floor in floors):
        raise typer.Exit(1)


@experiment_app.command()
def report(
    results: Annotated[Path, typer.Argument(help="Folder written by `experiment run`.", metavar="DIR")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for tables and plots.  [default: DIR/report; for a part of the results DIR/report-part]"),
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(metavar="DATASET", help="Exclude this dataset, as if a constant passed it. Repeatable.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Only runs with these seeds, separated by commas.")] = None,
) -> None:
    """Make tables (Markdown, JSON) and plots (PNG) from the raw records, and print the
    comparisons.
    """
    from lab.report import Part, write_report
    from lab.spec import SpecError

    part = Part(without=without or (), seeds=_numbers(seeds) or ())
    if seeds is not None and not part.seeds:
        raise CommandError("--seeds is empty: give seeds, or omit it to use all")
    try:
        written = write_report(results, out or results / ("report-part" if part else "report"), part)
    except (SpecError, ValueError) as error:
        raise CommandError(str(error)) from None
    say(written.findings)
    for file in written.files:
        typer.echo(str(file))


@experiment_app.command()
def model(
    spec_file: Annotated[Path, typer.Argument(help="Build spec of a base policy, experiments/models/*.toml.", metavar="SPEC")],
    out: Annotated[Path | None, typer.Option(help="Folder to write.  [default: the spec's path without .toml]")] = None,
) -> None:
    """Build a base policy for experiments, unless it exists already."""
    from lab.base_models import build_experiment_base

    try:
        folder = build_experiment_base(spec_file, out or spec_file.with_suffix(""))
    except ValueError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        remedy = f"{error.filename} cannot be used ({in_words(error)}): correct the path or its permissions"
        raise CommandError(remedy if error.filename else str(error)) from None
    typer.echo(str(folder))


def _screened(spec: Spec, folder: Path, questions: int | None = None) -> list[Floor]:
    from lab.floors import QUESTIONS, scorers, screen, sources_of, write_floors

    sources = sources_of([group.tasks or arm.tasks for arm in spec.arms.values() for group in arm.nodes])

    async def screened() -> list[Floor]:
        async with scorers(sources) as pool:
            return await screen(pool, sources, questions or QUESTIONS)

    floors = asyncio.run(screened())
    write_floors(folder, floors)
    return floors


def _driver(name: str) -> Literal["simulate", "services"]:
    if name == "simulate" or name == "services":
        return name  # type: ignore[return-value]
    raise CommandError(f"no driver is called {name!r}: use simulate or services")


def _model_problem(driver: Literal["simulate", "services"]) -> ModelProblem:
    from lab.check import simulated_model_problem
    from swarm_cli.local.base_model import model_problem

    if driver == "simulate":
        return simulated_model_problem
    return lambda model: model_problem(model.path, model.revision)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(number) for number in text.split(",") if number.strip()]
    except ValueError:
        raise CommandError(f"--seeds {text}: give whole numbers, separated by commas") from None
