"""Which rows of a step each process computes. Pure arithmetic: every process computes all shares
and takes its own.

Rows are never cut, and a row holds whole completions, so objectives over whole sequences work. The
normaliser is that of the whole step, so the processes' gradients add up to that of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.trainer.gradient.micro_batches import plan_micro_batches
from services.trainer.gradient.rows import RowSlice


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass. `counted` is False if the pass only keeps in step with the other
    processes; its loss then has weight 0.
    """

    rows: list[RowSlice]
    counted: bool = True


def micro_batches_of(rank: int, ranks: int, rows: Sequence[RowSlice], budget_tokens: int) -> list[MicroBatch]:
    """The micro-batches of process `rank`. Every process gets equally many, because sharded passes
    are made together.

    A process with fewer micro-batches processes the narrowest row of the step again, with weight 0.
    Example: rows of 9, 5 and 3 tokens, a budget of 9, two processes: [9], [3 with weight 0] and
    [3], [5].
    """
    if not rows:
        return []
    plans = [plan_micro_batches(share, budget_tokens) for share in shares(rows, ranks)]
    passes = max(len(plan) for plan in plans)
    own = [MicroBatch(batch) for batch in plans[rank]]
    return own + [MicroBatch([min(rows)], counted=False)] * (passes - len(own))


def shares(rows: Sequence[RowSlice], ranks: int) -> list[list[RowSlice]]:
    """Distribute rows, the widest first, each to the process with the fewest tokens so far (the
    first among equals).
    """
    dealt: list[list[RowSlice]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for row in sorted(rows, reverse=True):
        least = tokens.index(min(tokens))
        dealt[least].append(row)
        tokens[least] += row.width
    return dealt
