"""Several processes that train one policy, started by torchrun, sharded with FSDP2: weights,
gradients and optimizer states are sharded, and a layer is gathered when used.

Every process runs the same `Learner` on the same batch. Rank 0 is the service (`LeadingTrainer`);
it sends commands to the other ranks (`follow`), which communicate with nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn, cast

import structlog
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from services.trainer.checkpoint import LearnerState
from services.trainer.learner import Learner
from services.trainer.parallel import whole_optimizer_state
from services.trainer.policy_model import node_seed
from services.trainer.records import StepRecord
from services.trainer.service import TrainerService
from shared.cancelling import StillRunningError, cancel_and_wait
from shared.config import ConfigError, NodeConfig, load_config
from shared.contracts.codec import decode, encode
from shared.contracts.messages import Batch
from shared.model.loading import resolve_device
from shared.model.weights import WeightsError
from shared.runtime import EXIT_CONFIG, FatalError, ServiceContext
from shared.runtime.logs import Log, configure_logging
from shared.seeds import number_from


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
        ProcessLost: not all of them arrive within `collective_timeout_s`.
        FatalError: no device for this process, device turns are configured, or another process has
            another configuration.
    """
    if config.model.device_turns:
        raise FatalError("model.device_turns is for one trainer process: unset it, or start the trainer without torchrun")
    device = place.device(config.model.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout_s = config.trainer.collective_timeout_s
    with collective_errors(place, timeout_s):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
        _check_same(config)
    return device


@contextmanager
def collective_errors(place: Place, timeout_s: float) -> Iterator[None]:
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


class Sharded:
    """`Parallel` over the joined process group. `device`: this process's."""

    def __init__(self, place: Place, device: torch.device) -> None:
        self.rank, self.ranks = place.rank, place.ranks
        self._device = device
        self._mesh = init_device_mesh(device.type, (place.ranks,))

    def device(self, name: str) -> torch.device:
        """The device chosen when the process joined."""
        return self._device

    def load_device(self, device: torch.device) -> torch.device:
        """The host's memory, because a policy that is sharded may be too large for a single
        device.
        """
        return torch.device("cpu")

    def shard(self, model: Any) -> None:
        """Apply FSDP2 to each transformer block and to the rest. Gradients are summed, because the
        loss is divided for the whole step.
        """
        for module in [*transformer_blocks(model), model]:
            # Parameters that stay gathered after a pass would be stale after the optimizer's step
            # or a restore.
            fully_shard(module, mesh=self._mesh, reshard_after_forward=True)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.ranks)]
        dist.all_gather(found, tensor.contiguous())
        return found

    def number(self, tensor: Tensor) -> float:
        return float(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole tensor in rank 0, on the host, because it need not fit into a device."""
        if not isinstance(tensor, DTensor):
            return tensor
        full = tensor.full_tensor()
        return full.cpu() if self.rank == 0 else torch.empty(0, dtype=full.dtype)

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """This rank's part of the tensor that rank 0 scatters."""
        if not isinstance(like, DTensor):
            return tensor
        if self.rank == 0:
            content = tensor.to(self._device, like.dtype)
        else:
            content = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        return cast(Tensor, distribute_tensor(content, like.device_mesh, like.placements, src_data_rank=0))


def transformer_blocks(model: Any) -> list[nn.Module]:
    """Modules that the model's authors declare must stay on one device: the transformer blocks.
    Without any, only the whole model is sharded.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = set(getattr(base, "_no_split_modules", None) or ())
    # Inner modules come first, as FSDP2 requires.
    return [module for module in reversed(list(model.modules())) if type(module).__name__ in names]


# A command is a small header in an all-reduce of all processes, then a payload, over the host's
# network (gloo) even if weights use NCCL, so that waiting for a command occupies no GPU.


class Command(IntEnum):
    """The next act of all processes. BEAT: nothing; it only shows that every process is alive."""

    BEAT = 1
    STEP = 2
    POLICY = 3
    STATE = 4
    RESTORE = 5
    END = 6


def send_command(command: Command, payload: bytes = b"") -> bool:
    """Called by rank 0: send a command. Returns whether one of the other ranks was asked to stop
    (SIGTERM). Raises RuntimeError if one has exited.
    """
    _, _, stops = _header(command, len(payload), wants_stop=False)
    if payload:
        dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), src=0)
    return stops > 0


def receive_command(*, wants_stop: bool) -> tuple[Command, bytes]:
    """Called by the other ranks: wait for the next command. Raises RuntimeError if rank 0 has
    exited or is silent for too long.
    """
    command, size, _ = _header(0, 0, wants_stop=wants_stop)
    payload = torch.empty(size, dtype=torch.uint8)
    if size:
        dist.broadcast(payload, src=0)
    return Command(command), payload.numpy().tobytes()


def _header(command: int, size: int, *, wants_stop: bool) -> tuple[int, int, int]:
    header = torch.tensor([command, size, int(wants_stop)])
    dist.all_reduce(header)
    command, size, stops = header.tolist()
    return command, size, stops


# The other ranks need of a state that rank 0 restores everything but the contents of the tensors
# that it scatters.


def pack_state(state: LearnerState) -> bytes:
    """Names, shapes, numbers and the random state; scalars such as the optimizer's step counts with
    their values.
    """
    packed = io.BytesIO()
    outline = {
        "weights": {name: _outline(value) for name, value in state.weights.items()},
        "optimizer": whole_optimizer_state(state.optimizer, _outline),
        "random": state.random,
        "recent_norms": state.recent_norms,
    }
    torch.save(outline, packed)
    return packed.getvalue()


def unpack_state(packed: bytes) -> LearnerState:
    """Inverse of `pack_state`; tensors with more than one number have a shape and no content."""
    outline = torch.load(io.BytesIO(packed), weights_only=True)
    return LearnerState(**outline)


def _outline(tensor: Tensor) -> Tensor:
    return tensor.to("meta") if tensor.ndim else tensor


class Followers:
    """The other ranks, seen from rank 0: one command at a time, and none after one that failed."""

    def __init__(self, place: Place, config: NodeConfig) -> None:
        self._place = place
        self._config = config
        self._one_at_a_time = threading.Lock()
        self._failure: str | None = None
        self._ready = False
        self.met = False
        """Say whether all of them have arrived."""

    @contextmanager
    def doing(self, command: Command | None, payload: bytes = b"") -> Iterator[None]:
        """Broadcast `command` to the other ranks and run the block as rank 0. None: they are
        already running it.

        Raises:
            ProcessLost: one of them has exited, now or before.
        """
        with self._one_at_a_time:
            if self._failure is not None:
                raise ProcessLost(self._failure)
            try:
                with collective_errors(self._place, self._config.trainer.collective_timeout_s):
                    if command is not None:
                        send_command(command, payload)
                    yield
            except BaseException as error:
                # A rank that failed half-way is out of step with the others, so no further
                # collective operation can succeed.
                self._failure = str(error)
                raise

    def meet(self) -> Sharded:
        """Wait until all ranks have arrived."""
        device = join(self._place, self._config)
        self.met = True
        return Sharded(self._place, device)

    def mark_ready(self) -> None:
        """Record that they have created their learners and wait for commands."""
        self._ready = True

    def beat(self) -> bool:
        """Check that all ranks are alive, unless they are computing. Returns whether one of them
        was asked to stop. Raises ProcessLost.
        """
        if not self._one_at_a_time.acquire(blocking=False):
            return False
        try:
            if not self._ready:
                return False
            if self._failure is not None:
                raise ProcessLost(self._failure)
            with collective_errors(self._place, self._config.trainer.collective_timeout_s):
                return send_command(Command.BEAT)
        except ProcessLost as lost:
            self._failure = str(lost)
            raise
        finally:
            self._one_at_a_time.release()

    def end(self) -> None:
        """Tell the other ranks that training is done. A rank that is out of step notices when this
        process exits.
        """
        if self._ready and self._failure is None:
            with self.doing(Command.END):
                self._ready = False


class LeadingLearner(Learner):
    """A learner whose calls are made by all processes."""

    def __init__(self, config: NodeConfig, followers: Followers) -> None:
        self._followers = followers
        with followers.doing(None):
            super().__init__(config, followers.meet())
            followers.mark_ready()

    def step(self, batch: Batch) -> StepRecord:
        with self._followers.doing(Command.STEP, encode(batch)):
            return super().step(batch)

    def policy(self) -> dict[str, Tensor]:
        with self._followers.doing(Command.POLICY):
            return super().policy()

    def state(self) -> LearnerState:
        with self._followers.doing(Command.STATE):
            return super().state()

    def restore(self, state: LearnerState) -> None:
        with self._followers.doing(Command.RESTORE, pack_state(state)):
            super().restore(state)


_BEAT_S = 1.0
_END_S = 3.0


class LeadingTrainer:
    """A `TrainerService` whose learner computes together with other processes. Only this process
    communicates with anything outside.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._followers = Followers(Place.of(os.environ), config)

    async def run(self, context: ServiceContext) -> None:
        """Train until told to stop, like a single process; the other ranks end with it.

        Raises:
            ProcessLost: another process has exited or hangs; all must be started again.
        """
        training = asyncio.create_task(TrainerService(self._config, self._learner).run(context))
        watching = asyncio.create_task(self._watch(context))
        try:
            await asyncio.wait({training, watching}, return_when=asyncio.FIRST_COMPLETED)
            for task in (watching, training):
                if task.done():
                    task.result()
        except ProcessLost as lost:
            context.log.error("process_lost", reason=str(lost), consequence="this process ends too")
            raise
        finally:
            try:
                await cancel_and_wait(watching, training, patience_s=_END_S)
            except StillRunningError as error:
                context.log.warning("training_goes_on", reason=str(error), consequence="this process ends all the same")
            finally:
                await self._end(context)

    def _learner(self, config: NodeConfig) -> Learner:
        return LeadingLearner(config, self._followers)

    async def _watch(self, context: ServiceContext) -> None:
        """While there is nothing to compute, detect lost processes and react to signals that only
        they received.
        """
        started_by = os.getppid()
        while True:
            await asyncio.sleep(_BEAT_S)
            if os.getppid() != started_by and not context.stopping.is_set():
                context.log.warning("launcher_gone", consequence="stopping: nothing would restart a process that fails")
                context.stopping.set()
            if self._followers.met:
                if await asyncio.to_thread(self._followers.beat):
                    context.stopping.set()
            elif context.stopping.is_set():
                return  # The other ranks were also told to stop, and may no longer answer.

    async def _end(self, context: ServiceContext) -> None:
        try:
            async with asyncio.timeout(_END_S):
                await asyncio.to_thread(self._followers.end)
        except (ProcessLost, TimeoutError) as error:
            context.log.warning("processes_not_told", reason=str(error), consequence="they end when they notice")


def follow_main() -> NoReturn:
    """Run as one of torchrun's processes. Exit codes are those of `shared.runtime.service`."""
    parser = argparse.ArgumentParser(prog="python -m services.trainer")
    parser.add_argument("--config", type=Path)
    try:
        config = load_config(parser.parse_args().config)
    except ConfigError as error:
        print(f"trainer: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    # Only rank 0 logs at INFO.
    configure_logging(level="warning", log_format=config.log.format)
    log: Log = structlog.get_logger("trainer").bind(node=config.node.id, role="trainer", process=os.environ.get("RANK"))
    code = 1
    try:
        follow(Place.of(os.environ), config)
        code = 0
    except FatalError as error:
        log.error("cannot_go_on", reason=str(error))
        code = EXIT_CONFIG
    except ProcessLost as error:
        log.error("process_lost", reason=str(error), consequence="this process ends too")
    except Exception:
        log.exception("crashed")
    logging.shutdown()
    sys.stdout.flush()
    # As in rank 0: exit at once, because tearing down torch takes seconds.
    os._exit(code)


def follow(place: Place, config: NodeConfig) -> None:
    """Execute rank 0's commands until it says that training is done.

    Raises:
        ProcessLost: rank 0 or another rank is gone or hangs.
        FatalError: an error that rank 0 cannot continue after either, such as a model that does not
            fit the configuration.
    """
    parallel = Sharded(place, join(place, config))
    stop_signals = _StopSignals()
    with collective_errors(place, config.trainer.collective_timeout_s):
        try:
            learner = Learner(config, parallel)
        except ValueError as error:
            raise FatalError(f"the trainer cannot start with this configuration: {error}") from None
        while True:
            command, payload = receive_command(wants_stop=stop_signals.seen)
            if command is Command.END:
                return
            _do(learner, config, place.rank, command, payload)


def step_seed(config: NodeConfig, rank: int, step: int) -> int:
    """Seed of what an objective draws in process `rank` in a step: different for each, and the same
    after a restart, so that it need not be in a checkpoint.
    """
    return number_from(f"{node_seed(config)}/{rank}/{step}", 6)


def _do(learner: Learner, config: NodeConfig, rank: int, command: Command, payload: bytes) -> None:
    if command is Command.STEP:
        batch = decode(payload, Batch)
        torch.manual_seed(step_seed(config, rank, batch.number))
        learner.step(batch)
    elif command is Command.POLICY:
        learner.policy()
    elif command is Command.STATE:
        learner.state()
    elif command is Command.RESTORE:
        try:
            learner.restore(unpack_state(payload))
        except (WeightsError, ValueError) as error:
            raise FatalError(f"cannot resume: {error}") from None


class _StopSignals:
    """Records SIGTERM and SIGINT. They do not end this process, because rank 0 needs it for the
    last checkpoint; rank 0 is told instead.
    """

    def __init__(self) -> None:
        self.seen = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, *_: object) -> None:
        self.seen = True
