"""Joins the processes that torchrun started: determines this process's rank and device, and checks
that all have the same configuration.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from shared.config import NodeConfig
from shared.model.loading import resolve_device
from shared.runtime import FatalError


class ProcessLost(RuntimeError):
    """Another process of this trainer has exited or hangs. The message names cause and remedy."""


@dataclass(frozen=True, slots=True)
class Place:
    """This process's place according to torchrun's environment: rank `rank` of `ranks`,
    `local_rank` on its machine.
    """

    rank: int
    ranks: int
    local_rank: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """Read RANK, WORLD_SIZE and LOCAL_RANK; one process if they are not set.

        Raises:
            FatalError: they are not numbers, or contradict each other.
        """
        said = {name: environment.get(name, alone) for name, alone in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))}
        try:
            rank, ranks, local_rank = (int(value) for value in said.values())
        except ValueError:
            rank, ranks, local_rank = -1, 0, 0
        if not 0 <= local_rank <= rank < ranks:
            found = ", ".join(f"{name}={value}" for name, value in said.items())
            raise FatalError(
                f"{found} is not a valid rank and world size: start with torchrun, or unset them to train in one process"
            )
        return cls(rank, ranks, local_rank)

    def device(self, name: str) -> torch.device:
        """The device of this process if `model.device` is `name`.

        Raises:
            FatalError: there is no GPU for this process alone.
        """
        device = resolve_device(name)
        if device.type != "cuda":
            return device
        if device.index is not None and name != "auto":
            raise FatalError(f"model.device is {name!r}, but each of {self.ranks} processes needs its own GPU: set it to auto")
        if self.local_rank >= torch.cuda.device_count():
            raise FatalError(
                f"process {self.local_rank} of this machine has no GPU, because there are only {torch.cuda.device_count()}: "
                "lower torchrun's --nproc-per-node"
            )
        return torch.device("cuda", self.local_rank)


def join(place: Place, config: NodeConfig) -> torch.device:
    """Wait for all processes, check that their configurations are equal, and return this process's
    device.

    Raises:
        ProcessLost: not all of them arrive within `trainer.collective_timeout_s`.
        FatalError: no device for this process, device turns are configured, or another process has
            another configuration.
    """
    if config.model.device_turns:
        raise FatalError("model.device_turns is for one trainer process: unset it, or start the trainer without torchrun")
    device = place.device(config.model.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout_s = config.trainer.collective_timeout_s
    with naming_the_loss(place, timeout_s):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
        _check_same(config)
    return device


@contextmanager
def naming_the_loss(place: Place, timeout_s: float) -> Iterator[None]:
    """Turn a communication failure inside the block into ProcessLost."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        cause = str(error).strip().splitlines()[0][:300]
        raise ProcessLost(
            f"another one of the {place.ranks} training processes exited, or did not answer for {timeout_s:g} s ({cause}): see its "
            "log; restart torchrun, and training resumes from the newest checkpoint"
        ) from None


def _check_same(config: NodeConfig) -> None:
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, _digest(config))
    different = [rank for rank, digest in enumerate(found) if digest != found[0]]
    if different:
        raise FatalError(
            f"ranks {different} have another configuration or torch version than rank 0: start all of them with the same files and "
            "environment"
        )


def _digest(config: NodeConfig) -> str:
    """Digest of everything that a step depends on."""
    relevant = {
        "node": [config.node.id, config.node.seed],
        "model": config.model.model_dump(mode="json"),
        "trainer": config.trainer.model_dump(mode="json"),
        "generator": [config.generator.temperature, config.generator.max_new_tokens, config.generator.completions],
        "longest_foreign": config.max_foreign_tokens,
        "torch": torch.__version__,
    }
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()
