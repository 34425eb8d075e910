"""How completions are laid out in rows and micro-batches before a model sees them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.gradient.rows import TokenGroup, build_rows, plan_micro_batches, plan_rows

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=10)
shapes = st.lists(st.tuples(st.integers(1, 60), lengths), min_size=1, max_size=8)


def group_of(prompt: int, completion_lengths: list[int]) -> TokenGroup:
    return TokenGroup(
        prompt_ids=list(range(prompt)),
        completions=[list(range(100, 100 + length)) for length in completion_lengths],
        behaviour_logprobs=[None] * len(completion_lengths),
        advantages=[1.0] * len(completion_lengths),
    )


@given(shapes, st.booleans(), st.integers(1, 200))
def test_every_completion_is_in_exactly_one_row_of_one_micro_batch(
    batch: list[tuple[int, list[int]]], packed: bool, budget: int
) -> None:
    groups = [group_of(*shape) for shape in batch]
    micro_batches = plan_micro_batches(plan_rows(groups, packed=packed, budget_tokens=budget), budget, packed=packed)
    placed = sorted((row.group, index) for rows in micro_batches for row in rows for index in range(row.start, row.stop))
    assert placed == [(g, c) for g, (_, completions) in enumerate(batch) for c in range(len(completions))]
    for rows in micro_batches:
        assert build_rows(groups, rows, packed=packed).input_ids.numel() <= budget or len(rows) == 1
        for row in rows:
            prompt, completions = batch[row.group]
            assert row.width == prompt + sum(completions[row.start : row.stop])
            assert row.width <= budget or row.stop - row.start == 1
            assert packed or row.stop - row.start == 1


@pytest.mark.slow
@given(shapes, st.booleans())
def test_laid_out_rows_hold_every_token_behind_its_own_prompt(batch: list[tuple[int, list[int]]], packed: bool) -> None:
    groups = [group_of(*shape) for shape in batch]
    rows = build_rows(groups, plan_rows(groups, packed=packed, budget_tokens=10_000), packed=packed)
    flat_ids, flat_positions = rows.input_ids.flatten(), rows.position_ids.flatten()
    for n, (group, completion) in enumerate(rows.sequences):
        tokens = list(groups[group].completions[completion])
        prompt = len(groups[group].prompt_ids)
        assert rows.mask[n].sum() == len(tokens)
        assert rows.targets[n, : len(tokens)].tolist() == tokens
        sources = rows.predicted_from[n, : len(tokens)]
        assert flat_ids[sources].tolist() == [prompt - 1, *tokens[:-1]]
        assert flat_positions[sources].tolist() == list(range(prompt - 1, prompt - 1 + len(tokens)))
    if packed:
        assert rows.layout is not None
        assert rows.layout.flatten().tolist() == [n for prompt, lengths in batch for n in (prompt, len(lengths), *lengths)]
        assert rows.input_ids.shape == (1, sum(prompt + sum(lengths) for prompt, lengths in batch))


def test_a_budget_below_the_group_cuts_the_group_and_not_a_completion() -> None:
    rows = plan_rows([group_of(10, [5, 5, 5, 30])], packed=True, budget_tokens=20)
    assert [(row.start, row.stop, row.width) for row in rows] == [(0, 2, 20), (2, 3, 15), (3, 4, 40)]


def test_numbers_per_token_are_padded_in_the_order_of_the_rows() -> None:
    groups = [group_of(3, [2, 1]), group_of(3, [3])]
    rows = build_rows(groups, plan_rows(groups, packed=False, budget_tokens=100), packed=False)
    values = [[[0.5, 0.25], None], [torch.tensor([1.0, 2.0, 3.0])]]
    assert rows.pad(values).tolist() == [[0.5, 0.25, 0.0], [0.0, 0.0, 0.0], [1.0, 2.0, 3.0]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt_ids": []}, "prompt is empty"),
        ({"completions": [[1], []]}, "completion 1 has no tokens"),
        ({"behaviour_logprobs": [[-1.0, -2.0], None]}, "completion 0 has 1 tokens but 2 behaviour logprobs"),
        ({"advantages": [1.0]}, "1 advantages"),
    ],
)
def test_a_group_whose_parts_do_not_fit_is_refused(wrong: dict[str, object], message: str) -> None:
    parts: dict[str, object] = {
        "prompt_ids": [1, 2],
        "completions": [[3], [4, 5]],
        "behaviour_logprobs": [[-1.0], None],
        "advantages": [1.0, -1.0],
    }
    with pytest.raises(ValueError, match=message):
        TokenGroup(**{**parts, **wrong})


def test_a_micro_batch_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="budget is 0"):
        plan_micro_batches([], 0, packed=True)
