"""Floors by the real scorers."""

from __future__ import annotations

from lab.floors import scorers, screen
from shared.config import TaskSpec


async def test_the_known_constant_is_found_and_a_sum_has_none() -> None:
    logic = TaskSpec(
        dataset="propositional_logic",
        config={"min_vars": 2, "max_vars": 3, "min_statements": 2, "max_statements": 3, "min_complexity": 1, "max_complexity": 2},
    )
    board = TaskSpec(dataset="binary_matrix", config={"min_n": 3, "max_n": 3})
    total = TaskSpec(dataset="chain_sum")
    async with scorers([logic, board, total]) as pool:
        floors = await screen(pool, [logic, board, total, total], questions=30)
    assert [floor.dataset for floor in floors] == ["propositional_logic", "binary_matrix", "chain_sum"]
    assert floors[0].out and "∨" in floors[0].constant
    # The matrix as it stands in the question is its own answer where every 1 touches a 0.
    assert floors[1].copy_rate > 0.0 and not floors[1].out
    assert floors[2].constant_rate < 0.1 and not floors[2].out
    assert all(floor.questions == 30 for floor in floors)
