"""The roster: the names that a node admits, with their keys, as lines `name key [note]`; `#` starts
a comment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.atomic_files import replace_text
from shared.contracts.wire import is_node_name
from shared.identity.keys import is_public_key
from shared.plain_files import read_named
from shared.text import error_text

MAX_BYTES = 16 * 2**20


class RosterError(Exception):
    """The roster cannot be used; the message says where it is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class RosterEntry:
    """One admitted node."""

    name: str
    public_key: str
    note: str = ""


def parse_roster(text: str) -> dict[str, RosterEntry]:
    """The entries by name.

    Raises: RosterError: naming the first line that is wrong, or that repeats a name or a key.
    """
    entries: dict[str, RosterEntry] = {}
    keys: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split("#", 1)[0].split(None, 2)
        if not fields:
            continue
        problem = _problem(fields, entries, keys)
        if problem:
            raise RosterError(f"line {number}: {problem}: each line is `name key [note]`, see `swarm roster`")
        entry = RosterEntry(fields[0], fields[1], fields[2].strip() if len(fields) > 2 else "")
        entries[entry.name] = entry
        keys[entry.public_key] = entry.name
    return entries


def read_roster(path: Path) -> dict[str, RosterEntry]:
    """The entries in a file.

    Raises:
        RosterError: it is missing, cannot be read or is wrong.
    """
    try:
        return parse_roster(read_named(path, MAX_BYTES).decode())
    except FileNotFoundError:
        raise RosterError(f"roster {path} does not exist: create it with `swarm roster add NAME KEY`") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RosterError(f"roster {path} cannot be read ({error_text(error)}): correct the path or its rights") from None
    except RosterError as error:
        raise RosterError(f"roster {path}: {error}") from None


def write_roster(path: Path, entries: Mapping[str, RosterEntry]) -> None:
    """Replace the file atomically, so that no reader sees half of it. Comments are not kept."""
    lines = (f"{entry.name} {entry.public_key} {entry.note}".rstrip() for _, entry in sorted(entries.items()))
    replace_text(path, "".join(line + "\n" for line in lines), synced=True)


def _problem(fields: list[str], entries: Mapping[str, RosterEntry], keys: Mapping[str, str]) -> str | None:
    if len(fields) < 2:
        return f"{fields[0][:80]!r} has no key"
    name, public_key = fields[0], fields[1]
    if not is_node_name(name):
        return f"{name[:80]!r} is not a node name (lower-case letters, digits, hyphens; at most 32)"
    if not is_public_key(public_key):
        return f"{public_key[:80]!r} is not a public key (`swarm keys show` prints U...)"
    if name in entries:
        return f"{name} is listed twice"
    if public_key in keys:
        return f"{name} has the key of {keys[public_key]}"
    return None
