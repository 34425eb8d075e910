"""How the rows of a step are dealt out to processes: all of them, evenly, with equally many passes
each.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.trainer.gradient.rows import MicroBatch, RowSlice, micro_batches_of, plan_micro_batches, shares

ROWS = st.lists(st.integers(1, 300), max_size=40).map(
    lambda widths: [RowSlice(width, number, 0, 1) for number, width in enumerate(widths)]
)


def rows(*widths: int) -> list[RowSlice]:
    return [RowSlice(width, number, 0, 1) for number, width in enumerate(widths)]


@given(ROWS, st.integers(1, 8), st.integers(1, 500), st.booleans())
def test_every_row_counts_in_exactly_one_process_and_all_make_equally_many_passes(
    step_rows: list[RowSlice], ranks: int, budget_tokens: int, packed: bool
) -> None:
    plans = [micro_batches_of(rank, ranks, step_rows, budget_tokens, packed=packed) for rank in range(ranks)]
    counted = [row for plan in plans for batch in plan if batch.counted for row in batch.rows]
    assert sorted(counted) == sorted(step_rows)
    assert len({len(plan) for plan in plans}) == 1
    assert all(batch.rows for plan in plans for batch in plan)


@given(ROWS, st.integers(1, 500), st.booleans())
def test_one_process_gets_the_plan_of_a_process_on_its_own(step_rows: list[RowSlice], budget_tokens: int, packed: bool) -> None:
    assert micro_batches_of(0, 1, step_rows, budget_tokens, packed=packed) == [
        MicroBatch(batch) for batch in plan_micro_batches(step_rows, budget_tokens, packed=packed)
    ]


@given(ROWS, st.integers(1, 8))
def test_no_process_has_more_than_a_row_more_to_do_than_another(step_rows: list[RowSlice], ranks: int) -> None:
    tokens = [sum(row.width for row in share) for share in shares(step_rows, ranks)]
    assert max(tokens) - min(tokens) <= max((row.width for row in step_rows), default=0)


def test_a_process_with_less_to_do_keeps_step_with_the_narrowest_row_without_weight() -> None:
    nine, five, three = rows(9, 5, 3)
    assert micro_batches_of(0, 2, [nine, five, three], 9, packed=False) == [MicroBatch([nine]), MicroBatch([three], counted=False)]
    assert micro_batches_of(1, 2, [nine, five, three], 9, packed=False) == [MicroBatch([three]), MicroBatch([five])]
    assert micro_batches_of(2, 3, [nine], 9, packed=False) == [MicroBatch([nine], counted=False)]
