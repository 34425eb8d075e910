"""Checks that the policy's folder exists, and builds the toy policy that the demo starts from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shared.config import NodeConfig, TaskSpec
from shared.hub_models import pin_problem
from shared.runtime.exits import EXIT_CONFIG
from swarm_cli.console import note
from swarm_cli.errors import CommandError

TOY_POLICY = Path("models/base")
TOY_MARK = "base_policy.json"
"""A file in the folder of every policy that `swarm model init` built."""
_HUB_NAME = re.compile(r"^[\w.-]+/[\w.-]+$")


def model_problem(path: str, revision: str = "") -> str | None:
    """Describe what is wrong with a model's path, with the remedy; None for a model's folder and
    for a hub name at a commit.
    """
    folder = Path(path)
    if (folder / "config.json").is_file():
        weights = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
        return None if weights else f"model.path {path}: has config.json but no weights (*.safetensors): copy the whole folder"
    if folder.is_dir():
        return f"model.path {path}: the folder holds no config.json: give the folder that save_pretrained wrote"
    if is_hub_name(path):
        return pin_problem(path, revision)
    if folder == TOY_POLICY:
        return f"model.path {path}: no such folder: `swarm model init --out {path}` builds the toy policy there"
    return (
        f"model.path {path}: no such folder: check the spelling, or import a model with `swarm model import SOURCE {path}` "
        "(for that of config/smollm2.toml: `make run MODEL=smollm2`)"
    )


def is_hub_name(path: str) -> bool:
    """Check whether the path can only be a hub name, `owner/name`. `models/base` is not: it is a
    missing folder.
    """
    return bool(_HUB_NAME.match(path)) and not Path(path).parent.is_dir() and Path(path).parts[0] != TOY_POLICY.parts[0]


def ensure_toy_policy(config: NodeConfig) -> None:
    """Build the demo's policy if the configuration asks for it and it is missing.

    Raises:
        CommandError: the configuration names another model, and it is missing; or the toy policy
            cannot learn from the tasks.
    """
    if toy := toy_problem(config):
        raise CommandError(toy, exit_code=EXIT_CONFIG)
    if toy_to_be_built(config):
        note(
            f"{TOY_POLICY} does not exist yet: building the toy policy first, once. It takes minutes (two on a free core, ten and "
            "more on a busy one); how far it is, is shown"
        )
        build_toy_policy(TOY_POLICY, config.tasks, seed=None, steps=None)
    problem = model_problem(config.model.path, config.model.revision)
    if problem:
        raise CommandError(problem, exit_code=EXIT_CONFIG)


def is_toy(path: str) -> bool:
    """Check whether `model.path` is the demo's policy, or one that `swarm model init` built."""
    return Path(path) == TOY_POLICY or (Path(path) / TOY_MARK).is_file()


def toy_to_be_built(config: NodeConfig) -> bool:
    """Check whether `swarm up` will build the demo's policy: the configuration starts from it, and
    it does not exist yet.
    """
    return Path(config.model.path) == TOY_POLICY and not (TOY_POLICY / "config.json").exists()


def toy_problem(config: NodeConfig) -> str | None:
    """Why the toy policy that is to be built cannot be."""
    if not toy_to_be_built(config) or not (problem := _from_files(config.tasks)):
        return None
    return f"{problem}, or to the {TOY_POLICY} of a checkout (here it would have to be built)"


def _from_files(tasks: Sequence[TaskSpec]) -> str | None:
    """Why the toy policy cannot learn from these tasks."""
    if all(task.source != "file" for task in tasks):
        return None
    return "the toy policy learns from reasoning-gym's datasets, not from files: set model.path to a model of your own"


def build_toy_policy(out: Path, tasks: Sequence[TaskSpec], *, seed: int | None, steps: int | None) -> Path:
    """Build the toy base policy in the folder `out`, with a progress bar on stderr. seed, steps:
    None for the recipe's.
    """
    from shared.model.base_policy import BasePolicyRecipe, build_base_policy

    if problem := _from_files(tasks):
        raise CommandError(problem, exit_code=EXIT_CONFIG)
    standard = BasePolicyRecipe()
    try:
        recipe = replace(standard, seed=standard.seed if seed is None else seed, steps=steps or standard.steps)
        return build_base_policy(out, tasks, recipe)
    except (FileExistsError, ValueError) as error:
        raise CommandError(str(error)) from None
