"""`swarm experiment`: measure sharing with a user's own node, simulate an experiment's spec, report
on its records, and build its base models.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shared.runtime.exits import FatalError
from shared.text import error_text
from swarm_cli.console import note, say
from swarm_cli.errors import CommandError
from swarm_cli.sharing_experiment import sharing

if TYPE_CHECKING:
    from lab.floors import Floor
    from lab.spec import Spec


experiment_app = typer.Typer(name="experiment", help="Run experiments and report on their records.", no_args_is_help=True)

RESULTS = Path("experiments/results")
REPOSITORY = Path(__file__).resolve().parents[1]


experiment_app.command()(sharing)


@experiment_app.callback()
def experiment(context: typer.Context) -> None:
    """Run experiments and report on their records."""
    if context.invoked_subcommand == "sharing":
        return
    if not (REPOSITORY / "lab" / "__init__.py").is_file():
        raise CommandError(
            "the simulator is not part of the installed package: run experiments in a clone of the repository, "
            "after `pip install -e .` there"
        )
    if str(REPOSITORY) not in sys.path:
        sys.path.append(str(REPOSITORY))


@experiment_app.command()
def run(
    spec_file: Annotated[Path, typer.Argument(help="The experiment's TOML file.", metavar="SPEC")],
    out: Annotated[Path | None, typer.Option(help="Folder for the records.  [default: experiments/results/NAME]")] = None,
    arms: Annotated[str | None, typer.Option(help="Only these arms, separated by commas.")] = None,
    seeds: Annotated[str | None, typer.Option(help="These seeds instead of the spec's, separated by commas.")] = None,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Concurrent runs, one process each.")] = 1,
    threads: Annotated[int, typer.Option(min=1, max=256, help="CPU threads per run.")] = 1,
) -> None:
    """Simulate an experiment. Complete runs are skipped; an interrupted run starts over."""
    from lab.check import check_spec
    from lab.floors import out_lines, read_floors
    from lab.jobs import make_runs
    from lab.runs import holds_manifest, runs_to_make, write_manifest
    from lab.spec import SpecError, load_spec
    from swarm_cli.local.base_model import model_problem

    try:
        spec = load_spec(spec_file)
        folder = out or RESULTS / spec.name
        check_spec(spec, lambda model: model_problem(model.path, model.revision))
        todo = runs_to_make(spec, folder, _names(arms), _numbers(seeds))
        if holds_manifest(folder, spec) and not todo:
            # The manifest says what code made the runs: a command that makes none leaves it alone.
            note(f"no runs to make: those in {folder} are complete; to make them again, give another --out")
            typer.echo(str(folder))
            return
        write_manifest(folder, spec)
        if todo:
            floors = read_floors(folder)
            if floors is None:
                note("first, measuring the pass rate of answers without skill on each dataset")
                floors = _screened(spec, folder)
            for line in out_lines(floors):
                note(line)
        note(f"{len(todo)} runs to make in {folder}")
        make_runs(spec, todo, jobs, note, threads)
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
    from lab.floors import floors_table

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
        remedy = f"{error.filename} cannot be used ({error_text(error)}): correct the path or its permissions"
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


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(number) for number in text.split(",") if number.strip()]
    except ValueError:
        raise CommandError(f"--seeds {text}: give whole numbers, separated by commas") from None
