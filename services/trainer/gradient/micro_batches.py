"""Which completions share a row, and which rows share a micro-batch. Pure arithmetic over lengths.

Nothing here changes a result, because the normaliser is fixed for the whole step beforehand. It
only affects the cost.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.trainer.gradient.rows import RowSlice, TokenGroup

WIDEST_SHARED_ROW = 16_384
"""Largest width in tokens. A row's mask takes two bytes for each pair of tokens in bfloat16, 0.54
GB, and four in float32; plain rows need none.
"""


def plan_rows(groups: Sequence[TokenGroup], *, shared_prompt: bool, budget_tokens: int, hidden_size: int) -> list[RowSlice]:
    """Split every group into rows: one completion per row, or, with `shared_prompt`, the number
    that is cheapest.

    A row stays within `budget_tokens` unless a single completion with its prompt does not fit.
    """
    rows: list[RowSlice] = []
    for index, group in enumerate(groups):
        prompt, lengths = len(group.prompt_ids), group.completion_lengths
        per_row = 1
        if shared_prompt:
            per_row = completions_per_row(prompt, lengths, budget_tokens=budget_tokens, hidden_size=hidden_size)
        for start in range(0, len(lengths), per_row):
            stop = min(start + per_row, len(lengths))
            rows.append(RowSlice(prompt + sum(lengths[start:stop]), index, start, stop))
    return rows


def completions_per_row(prompt: int, lengths: Sequence[int], *, budget_tokens: int, hidden_size: int) -> int:
    """How many completions to put behind one prompt so that the group costs the fewest operations.

    Sharing saves the prompt's linear layers but widens the row, and with a custom mask attention
    pays for the whole square, in time and in memory, so no shared row is wider than
    `WIDEST_SHARED_ROW`. Per layer and token about 24 h^2 operations are linear and 4 h W are
    attention (h `hidden_size`, W the row's width), which gives the cost `6 h W + W^2` of a row.
    """

    def widths(per_row: int) -> list[int]:
        return [prompt + sum(lengths[start : start + per_row]) for start in range(0, len(lengths), per_row)]

    widest = min(budget_tokens, WIDEST_SHARED_ROW)
    allowed = [n for n in range(1, len(lengths) + 1) if n == 1 or max(widths(n)) <= widest]
    return min(allowed, key=lambda n: (sum(6 * hidden_size * width + width**2 for width in widths(n)), n))


def plan_micro_batches(rows: Sequence[RowSlice], budget_tokens: int) -> list[list[RowSlice]]:
    """Pack rows, sorted by width, so that the number of rows times the largest width stays within
    `budget_tokens`.

    A row wider than the budget gets its own micro-batch. The order depends only on the rows, so the
    same batch is always split the same way.
    """
    if budget_tokens < 1:
        raise ValueError(f"micro-batch budget is {budget_tokens} tokens: it must be 1 or more")
    batches: list[list[RowSlice]] = []
    for row in sorted(rows):
        if batches and (len(batches[-1]) + 1) * row.width <= budget_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches
