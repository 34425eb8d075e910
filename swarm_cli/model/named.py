"""Checks a model named on the command line before anything slow is imported to read it."""

from __future__ import annotations

import re
from pathlib import Path

from shared.hub_models import COMMIT, commit_hash
from swarm_cli.errors import CommandError
from swarm_cli.local.base_model import is_hub_name


def check_named(model: str, revision: str) -> None:
    """Refuse what can be neither a model's folder nor a hub name at a commit.

    Raises:
        CommandError: naming the model and what to give instead.
    """
    folder = Path(model)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CommandError(f"{model} holds no config.json: give the folder that save_pretrained or `swarm model import` wrote")
        return
    if folder.exists():
        raise CommandError(f"{model} is a file: give a model's folder; `swarm model import` makes one of a GGUF file")
    if re.fullmatch(COMMIT, revision):
        return
    if not is_hub_name(model):
        raise CommandError(f"there is no folder {model}: check the spelling, or give a hub name (OWNER/NAME) with --revision")
    said = f"--revision {revision[:60]!r} is not the full hash of a commit" if revision else "a hub name needs --revision"
    raise CommandError(f"there is no folder {model}, and {said}: give {commit_hash(model)}")
