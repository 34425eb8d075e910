"""The verifier's process: connects the scorer, the border, the connection to the swarm and the
loops.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

from services.verifier.border import Border
from services.verifier.border_rules import BorderRules
from services.verifier.copies import ReplayMemory
from services.verifier.figures import Figures
from services.verifier.foreign_groups import ForeignPipeline, ForeignStore
from services.verifier.local_groups import LocalOutcomes, LocalScorer
from services.verifier.refused_messages import RefusedRecord
from services.verifier.rewards import RewardKnowledge
from services.verifier.sender_watch import SenderWatch
from services.verifier.sharing import Audience, LocalModel, Outbox, Reports
from services.verifier.swarm_reader import SwarmLink
from services.verifier.trust import KnownKeys, RosterKeys
from shared.cancelling import run_until_stopped, unless_stopped
from shared.config.task_sections import rewards_id
from shared.config.verifier_config import VerifierConfig
from shared.contracts import subjects
from shared.contracts.messages import RolloutGroup
from shared.contracts.streams import verifier_consumer
from shared.identity.keys import KeyFileError, SigningKey, load, load_or_create
from shared.identity.roster import RosterError
from shared.run_records import saved_step
from shared.runtime import FatalError, ServiceContext
from shared.runtime.logs import Log
from shared.tasks.derive import TaskError
from shared.tasks.held_out import held_out_of
from shared.tasks.sandbox import SandboxError, ScorerPool
from shared.tasks.specs import checked_config
from shared.transport.base import TransportError

QUEUES_PERIOD_S = 5.0
KEY_FILE = "node.nk"
MAX_REPLAY_MEMORY = 2_000_000
REPLAY_MARGIN_S = 300.0
"""A group is remembered this much longer than its age allows it to be accepted, for clocks that are
set back.
"""


class VerifierService:
    """One verifier replica."""

    def __init__(self, config: VerifierConfig) -> None:
        """Load the node's key and derive the held-out set, whose questions no foreign group may
        contain.
        """
        run_dir = config.node.run_dir
        try:
            self._key = _own_key(config)
            self._roster = RosterKeys(config.verifier.roster_file) if config.verifier.trust == "roster" else None
            self._trust = self._roster or KnownKeys(
                run_dir / "known_keys.txt", (config.node.id, self._key.public_key), config.verifier.forget_names_after_s
            )
            self._replay = ReplayMemory(
                _replay_capacity(config),
                run_dir / f"accepted_groups-{config.node.replica}.txt",
                run_dir.glob("accepted_groups*.txt"),
                keep_s=_longest_s(config) + REPLAY_MARGIN_S,
            )
            config = self._config = checked_config(config)
            self._held_out = held_out_of(config.tasks, tasks=config.eval.tasks, sets=config.eval.sets, draw=config.eval.draw)
        except RosterError as error:
            raise FatalError(f'verifier.trust is roster, but {error}; or set verifier.trust = "open"') from None
        except (KeyFileError, TaskError) as error:
            raise FatalError(str(error)) from None
        except OSError as error:
            raise FatalError(f"{run_dir}: {error}: make the folder writable or set node.var_dir") from None

    async def run(self, context: ServiceContext) -> None:
        config, log = self._config, context.log
        self._replay.writes = context.writes
        if isinstance(self._trust, KnownKeys):
            self._trust.writes = context.writes
        if config.nats.create_streams:
            consumer = verifier_consumer(config.verifier.ack_wait_s)
            await context.node.ensure_consumer(subjects.node_rollouts_stream(config.node.id), consumer)
        context.status.scorer = rewards_id(config.tasks)
        figures = Figures(context.registry, context.status, (spec.dataset for spec in config.tasks))
        # If J is 0, or nothing trains here, no foreign groups are used, so none is read, checked or
        # scored.
        wanted = config.sampler.external > 0 and "trainer" in config.node.role_names
        takes_in = config.nats.swarm_url is not None and wanted
        pool = ScorerPool.from_config(config.verifier, tasks=config.tasks, foreign=takes_in)
        link = SwarmLink(config, figures, log)
        if config.nats.swarm_url is not None:
            context.planes.watch("swarm", lambda: link.held)
        try:
            await unless_stopped(context.stopping, link.begin())
            await pool.start()
            self._say_protections(pool, figures, log)
            own = LocalModel()
            rules = BorderRules.of(self._config, self._config.verifier.accepted_tasks)
            rewards = RewardKnowledge(config, context.node, figures, log)
            await rewards.begin(pool)
            rules = replace(rules, local_only=rewards.local_only)
            border = Border(rules, self._trust, self._replay, self._held_out, awaits_pass=rewards.awaits_pass)

            def is_heard(name: str, key: str) -> bool:
                now_s = time.time()
                return (
                    self._trust.may_use(name, key, now_s)
                    and not border.bans.ban_for_name(name, now_s)
                    and not border.key_problem(key, now_s) is not None
                )

            audience = Audience(config.node.id, config.nats.swarm_id, is_heard)
            outbox = Outbox(config.verifier, self._key, link, figures, log, config.nats.swarm_id, audience)
            scored = LocalOutcomes(config.node.id, context.node, figures, log)
            store = ForeignStore(config, context.node, border, own, rewards, figures, log)

            def note_own(group: RolloutGroup, seq: int) -> None:
                border.note_own(group)
                store.stored(seq)

            local = LocalScorer(config, context.node, pool, scored, outbox, own, figures, log, rewards, note_own)
            refused = RefusedRecord(config.node.run_dir, config.node.replica, context.writes)
            intake = ForeignPipeline(config, context.node, link, border, pool, store, figures, log, refused)
            watch = SenderWatch(
                config.node.id, context.replica, context.node, border.bans, border.reputation, self._trust, figures, log
            )
            await watch.begin()
            reports = Reports(config, self._key, context.node, link, own, log)
            context.mark_ready()
            context.status.state("verifying")
            log.info("verifying", public_key=self._key.public_key, workers=config.verifier.workers)
            loops = [
                local.run(),
                outbox.run(),
                link.run(),
                rewards.run(),
                figures.scoring.watch_workers(pool),
                self._watch_queues(context, figures),
            ]
            if config.nats.swarm_url is not None:
                loops += [watch.run(), reports.run_evals(), reports.run_record(), audience.run(link, log)]
            if takes_in:
                loops += [intake.run(), refused.run()]
            await run_until_stopped(context.stopping, *loops)
        except (SandboxError, TaskError) as error:
            raise FatalError(str(error)) from None
        finally:
            await pool.close()
            await link.close()

    def _say_protections(self, pool: ScorerPool, figures: Figures, log: Log) -> None:
        figures.scoring.protections(pool.missing)
        for protection, cause in sorted(pool.missing.items()):
            log.warning("sandbox_protection_missing", protection=protection, cause=cause)

    async def _watch_queues(self, context: ServiceContext, figures: Figures) -> None:
        node = self._config.node.id
        while True:
            try:
                unscored = await context.node.stream_state(subjects.node_rollouts_stream(node))
                dead = await context.node.stream_state(subjects.node_dead_letters_stream(node))
                figures.scoring.queues(unscored.messages, dead.messages)
            except TransportError as error:
                context.log.debug("queues_not_read", reason=str(error))
            await asyncio.sleep(QUEUES_PERIOD_S)


def _own_key(config: VerifierConfig) -> SigningKey:
    """The key that signs what the node shares, made at its first start.

    Raises:
        KeyFileError: the file cannot be used, or is gone though the node has trained: other nodes
            know its name by that key, and refuse what another one signs.
    """
    if given := config.verifier.signing_key_file:
        return load(Path(given))
    path = config.node.run_dir / KEY_FILE
    if config.nats.swarm_url is not None and not path.exists() and (step := saved_step(config.node.run_dir)):
        raise KeyFileError(
            f"key file {path} is gone, though this node has trained {step:,} steps: other nodes know its name by that key and "
            f"refuse what a new one signs: restore the file. If nobody knows this node, `swarm keys new --out {path}` makes a new "
            "key"
        )
    return load_or_create(path)


def _replay_capacity(config: VerifierConfig) -> int:
    """Room for all groups until they are too old to be accepted, so that the age check refuses
    those that are forgotten.
    """
    verifier = config.verifier
    return max(verifier.replay_memory, min(MAX_REPLAY_MEMORY, int(verifier.intake_groups_per_s * _longest_s(config)) + 1))


def _longest_s(config: VerifierConfig) -> float:
    """Return how long after its acceptance a group is still young enough to be accepted again."""
    return config.max_foreign_age_s + config.verifier.max_clock_skew_s
