"""Maps a node's draw number to a task. It is a pure function, so replicas and restarts agree
without communicating.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from shared.contracts.messages import Task, TaskRef
from shared.tasks.derive import TaskError, dataset_size, derive_task, task_ref
from shared.tasks.held_out import HELD_OUT_SEED, HeldOut
from shared.tasks.reference_checks import is_left_out

if TYPE_CHECKING:
    from shared.config.task_sections import TaskSpec

TRAINING_SEEDS = HELD_OUT_SEED
"""Training seeds are in [0, TRAINING_SEEDS); larger ones belong to held-out tasks."""

MAX_ATTEMPTS = 1000

SEED_DRAWS = 16
"""Number of draws that share a dataset's seed. Nine of reasoning-gym's 105 datasets take 12 to 640
ms to construct, and every node that checks a group pays that again for each new seed; over 16 draws
it is at most 40 ms per draw. The seed may become known within these draws, but never the next
index.
"""


class TaskSource:
    """The tasks of one node.

    Draw `d` chooses a source by weight, pseudorandomly from (secret, node id, node seed, d). The
    seed stays the same for `SEED_DRAWS` draws, whose indices are distinct and in random order.
    Whoever sees some draws but does not have the secret cannot predict the next one. Datasets of
    fewer than `size` = 16 * `SEED_DRAWS` items get a new seed for every draw, because somebody
    could otherwise send all their items in advance.
    """

    def __init__(
        self, specs: Sequence[TaskSpec], *, node: str, seed: int, sizes: Sequence[int] | None = None, secret: bytes = b""
    ) -> None:
        """`sizes[i]` is the number of items that `specs[i]` has under one seed; None asks
        reasoning-gym (`dataset_size`).

        secret: at most 64 bytes. Empty: anybody can compute the draws from node and seed, which
        experiments need.

        Raises:
            TaskError: a source is unusable (`check_specs` gives a fuller message).
        """
        if sizes is None:
            sizes = [dataset_size(spec.dataset, spec.canonical_config) for spec in specs]
        if not specs or len(specs) != len(sizes):
            raise ValueError(f"{len(specs)} task sources with {len(sizes)} sizes: give one size for each of at least one source")
        self._specs = list(specs)
        self._sizes = list(sizes)
        self._cumulative = list(accumulate(spec.weight for spec in specs))
        self._secret = secret
        self._root = f"{node}\x00{seed}"

    def ref(self, draw: int, attempt: int = 0) -> TaskRef:
        """The task reference of a draw; `attempt` is the number of earlier candidates that could
        not be used.
        """
        position = self._position(draw)
        spec, size = self._specs[position], self._sizes[position]
        name = f"{spec.dataset}\x00{spec.canonical_config}\x00{attempt}"
        block, place_in_block = divmod(draw, SEED_DRAWS if size >= 16 * SEED_DRAWS else 1)
        seed = self._hash("seed", block, name) % (TRAINING_SEEDS - size)
        order = random.Random(self._hash("index", block, name))
        index = order.sample(range(size), place_in_block + 1)[-1]
        return task_ref(spec.dataset, spec.canonical_config, seed=seed, index=index)

    def _position(self, draw: int) -> int:
        place = self._uniform("source", draw) * self._cumulative[-1]
        return min(bisect_right(self._cumulative, place), len(self._specs) - 1)

    def candidates(self, draw: int, held_out: HeldOut, passed_over: Counter[str] | None = None) -> Iterator[Task]:
        """The candidate tasks of a draw, in order: at most `MAX_ATTEMPTS`, without those that
        cannot be derived, are held out, or earn nothing with their own reference answer.
        `passed_over` counts these kinds, as `failed`, `held_out` and `left_out`.

        Raises:
            TaskError: the dataset cannot be used, or the last candidate cannot be derived.
        """
        passed = Counter() if passed_over is None else passed_over
        for attempt in range(MAX_ATTEMPTS):
            try:
                task = derive_task(self.ref(draw, attempt))
            except TaskError as error:
                if not error.only_this_item or attempt == MAX_ATTEMPTS - 1:
                    raise
                passed["failed"] += 1
                continue
            if held_out.contains(task):
                passed["held_out"] += 1
            elif is_left_out(self._specs[self._position(draw)], task.ref):
                passed["left_out"] += 1
            else:
                yield task

    def _uniform(self, purpose: str, draw: int) -> float:
        return (self._hash(purpose, draw, "") >> 11) / float(1 << 53)

    def _hash(self, purpose: str, number: int, name: str) -> int:
        text = f"{self._root}\x00{purpose}\x00{number}\x00{name}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=self._secret).digest(), "big")
