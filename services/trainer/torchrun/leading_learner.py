"""The learner of rank 0: it forwards every call to the other ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from services.trainer.learner import Learner
from services.trainer.parallel.group import Place, ProcessLost, join, naming_the_loss
from services.trainer.parallel.shard import Sharded
from services.trainer.records import StepRecord
from services.trainer.state import LearnerState
from services.trainer.torchrun.channel import Command, announce
from services.trainer.torchrun.restored import pack_state
from shared.config import NodeConfig
from shared.contracts.codec import encode
from shared.contracts.messages import Batch


class Followers:
    """The other ranks, seen from rank 0: one command at a time, and none after one that failed."""

    def __init__(self, place: Place, config: NodeConfig) -> None:
        self._place = place
        self._config = config
        self._one_at_a_time = threading.Lock()
        self._failure: str | None = None
        self._heeding = False
        self.met = False
        """Whether all of them have arrived."""

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
                with naming_the_loss(self._place, self._config.trainer.collective_timeout_s):
                    if command is not None:
                        announce(command, payload)
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

    def now_heed(self) -> None:
        """Record that they have created their learners and wait for commands."""
        self._heeding = True

    def beat(self) -> bool:
        """Check that all ranks are alive, unless they are computing. Returns whether one of them
        was asked to stop. Raises ProcessLost.
        """
        if not self._one_at_a_time.acquire(blocking=False):
            return False
        try:
            if not self._heeding:
                return False
            if self._failure is not None:
                raise ProcessLost(self._failure)
            with naming_the_loss(self._place, self._config.trainer.collective_timeout_s):
                return announce(Command.BEAT)
        except ProcessLost as lost:
            self._failure = str(lost)
            raise
        finally:
            self._one_at_a_time.release()

    def end(self) -> None:
        """Tell the other ranks that training is done. A rank that is out of step notices when this
        process exits.
        """
        if self._heeding and self._failure is None:
            with self.doing(Command.END):
                self._heeding = False


class LeadingLearner(Learner):
    """A learner whose calls are made by all processes."""

    def __init__(self, config: NodeConfig, followers: Followers) -> None:
        self._followers = followers
        with followers.doing(None):
            super().__init__(config, followers.meet())
            followers.now_heed()

    def step(self, batch: Batch) -> StepRecord:
        """Like `Learner.step`."""
        with self._followers.doing(Command.STEP, encode(batch)):
            return super().step(batch)

    def policy(self) -> dict[str, Tensor]:
        """Like `Learner.policy`."""
        with self._followers.doing(Command.POLICY):
            return super().policy()

    def state(self) -> LearnerState:
        """Like `Learner.state`."""
        with self._followers.doing(Command.STATE):
            return super().state()

    def restore(self, state: LearnerState) -> None:
        """Like `Learner.restore`."""
        with self._followers.doing(Command.RESTORE, pack_state(state)):
            super().restore(state)
