"""What the Dockerfile says of the images, read without building them: environment, command, files
of the project.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path

TITLE = "org.opencontainers.image.title"
BASE_PATH = "/usr/bin:/bin"
"""What the base image has for PATH, as far as this machine can stand in for it."""


@dataclass(frozen=True)
class Stage:
    """One stage, with what it inherits. `copies`: source (in the build context, or `STAGE:path`)
    and target, in order.
    """

    name: str
    scratch: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    copies: tuple[tuple[str, str], ...] = ()
    removed: tuple[str, ...] = ()
    workdir: str = "/"
    user: str = "0"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


def read_stages(dockerfile: Path) -> dict[str, Stage]:
    """Stages by name. Knows the instructions that the project's file uses; another one is an
    error.
    """
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for instruction, rest in _instructions(dockerfile.read_text()):
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = replace(stages[base], name=name) if base in stages else Stage(name, scratch=base == "scratch")
        elif instruction == "ARG" and stage is None:
            continue
        else:
            assert stage is not None, f"{instruction} before the first FROM"
            stage = _after(stage, instruction, rest)
        if stage is not None:
            stages[stage.name] = stage
    return stages


def by_image(stages: dict[str, Stage]) -> dict[str, Stage]:
    """The stages that are images, by the title on their label."""
    return {stage.labels[TITLE]: stage for stage in stages.values() if TITLE in stage.labels}


def image_name(reference: str) -> str:
    """`swarm-nats` of `registry/group/swarm-nats:0.1.0@sha256:...`."""
    return re.split(r"[:@]", reference.rpartition("/")[2])[0]


def _instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found = []
    for line in joined.splitlines():
        instruction, _, rest = line.strip().partition(" ")
        found.append((instruction.upper(), rest.strip()))
    return found


def _after(stage: Stage, instruction: str, rest: str) -> Stage:
    if instruction == "ENV":
        return replace(stage, environment={**stage.environment, **_pairs(rest, stage.environment)})
    if instruction == "LABEL":
        return replace(stage, labels={**stage.labels, **_pairs(rest, {})})
    if instruction == "COPY":
        words = shlex.split(rest)
        source_stage = next((word.removeprefix("--from=") + ":" for word in words if word.startswith("--from=")), "")
        *sources, target = [word for word in words if not word.startswith("--")]
        return replace(stage, copies=(*stage.copies, *((source_stage + source, target) for source in sources)))
    if instruction == "RUN":
        return replace(stage, removed=(*stage.removed, *re.findall(r"\brm -r (\S+)", rest)))
    if instruction == "WORKDIR":
        return replace(stage, workdir=rest)
    if instruction == "USER":
        return replace(stage, user=rest)
    if instruction == "ENTRYPOINT":
        return replace(stage, entrypoint=tuple(json.loads(rest)))
    if instruction == "CMD":
        return replace(stage, command=tuple(json.loads(rest)))
    assert instruction in {"ARG", "EXPOSE", "HEALTHCHECK"}, (
        f"the Dockerfile has an instruction that this does not know: {instruction}"
    )
    return stage


def _pairs(text: str, known: dict[str, str]) -> dict[str, str]:
    pairs = dict(word.split("=", 1) for word in shlex.split(text))
    return {
        name: re.sub(r"\$\{?(\w+)\}?", lambda match: known.get(match[1], "/usr/bin:/bin"), value) for name, value in pairs.items()
    }
