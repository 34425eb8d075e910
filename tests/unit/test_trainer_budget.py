"""What a foreign group, and a sender, may cost in one step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.trainer.selection.group_tokens import GROUP_BUDGET, SENDER_BUDGET, PassCost, over_budget, usual_cost


def costs(node: str, *positions: int, local: bool = False) -> list[PassCost]:
    return [PassCost(node, local, each) for each in positions]


def test_usual_is_the_largest_of_the_possible_local_group_the_costliest_local_one_and_the_median() -> None:
    assert usual_cost([], 100) == 100.0
    assert usual_cost(costs("alpha", 50, local=True), 100) == 100.0
    assert usual_cost([*costs("alpha", 300, local=True), *costs("beta", 10, 20)], 100) == 300.0
    assert usual_cost(costs("beta", 200, 250, 9000), 100) == 250.0


def test_the_worked_example_and_a_group_over_its_budget() -> None:
    found = over_budget([*costs("alpha", 10, 10, 10, 10, local=True), *costs("beta", 401, 300, 200)], 100, 4.0)
    assert found == {4: GROUP_BUDGET}


def test_a_sender_s_groups_together_have_one_group_s_excess_and_the_costliest_go_first() -> None:
    quiet = costs("alpha", *[10] * 8, local=True)
    found = over_budget([*quiet, *costs("beta", 390, 100, 395, 350), *costs("gamma", 390)], 100, 4.0)
    assert found == {10: SENDER_BUDGET, 8: SENDER_BUDGET}
    assert over_budget([*quiet, *costs("beta", 399)], 100, 4.0) == {}


def test_local_groups_have_no_budget_and_an_infinite_factor_has_no_bound() -> None:
    assert over_budget(costs("alpha", 10**9, 10, 10, local=True), 100, 4.0) == {}
    assert over_budget([*costs("alpha", 10, 10, local=True), *costs("beta", 10**9)], 100, float("inf")) == {}


group_costs = st.lists(
    st.builds(PassCost, st.sampled_from(["beta", "gamma", "delta"]), st.booleans(), st.integers(1, 100_000)), max_size=20
)


@given(group_costs, st.integers(1, 5000), st.sampled_from([1.0, 2.0, 4.0]))
def test_what_is_left_is_within_both_budgets_and_no_usual_group_is_left_out(
    each: list[PassCost], usual: int, factor: float
) -> None:
    found = over_budget(each, usual, factor)
    allowed = usual_cost(each, usual)
    for node in {cost.node for cost in each}:
        kept = [cost.positions for index, cost in enumerate(each) if cost.node == node and not cost.is_local and index not in found]
        assert all(positions <= factor * allowed for positions in kept)
        assert sum(kept) <= (len(kept) + factor - 1) * allowed
    assert all(not each[index].is_local and each[index].positions > allowed for index in found)
