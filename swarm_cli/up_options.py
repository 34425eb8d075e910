"""The options of the `swarm up` command that a run's note records."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from shared.text import visible

_LONGEST = 4_000
_DIGITS = 5
"""Of a port; more nodes than that are none that `swarm up` can have started."""


@dataclass(frozen=True, slots=True)
class Given:
    """Options of `swarm up` that say which nodes run where; None or empty if not given."""

    nodes: int | None = None
    names: tuple[str, ...] = ()
    config: Path | None = None
    nats_port: int | None = None
    nats_url: str = ""
    base_port: int | None = None


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
    return int(text) if text and text.isdecimal() and len(text) <= _DIGITS else None


def as_options(given: Given) -> Iterator[str]:
    """The options as words for a shell, such as `--nodes 3`."""
    for field in fields(Given):
        value = getattr(given, field.name)
        option = "--name" if field.name == "names" else "--" + field.name.replace("_", "-")
        for each in value if isinstance(value, tuple) else [value] if value else []:
            yield f"{option} {shlex.quote(str(each))}"


def continues(command: str, folder: Path) -> bool:
    """Whether `command`, from the note of the run in `folder`, is as `swarm up` writes it for this
    run, and nothing else: it is shown to be copied into a shell, and the note may be somebody
    else's. From another folder a relative configuration, as earlier versions noted it, would be
    another file.
    """
    if len(command) > _LONGEST or visible(command) != command:
        return False
    options = options_in(command)
    if options.config and (not options.config.is_absolute() or in_a_run(options.config, folder)):
        return False
    words = ["swarm", "up", "--run", folder.name, *shlex.split(" ".join(as_options(options)))]
    return command == shlex.join(words)


def stays_here(command: str) -> bool:
    """Whether `command` names neither a configuration nor a server."""
    options = options_in(command)
    return not options.config and not options.nats_url


def in_a_run(config: Path, folder: Path) -> bool:
    """Whether `config` lies in a run's folder beside or in `folder`, before or after links are
    followed. Whoever made that run may have written it, and a configuration says where keys are
    sent.
    """
    places = [(Path(os.path.abspath(config)), Path(os.path.abspath(folder.parent))), (config.resolve(), folder.parent.resolve())]
    return any(file.is_relative_to(place) for file, place in [*places, (config.resolve(), folder.resolve())])
