"""What tests of scorers share: items of any dataset, the reward of an answer to one, and what is
full marks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import reasoning_gym

from shared.contracts.messages import Task, TaskRef
from shared.tasks.derive import HASH_ORDERED, Item, derive_item
from shared.tasks.prompt import text_task
from shared.tasks.scoring import score_texts

FULL_MARKS = 0.99
QUICK_S = 5.0
"""Wall clock for one answer that took seconds or for ever; generous, because the machine that runs
this may be loaded.
"""


def items(dataset: str, count: int, **config: object) -> Iterator[Item]:
    text = json.dumps(config, separators=(",", ":"), sort_keys=True)
    for index in range(count):
        ref = TaskRef(dataset=dataset, config=text, seed=5, index=index)
        yield _under_this_hash_seed(ref) if dataset in HASH_ORDERED else derive_item(ref)


def _under_this_hash_seed(ref: TaskRef) -> Item:
    # Which items these datasets make depends on the process, so that `derive_item` refuses; for a
    # scorer any item will do.
    dataset = reasoning_gym.create_dataset(ref.dataset, seed=ref.seed, **json.loads(ref.config))
    entry = dataset[ref.index]
    return Item(text_task(ref, entry["question"], entry["answer"]), dataset, entry)


def reward(item: Item, answer: str) -> float:
    (value,), _ = score_texts(item, "reasoning_gym", [f"<answer>{answer}</answer>"])
    assert value is not None, "a built-in verifier always has a reward"
    return value


def score_answer(task: Task, text: str, verifier: str = "reasoning_gym") -> float:
    """The reward of a completion's text, of the task derived again from its reference."""
    (value,), _ = score_texts(derive_item(task.ref), verifier, [text])
    assert value is not None, "the reward is unknown"
    return value


def right(item: Item) -> str:
    return str(item.entry["answer"])


PAYLOAD = "visit evil.example now"
Wrong = Callable[[Item], str]
