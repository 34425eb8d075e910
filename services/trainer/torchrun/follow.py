"""Every rank except 0: computes its share of what rank 0 commands, and communicates with nothing
else.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

import structlog
import torch

from services.trainer.learner import Learner
from services.trainer.parallel.group import Place, ProcessLost, join, naming_the_loss
from services.trainer.parallel.shard import Sharded
from services.trainer.policy_model import node_seed
from services.trainer.torchrun.channel import Command, heed
from services.trainer.torchrun.restored import unpack_state
from shared.config import ConfigError, NodeConfig, load_config
from shared.contracts.codec import decode
from shared.contracts.messages import Batch
from shared.model.weights import WeightsError
from shared.runtime import EXIT_CONFIG, FatalError
from shared.runtime.logs import Log, configure_logging
from shared.seeds import number_from


def main() -> NoReturn:
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
    told_to_stop = _StopSignals()
    with naming_the_loss(place, config.trainer.collective_timeout_s):
        try:
            learner = Learner(config, parallel)
        except ValueError as error:
            raise FatalError(f"the trainer cannot start with this configuration: {error}") from None
        while True:
            command, payload = heed(wants_stop=told_to_stop.seen)
            if command is Command.END:
                return
            _do(learner, config, place.rank, command, payload)


def step_seed(config: NodeConfig, rank: int, step: int) -> int:
    """Seed of dropout in process `rank` in a step: different for each, and the same after a
    restart, so that it need not be in a checkpoint.
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
