"""Change due: how much money a customer gets back, in cents.

[[tasks]]
dataset = "change_due"
verifier = "final_number"
config = { most_cents = 50 }
"""

from __future__ import annotations

import random
from typing import Any


class ChangeDue:
    """Entries by index. The same settings, seed and index give the same entry in every process and
    on every node.
    """

    def __init__(self, settings: dict[str, Any], seed: int) -> None:
        unknown = settings.keys() - {"most_cents", "size"}
        if unknown:
            raise ValueError(f"unknown settings {sorted(unknown)}: there are most_cents and size")
        self._most_cents, self._size, self._seed = int(settings.get("most_cents", 100)), int(settings.get("size", 500)), seed
        if not 2 <= self._most_cents <= 10_000:
            raise ValueError(f"most_cents is {self._most_cents}: use 2 to 10000")

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        chance = random.Random(f"{self._seed} {index}")
        paid = chance.randint(2, self._most_cents)
        price = chance.randint(1, paid - 1)
        question = f"Something costs {price} cents. A customer pays with {paid} cents. How many cents is the change?"
        return {"question": question, "answer": str(paid - price)}
