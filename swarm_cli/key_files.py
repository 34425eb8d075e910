"""Checks that the key, certificate and roster files of a configuration exist and hold what their
settings say. Their contents are never shown.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

from shared.config import NodeConfig
from shared.identity.keys import KeyFileError, load
from shared.identity.roster import RosterError, read_roster
from shared.os_words import in_words
from shared.plain_files import read_named
from shared.roles import ROLES
from shared.runtime.planes import for_process
from shared.transport.nats.credentials import MAX_KEY_BYTES, authority_context

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
    if config.generator.engine == "openai":
        yield from _checked("generator.openai_key_file", config.generator.openai_key_file, _server_key)
    if verifier.trust == "roster":
        yield from _checked("verifier.roster_file", str(verifier.roster_file), _roster)


def _checked(setting: str, file: str, look: Callable[[Path], str | None]) -> Iterator[str]:
    """What `look` finds wrong with a setting's file, or why the file cannot be read."""
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


def _server_key(path: Path) -> str | None:
    if problem := _open_to_others(path):
        return problem
    from services.generator.server_key import MAX_BYTES, key_problem

    try:
        return key_problem(str(path), read_named(path, MAX_BYTES).decode().strip())
    except UnicodeDecodeError as error:
        return f"{path} holds no key ({in_words(error)}): give the file with the server's key"


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
