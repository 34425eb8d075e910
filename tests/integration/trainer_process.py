"""The trainer as a process of its own, started in milliseconds (forked from a server that has torch
imported), and killed.

The child runs the very `main` of `python -m services.trainer`. It can be told to kill itself with
SIGKILL just before or just after the n-th call of one of its functions, which hits instants that a
kill from outside hits once in a thousand times.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tests import forked


class Death(NamedTuple):
    """Kill -9 `when` the `call`-th call of `function` (dotted name) is made."""

    function: str
    call: int
    when: Literal["before", "after"]


def start(config_file: Path, death: Death | None = None, lease_s: float | None = None) -> ForkServerProcess:
    """Start a trainer; it logs into its run's folder. lease_s: instead of the constant."""
    return forked.start(_live, str(config_file), death, lease_s)


def write_config(file: Path, *, node: str, url: str, model: Path, var_dir: Path, trainer: str = "") -> Path:
    """The node's TOML file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        f'node = {{ id = "{node}", run = "test", var_dir = "{var_dir}" }}\n'
        f'nats = {{ node_url = "{url}", swarm_url = "none" }}\n'
        f'model = {{ path = "{model}", device = "cpu", threads = 1 }}\n'
        'tasks = [{ dataset = "chain_sum" }]\n'
        "sampler = { local = 2, external = 0 }\n"
        "http = { port = 0 }\n"
        f"[trainer]\nlearning_rate = 1e-2\n{trainer}\n"
    )
    return file


def _live(config_file: str, death: Death | None, lease_s: float | None) -> None:
    if death is not None:
        arrange(death)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    sys.argv = ["trainer", "--config", config_file]
    from services.trainer.service import TrainerService
    from shared.config import NodeConfig
    from shared.config.node_sections import NodeSection
    from shared.runtime import main

    if lease_s is not None:
        NodeSection.lease_s = lease_s
    main("trainer", NodeConfig, TrainerService)


def arrange(death: Death) -> None:
    owner: Any = None
    path, name = death.function.rsplit(".", 1)
    try:
        owner = importlib.import_module(path)
    except ImportError:
        module, owner_name = path.rsplit(".", 1)
        owner = getattr(importlib.import_module(module), owner_name)
    original = getattr(owner, name)
    calls = 0

    def deadly(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == death.call and death.when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        outcome = original(*args, **kwargs)
        if calls == death.call:
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome

    setattr(owner, name, deadly)
