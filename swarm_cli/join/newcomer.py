"""A newcomer's node: its name and configuration, from the token, the join folder and the command's
options. Pure, except for reading the configuration file.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.config import NodeConfig, TaskSpec, load_config
from shared.text import visible
from swarm_cli.console import note
from swarm_cli.errors import CommandError
from swarm_cli.invitation.token import Invitation, task_specs
from swarm_cli.join.folder import JoinFolder
from swarm_cli.shipped import DEMO_CONFIG

_SUFFIX_CHARS = 6
_NAME_CHARS = 32
TOY_MARK = "base_policy.json"
"""A file in the folder of every policy that `swarm model init` built."""


def default_name(hostname: str, public_key: str) -> str:
    """A valid name that no two newcomers share: the host's name and the end of the node's key.

    >>> default_name("Ada's Laptop.local", "UABCDEFGH")
    'ada-s-laptop-cdefgh'
    """
    suffix = public_key[-_SUFFIX_CHARS:].lower()
    host = re.sub(r"[^a-z0-9]+", "-", hostname.partition(".")[0].lower()).strip("-") or "node"
    return f"{host[: _NAME_CHARS - len(suffix) - 1].rstrip('-')}-{suffix}"


def chosen_name(asked: str, invitation: Invitation, folder: JoinFolder, public_key: str) -> str:
    """The node's name. A key keeps one name for good: other nodes refuse it under a second one.

    Raises:
        CommandError: `asked` differs from the token's name or from the name used before.
    """
    given = invitation.credential.user if invitation.credential else ""
    if asked and given and asked != given:
        raise CommandError(f"the token is for a node called {given}: omit --name, or ask for a token for {asked}")
    known, wanted = folder.known_name(), given or asked
    if known and wanted and known != wanted:
        raise CommandError(
            f"this machine joined {invitation.swarm_id} as {known}, and other nodes know its key by that name: omit --name, or "
            f"move {folder.path} away to join as {wanted} with a new key"
        )
    return wanted or known or default_name(socket.gethostname(), public_key)


def task_entries(asked: str, invitation: Invitation) -> list[dict[str, Any]]:
    """The `[[tasks]]` for the names in `asked`, as the token offers them or else with the dataset's
    default settings; all of the token's if `asked` is empty.
    """
    offered: list[dict[str, Any]] = task_specs(invitation)
    if not asked:
        return offered
    names = [name.strip() for name in asked.split(",") if name.strip()]
    return [entry for name in names for entry in [e for e in offered if e["dataset"] == name] or [{"dataset": name}]]


def kept_tasks(offered: list[dict[str, Any]], known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tasks that a node joined with before, because a later token does not decide what it
    trains on; `offered` if it has not joined yet. Says what the token offers instead.
    """
    if not known:
        return offered
    if _sources(known) != _sources(offered):
        names = ",".join(dict.fromkeys(entry["dataset"] for entry in offered))
        kept = ", ".join(dict.fromkeys(visible(str(entry.get("dataset") or entry.get("path")), 80) for entry in known))
        note(f"this node keeps the tasks that it joined with ({kept}); the token offers others: to take them, add --tasks {names}")
    return known


def _sources(entries: list[dict[str, Any]]) -> list[tuple[str, str, float, str]]:
    """What the tasks depend on, and how often they are drawn; empty if they are not valid, which is
    told where they are used.
    """
    try:
        specs = [TaskSpec.model_validate(entry) for entry in entries]
    except ValueError:
        return []
    return sorted((spec.dataset or spec.path, spec.canonical_config, spec.weight, spec.verifier) for spec in specs)


def base_config(config: Path | None, model: str) -> Path | None:
    """The file that the node's configuration is based on: the one given; the demo's for the toy
    policy, because its learning rate and lengths suit no other; None, the defaults, for any other
    model.
    """
    if config is not None:
        return config
    return DEMO_CONFIG if not model or (Path(model) / TOY_MARK).is_file() else None


def node_settings(
    invitation: Invitation, folder: JoinFolder, name: str, *, model: str, revision: str, tasks: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The settings that joining decides; they override the base configuration. `tasks` empty: the
    base configuration's are kept.
    """
    nats: dict[str, Any] = {
        "swarm_url": invitation.url,
        "swarm_id": invitation.swarm_id,
        # The node may make streams on its own server; the swarm's are only made if missing.
        "create_streams": True,
        # A key that the configuration file names is for another server and must not be used with
        # this one.
        "swarm_key_file": "",
        "swarm_ca_file": "",
    }
    if invitation.url.startswith("tls://"):
        nats["swarm_key_file"] = str(folder.hub_key_file)
        nats["swarm_ca_file"] = str(folder.authority_file) if invitation.authority else ""
    settings: dict[str, Any] = {
        "node": {"id": name, "run": run_name(invitation.swarm_id)},
        "nats": nats,
        "verifier": {"signing_key_file": str(folder.signing_key_file)},
    }
    if invitation.roster or folder.roster_file.exists():  # a token without a roster must not remove an earlier one
        settings["verifier"] |= {"trust": "roster", "roster_file": str(folder.roster_file)}
    if model:
        settings["model"] = {"path": model, "revision": revision}
    if tasks:
        settings["tasks"] = list(tasks)
    return settings


def run_name(swarm_id: str) -> str:
    """The run that holds a joined node's files."""
    return f"join-{swarm_id}"[:64]


def first_look(config: Path | None, tasks: Sequence[dict[str, Any]]) -> NodeConfig:
    """The configuration before the folder and the name are known; it says where files go."""
    return load_config(config, {"tasks": list(tasks)} if tasks else None)
