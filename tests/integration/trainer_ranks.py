"""Several trainer processes without torchrun: forked in milliseconds, with the environment that
torchrun would give them.

Process 0 does what a test asks through the very learner that the service uses; the others run the
very loop of `follow`.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from services.trainer.checkpoint import LearnerState
from services.trainer.learner import Learner
from services.trainer.records import StepRecord
from services.trainer.torchrun import Followers, LeadingLearner, Place, Sharded, follow, join
from shared.config import NodeConfig
from shared.contracts.messages import Batch
from shared.model.weights import DeltaRounding
from tests import forked
from tests.nats_server import free_port

DEADLINE_S = 180.0


@dataclass
class Trained:
    """What a learner is after some steps."""

    state: LearnerState
    policy: dict[str, torch.Tensor]
    records: list[StepRecord] = field(default_factory=list)
    rounding: DeltaRounding | None = None


def train(learner: Learner, batches: Sequence[Batch], start_from: LearnerState | None = None) -> Trained:
    """Train on `batches`, after a restore if there is something to start from."""
    if start_from is not None:
        learner.restore(start_from)
    records = [learner.step(batch) for batch in batches]
    return Trained(learner.state(), learner.policy(), records, learner.delta_rounding)


def train_alone(config: NodeConfig, batches: Sequence[Batch], start_from: LearnerState | None = None) -> Trained:
    """In one process, this one."""
    return train(Learner(config), batches, start_from)


def train_together(
    config: NodeConfig, batches: Sequence[Batch], start_from: LearnerState | None = None, *, ranks: int = 2, folder: Path
) -> Trained:
    """In `ranks` processes."""
    results = in_ranks(_train_in_rank, config, list(batches), start_from, ranks=ranks, folder=folder)
    trained = results[0]
    assert isinstance(trained, Trained)
    return trained


def _train_in_rank(place: Place, config: NodeConfig, batches: list[Batch], start_from: LearnerState | None) -> Trained | None:
    if place.rank:
        follow(place, config)
        return None
    followers = Followers(place, config)
    trained = train(LeadingLearner(config, followers), batches, start_from)
    followers.end()
    return trained


def joined(place: Place, config: NodeConfig) -> Sharded:
    """For tests of what lies below the learner."""
    return Sharded(place, join(place, config))


def in_ranks(work: Callable[..., Any], *arguments: Any, ranks: int, folder: Path) -> list[Any]:
    """`work(place, *arguments)` in each of `ranks` processes; what each returned. Fails with the
    traceback of what failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    outputs = [folder / f"rank-{rank}.pt" for rank in range(ranks)]
    children = start_ranks(_report, [(work, arguments, str(output)) for output in outputs])
    for child in children:
        child.join(DEADLINE_S)
    hung = [child for child in children if child.is_alive()]
    for child in hung:
        child.kill()
    found = [torch.load(output, weights_only=False) if output.exists() else "nothing came back" for output in outputs]
    assert not hung, (
        f"{len(hung)} of {ranks} processes hang after {DEADLINE_S} s; others: {[f for f in found if isinstance(f, str)]}"
    )
    assert all(child.exitcode == 0 for child in children), "\n".join(str(f) for f in found if isinstance(f, str))
    return found


def start_ranks(target: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> list[ForkServerProcess]:
    """Start `target(*arguments[rank])` for each rank with torchrun's environment for that rank."""
    environment = {"WORLD_SIZE": str(len(arguments)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        forked.start(_placed, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, target, rank_arguments)
        for rank, rank_arguments in enumerate(arguments)
    ]


def _placed(environment: dict[str, str], target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    target(*arguments)


def _report(work: Callable[..., Any], arguments: tuple[Any, ...], output: str) -> None:
    try:
        found = work(Place.of(os.environ), *arguments)
    except BaseException:
        torch.save(traceback.format_exc(), output)
        os._exit(1)
    torch.save(found, output)
    os._exit(0)
