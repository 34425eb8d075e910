"""The options that `swarm up --run RUN` takes over from the run's last start, which the run's note
records, if they are not given again.
"""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path

from shared.config import NodeConfig
from shared.config.load import CONFIG_FILE_VARIABLE
from shared.text import visible
from swarm_cli.chosen_config import load_chosen
from swarm_cli.errors import CommandError
from swarm_cli.local.procfile import MAX_NODES, Layout
from swarm_cli.runs import Given, as_options, in_a_run, is_own, options_in, read_note


def resume_options(given: Given, run: str) -> tuple[Given, list[str]]:
    """`given`, completed with the options of the run's earlier start that are missing now; and a
    list of the options added. An earlier option that contradicts a given one is left out.

    Raises:
        CommandError: the earlier start's configuration lies in a run's folder, or is a relative
            path, as earlier versions noted it; or the run was copied here, and its note names a
            configuration, a server, or more nodes than start by default; or it was started in
            another folder, from which its configuration names files.
    """
    folder = load_chosen(given.config).node.var_dir / "runs" / run
    note = read_note(folder) if run else None
    if note is None:
        return given, []
    before = options_in(note.goes_on)
    if given.nodes or given.names or _count(before) > MAX_NODES:
        before = replace(before, nodes=None, names=())
    if given.config or os.environ.get(CONFIG_FILE_VARIABLE):
        before = replace(before, config=None)
    if before.config and in_a_run(before.config, folder):
        raise CommandError(
            f"run {run} was last started with the configuration {visible(str(before.config), 200)}, which lies in a run's folder, "
            "so whoever made that run may have written it: read it, and give it with --config, or give your own"
        )
    if given.nats_url or given.nats_port:
        before = replace(before, nats_url="", nats_port=None)
    if (before.config or before.nats_url) and not is_own(folder):
        raise CommandError(_named_elsewhere(run, before))
    if before.config and not before.config.is_absolute():
        raise CommandError(
            f"run {run} was last started with the configuration {visible(str(before.config), 200)}, and its note does not say in "
            "which folder: give the file with --config"
        )
    if _count(before) > Layout().nodes and not is_own(folder):
        raise CommandError(_many_elsewhere(run, before))
    added = {field.name: getattr(before, field.name) for field in fields(Given) if not getattr(given, field.name)}
    goes_on = replace(given, **added)
    if note.started_in and is_own(folder):
        _refuse_other_files(run, Path(note.started_in), load_chosen(goes_on.config))
    return goes_on, list(as_options(Given(**added)))


def _refuse_other_files(run: str, started_in: Path, config: NodeConfig) -> None:
    """Raises CommandError if the run was started in another folder, in which its model or a file of
    tasks lies that the configuration names relative to it: here it would be another, or be built
    anew.
    """
    files = [config.model.path, *(spec.path for spec in config.tasks if spec.source == "file")]
    for path in map(Path, files):
        there = started_in / path
        if there.exists() and not (path.exists() and path.samefile(there)):
            raise CommandError(
                f"run {run} was started in {visible(str(started_in), 400)}, and its configuration names {visible(str(path), 200)} "
                "relative to that folder: start it there, or name the whole path in the configuration"
            )


def _count(given: Given) -> int:
    return max(given.nodes or 0, len(given.names))


def _many_elsewhere(run: str, before: Given) -> str:
    named = visible(" ".join(as_options(Given(before.nodes, before.names))), 400)
    return (
        f"the files of run {run} were copied here or changed since its last start, so its note may be somebody else's; it names "
        f"more nodes than start by default: {named}. If so many are to start, give that again, else give your own --nodes"
    )


def _named_elsewhere(run: str, before: Given) -> str:
    named = visible(" ".join(as_options(Given(config=before.config, nats_url=before.nats_url))), 400)
    server = "; --nats-port starts a server here instead" if before.nats_url else ""
    return (
        f"the files of run {run} were copied here or changed since its last start, so its note may be somebody else's; it names "
        f"what the run would read or connect to: {named}. If you trust that, give it again, else give your own{server}"
    )
