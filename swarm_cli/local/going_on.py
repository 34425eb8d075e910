"""The options that `swarm up --run RUN` takes over from the run's last start, which the run's note
records, if they are not given again.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from shared.config.environment import CONFIG_FILE_VARIABLE
from shared.text import visible
from swarm_cli.chosen_config import load_chosen
from swarm_cli.errors import CommandError
from swarm_cli.running import read_note


@dataclass(frozen=True, slots=True)
class Given:
    """Options of `swarm up` that say which nodes run where; None or empty if not given."""

    nodes: int | None = None
    names: tuple[str, ...] = ()
    config: Path | None = None
    nats_port: int | None = None
    nats_url: str = ""
    base_port: int | None = None


def going_on(given: Given, run: str) -> tuple[Given, list[str]]:
    """`given`, completed with the options of the run's earlier start that are missing now; and a
    list of the options added. An earlier option that contradicts a given one is left out.

    Raises:
        CommandError: the earlier start's configuration lies in a run's folder.
    """
    runs = load_chosen(given.config).node.var_dir / "runs"
    note = read_note(runs / run) if run else None
    if note is None:
        return given, []
    before = options_in(note.goes_on)
    if given.nodes or given.names:
        before = replace(before, nodes=None, names=())
    if given.config or os.environ.get(CONFIG_FILE_VARIABLE):
        before = replace(before, config=None)
    if before.config:
        _refuse_from_a_run(before.config, runs, run)
    if given.nats_url or given.nats_port:
        before = replace(before, nats_url="", nats_port=None)
    added = {field.name: getattr(before, field.name) for field in fields(Given) if not getattr(given, field.name)}
    return replace(given, **added), list(_as_options(Given(**added)))


def _refuse_from_a_run(config: Path, runs: Path, run: str) -> None:
    """Raises CommandError if `config` lies in a run's folder. Whoever made that run may have
    written it, and a configuration says where keys are sent; the note beside it is no reason to
    use it.
    """
    places = [(Path(os.path.abspath(config)), Path(os.path.abspath(runs))), (config.resolve(), runs.resolve())]
    if any(file.is_relative_to(folder) for file, folder in [*places, (config.resolve(), (runs / run).resolve())]):
        raise CommandError(
            f"run {run} was last started with the configuration {visible(str(config), 200)}, which lies in a run's folder, "
            "so whoever made that run may have written it: read it, and give it with --config, or give your own"
        )


def options_in(command: str) -> Given:
    """The options in a note's `swarm up` command; none if it is another command."""
    try:
        words = shlex.split(command)
    except ValueError:  # an unclosed quote, which `swarm up` never writes
        words = []
    if words[:3] != ["swarm", "up", "--run"]:
        return Given()
    pairs = list(zip(words[4::2], words[5::2], strict=False))
    said = dict(pairs)
    return Given(
        _number(said.get("--nodes")),
        tuple(value for option, value in pairs if option == "--name"),
        Path(said["--config"]) if "--config" in said else None,
        _number(said.get("--nats-port")),
        said.get("--nats-url", ""),
        _number(said.get("--base-port")),
    )


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _as_options(given: Given) -> Iterator[str]:
    for field in fields(Given):
        value = getattr(given, field.name)
        option = "--name" if field.name == "names" else "--" + field.name.replace("_", "-")
        for each in value if isinstance(value, tuple) else [value] if value else []:
            yield f"{option} {shlex.quote(str(each))}"
