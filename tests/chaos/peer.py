"""Another node of the swarm, as far as this one can tell: signed groups on real tasks, published
now and then.
"""

from __future__ import annotations

import itertools
import threading
import time
import zlib

import msgspec

from services.verifier.sharing import sign
from shared.config.task_sections import TaskSpec
from shared.contracts import subjects
from shared.contracts.codec import content_id, encode
from shared.contracts.messages import Completion, RolloutGroup, Sampling
from shared.contracts.wire import ModelIdentity
from shared.identity.keys import SigningKey, new_seed
from shared.tasks.derive import derive_task, task_ref
from shared.transport.base import TransportError
from tests.chaos.observer import Observer

PERIOD_S = 0.7


class Peer:
    """Publishes from a thread over an observer's connection to the swarm plane; counts what was
    acknowledged.
    """

    def __init__(self, name: str, swarm: Observer, tasks: list[TaskSpec]) -> None:
        self.name = name
        self.acknowledged: set[str] = set()
        self.offered: set[str] = set()
        """All true groups that were sent: one whose acknowledgement was lost may lie in the stream
        too.
        """
        self.refusals_due = 0
        """Messages sent that no border may let in."""
        self._swarm, self._tasks = swarm, tasks
        self._key = SigningKey(new_seed())
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Publish no more."""
        self._stopping.set()
        self._thread.join(15)

    def _run(self) -> None:
        for number in itertools.count():
            spec = self._tasks[number % len(self._tasks)]
            group = foreign_group(self.name, number, spec)
            good = encode(sign(group, self._key))
            lying = msgspec.structs.replace(group, task=msgspec.structs.replace(group.task, answer="made up"))
            subject = subjects.rollouts(self.name)
            self.offered.add(content_id(encode(group)))
            if self._send(subject, good, content_id(good)):
                self.acknowledged.add(content_id(encode(group)))
            bad = encode(sign(lying, self._key)) if number % 2 else good[:-40]
            if number % 5 == 4 and self._send(subject, bad, content_id(bad)):
                self.refusals_due += 1
            if self._stopping.wait(PERIOD_S):
                return

    def _send(self, subject: str, payload: bytes, message_id: str) -> bool:
        work = self._swarm.transport.publish(subject, payload, stream=subjects.SWARM_ROLLOUTS, message_id=message_id, timeout_s=2.0)
        try:
            self._swarm.call(work, 10.0)
        except (TransportError, TimeoutError):
            return False
        return True


def foreign_group(node: str, number: int, spec: TaskSpec) -> RolloutGroup:
    """A group of one right and three wrong answers by a model with another tokenizer."""
    # A task that no other peer has: the same answers to the same task would be a copy.
    seed = 100_000 * (zlib.crc32(node.encode()) % 10_000) + number
    task = derive_task(task_ref(dataset=spec.dataset, config=spec.canonical_config, seed=seed, index=0))
    texts = [f"<answer>{text}</answer>" for text in (task.answer, "no", f"no {number}", "")]
    return RolloutGroup(
        node=node,
        created_at=time.time(),
        draw=number,
        task=task,
        completions=[Completion(text=text, finish_reason="stop", token_count=3) for text in texts],
        model=ModelIdentity(name="peer", tokenizer_hash="e" * 64),
        policy_version=0,
        sampling=Sampling(),
    )
