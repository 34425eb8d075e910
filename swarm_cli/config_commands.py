"""`swarm config show` and `swarm config check`."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from shared.config import ConfigError, NodeConfig
from shared.config.load import SECTIONS, Location
from shared.config.node import sound_values
from shared.config.section import sources_message
from shared.identity.keys import KeyFileError, load
from shared.identity.roster import RosterError, read_roster
from shared.plain_files import read_named
from shared.registry import ignored_entries
from shared.roles import ROLES
from shared.runtime.exits import EXIT_CONFIG
from shared.runtime.planes import for_process
from shared.transport.base import Transport, TransportError
from shared.transport.nats.credentials import MAX_KEY_BYTES, authority_context
from swarm_cli.chosen_config import ConfigOption, chosen_file, load_chosen, sources
from swarm_cli.config_checks import entry_problems, folder_problems, objective_problem
from swarm_cli.console import count, say
from swarm_cli.errors import CommandError
from swarm_cli.local.base_model import TOY_POLICY, is_toy, toy_problem, toy_to_be_built
from swarm_cli.local.procfile import is_free
from swarm_cli.model.facts import read_facts
from swarm_cli.risky_settings import (
    left_out_rows,
    risky_settings,
    risky_with_model,
    sent_keys,
    sharing_warnings,
    toys_settings,
    unlike_its_source,
)
from swarm_cli.task_probe import IN_SETS, SMALLER, begin_deriving
from swarm_cli.toml_view import BASIC, config_toml, left_out

config_app = typer.Typer(name="config", help="Show or check a node's configuration.", no_args_is_help=True)


@config_app.command()
def show(
    config: ConfigOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Every setting, not only basic and changed ones.")] = False,
) -> None:
    """Print the basic settings and those that differ from their default, with their descriptions,
    as TOML. Of a file with mistakes the defaults are printed in their place, and then the mistakes.
    """
    chosen, faults, *_ = _sound_values(config)
    rest = "" if everything else f"\n# and {left_out(chosen, BASIC)} settings that most users leave unchanged: --all prints them"
    typer.echo(f"# {sources(config)}{rest}\n{config_toml(chosen, None if everything else BASIC)}", nl=False)
    if faults:
        raise CommandError(faults, EXIT_CONFIG)


@config_app.command()
def check(
    config: ConfigOption = None,
    connect: Annotated[bool, typer.Option("--connect", help="Also check that the servers answer and the ports are free.")] = False,
) -> None:
    """Check the values and the model, derive one task from each source, try its reward in the
    sandbox, and look for the key files.

    Warnings name settings likely to ruin the run. Mistakes are reported together, apart from those
    that can be seen only once another is mended.
    """
    node_config, faults, removed, places = _sound_values(config)
    faulty = {location[0] for location in removed}
    toy = toy_to_be_built(node_config)
    # Two processes work while this one does the rest; the model's takes the longest. Where a fault
    # may have hidden which model was meant, none is looked at.
    known = not removed or "path" in node_config.model.model_fields_set
    model_facts = read_facts(node_config.model) if known and not toy else None
    # Files are read and a task is derived, as some of reasoning-gym's settings fail only then.
    held_out = 0 if faulty - _NO_SHARES else node_config.eval.tasks
    deriving = begin_deriving(
        node_config.tasks, held_out, SMALLER, places, sets=node_config.eval.sets, scoring=node_config.verifier
    )
    untaught = "" if faulty & {"model", "tasks"} else toy_problem(node_config)
    tasks = deriving()
    problems = [
        *filter(None, ["" if "trainer" in faulty else objective_problem(node_config)]),
        *([sources_message(tasks.problems)] if tasks.problems else []),
        *([untaught] if untaught else []),
        *entry_problems(node_config),
        *([] if "node" in faulty else [*folder_problems(node_config), *key_file_problems(node_config)]),
        *tracker_problems(node_config),
    ]
    warnings = [
        *ignored_entries(node_config.entries()),
        *risky_settings(node_config),
        *toys_settings(node_config, toy=is_toy(node_config.model.path)),
        *left_out_rows(tasks.files),
        *sharing_warnings(node_config, tasks),
        *tasks.reward_warnings,
        *([f"{count(tasks.rows_in_sets, 'row')} to train on {IN_SETS}"] if tasks.rows_in_sets else []),
    ]
    if model_facts:
        facts = model_facts()
        problems += facts.problems
        if not problems:
            warnings += risky_with_model(node_config, *facts[1:])
    if faults:
        # Warnings would be about defaults where the file has faults.
        raise CommandError("\n".join([faults, *problems]), EXIT_CONFIG)
    if connect:
        problems += asyncio.run(unreachable(node_config))
    _advise(node_config, warnings, toy and not untaught)
    if problems:
        raise CommandError("\n".join(["the configuration cannot be used:", *problems]), EXIT_CONFIG)
    for line in tasks.rewards:
        say(f"reward: {line}")
    beside = f", {count(len(warnings), 'warning')}" if warnings else ""
    say(f"OK: {count(len(node_config.tasks), 'task source')}, model {node_config.model.path}{beside}")


_NO_SHARES = frozenset(SECTIONS) - {"eval", "tasks"}
"""Faults in these sections do not change how many rows of a file are held out."""


def _sound_values(config: Path | None) -> tuple[NodeConfig, str, frozenset[Location], tuple[int, ...]]:
    """The configuration; or the values without fault, the message about the faults, what was
    removed for them, and the places of the task sources that are left.
    """
    try:
        return load_chosen(config, NodeConfig), "", frozenset(), ()
    except ConfigError as error:
        if (sound := sound_values(chosen_file(config), error)) is None:
            raise
        return sound.config, str(error), sound.removed, sound.places


def _advise(config: NodeConfig, warnings: Sequence[str], toy: bool) -> None:
    for sentence in [*unlike_its_source(config), *sent_keys(config)]:
        say(f"note: {sentence}")
    if toy:
        say(f"note: {TOY_POLICY} does not exist yet: `swarm up` builds it when it first starts; `swarm model init` builds it now")
    for sentence in warnings:
        say(f"warning: {sentence}")


def tracker_problems(config: NodeConfig) -> list[str]:
    """A sentence for each tracker whose package is missing, as the trainer would report it."""
    from services.trainer.tracking.base import tracking_problems

    return tracking_problems(config)


_CREDENTIALS = b"-----BEGIN NATS USER JWT-----"


def key_file_problems(config: NodeConfig) -> list[str]:
    """A sentence for each file that cannot be used, with the setting's name and the remedy."""
    return list(dict.fromkeys(_problems(config)))


def _problems(config: NodeConfig) -> Iterator[str]:
    """Check every file that this configuration uses, but none of a plane or engine that it does not
    use.
    """
    nats, verifier = config.nats, config.verifier
    if nats.node_key_file:
        for role in ROLES:
            yield from _checked("nats.node_key_file", for_process(nats.node_key_file, config.node.id, role), _nats_key)
    if nats.swarm_key_file and nats.swarm_url is not None:
        yield from _checked("nats.swarm_key_file", for_process(nats.swarm_key_file, config.node.id, "verifier"), _nats_key)
    for setting, file in (("nats.node_ca_file", nats.node_ca_file), ("nats.swarm_ca_file", nats.swarm_ca_file)):
        yield from _checked(setting, file, _authority)
    yield from _checked("verifier.signing_key_file", verifier.signing_key_file, _signing_key)
    if verifier.trust == "roster":
        yield from _checked("verifier.roster_file", str(verifier.roster_file), _roster)


def _checked(setting: str, file: str, look: Callable[[Path], str | None]) -> Iterator[str]:
    """Return what `look` finds wrong with a setting's file, or why the file cannot be read."""
    if not file:
        return
    path = Path(file)
    try:
        problem = look(path)
    except FileNotFoundError:
        problem = f"{file} does not exist: correct the path"
    except OSError as error:
        problem = f"{file} cannot be read ({error.strerror or error}): correct the path, or give this user access to it"
    if problem:
        yield f"{setting}: {problem}"


def _nats_key(path: Path) -> str | None:
    """An nkey seed of a user, or a .creds file."""
    if problem := _open_to_others(path):
        return problem
    content = read_named(path, MAX_KEY_BYTES).strip()
    if content.startswith(_CREDENTIALS):
        return None
    if content.startswith(b"U"):
        return f"{path} holds a public key: give the file with the seed, which begins with SU"
    return _seed(path)


def _signing_key(path: Path) -> str | None:
    return _seed(path)


def _seed(path: Path) -> str | None:
    content = read_named(path, MAX_KEY_BYTES).strip()
    try:
        load(path)
    except KeyFileError as error:
        return str(error)
    if not content.startswith(b"SU"):
        return f"{path} holds a seed, but not a user's, which begins with SU: make one with `swarm keys new`"
    return None


def _authority(path: Path) -> str | None:
    try:
        authority_context(str(path))
    except ssl.SSLError:
        return f"{path} is not a PEM certificate: give the authority's, which begins with -----BEGIN CERTIFICATE-----"
    return None


def _roster(path: Path) -> str | None:
    try:
        read_roster(path)
    except RosterError as error:
        return str(error)
    return None


def _open_to_others(path: Path) -> str | None:
    """Require, like ssh, that only its owner can read a user's secret."""
    state = path.stat()
    if state.st_uid == os.geteuid() and state.st_mode & 0o077:
        return f"{path} is readable by others: run `chmod 600 {path}`"
    return None


CONNECT_S = 5.0


async def unreachable(config: NodeConfig) -> list[str]:
    """A sentence for each server that does not answer or refuses the connection, and for each port
    that is taken.
    """
    from shared.runtime.planes import connect_node_plane, connect_swarm_plane

    problems = []
    for role in ROLES if config.nats.node_key_file else ROLES[:1]:
        try:
            await _closed(await connect_node_plane(config, role, timeout_s=CONNECT_S))
        except TransportError as error:
            problems.append(f"nats.node_url ({role}): {error}")
    if config.nats.swarm_url is not None:
        try:
            await _closed(await connect_swarm_plane(config, "verifier", timeout_s=CONNECT_S))
        except TransportError as error:
            problems.append(f"nats.swarm_url: {error}")
    if config.generator.engine == "openai":
        problems += await _openai_problems(config)
    return problems + [
        f"http.base_port: port {port}, needed for the {role}, is taken: stop the process that has it, or choose another port"
        for role in ROLES
        if (port := config.http_port(role)) and not is_free(port, config.http.host)
    ]


async def _closed(transport: Transport) -> None:
    with suppress(TransportError):
        await transport.close()


async def _openai_problems(config: NodeConfig) -> list[str]:
    """Return what keeps the server from listing its models to a client with the configured key."""
    from shared.openai_server import OpenAiRequests, ServerError, server_key
    from shared.runtime.exits import FatalError

    generator, setting = config.generator, "generator.openai_url"
    try:
        key = server_key(generator.openai_key_variable, "generator.openai_key_variable")
        server = OpenAiRequests(generator.openai_url, key, CONNECT_S, max_connections=1, setting=setting, relief="see why it is")
        try:
            await server.ask("GET", "/models")
        finally:
            await server.close()
    except (ServerError, FatalError) as error:
        return [f"{setting}: {error}"]
    return []
