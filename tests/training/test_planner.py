"""The planner's invariants, as its docstrings state them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.training.data.planner import RowCost, assign_rows, pack_sequences, plan_ranks

COSTS = st.lists(st.floats(min_value=0.5, max_value=1e5), max_size=60)
LENGTHS = st.lists(st.integers(min_value=1, max_value=500), max_size=60)


@given(COSTS, st.integers(1, 8))
def test_every_row_is_on_one_rank_and_ranks_differ_by_one_row_at_most(
    costs: list[float], ranks: int
) -> None:
    plan = assign_rows(costs, ranks)
    assert len(plan) == ranks
    assert sorted(index for rows in plan for index in rows) == list(range(len(costs)))
    loads = [sum(costs[index] for index in rows) for rows in plan]
    assert max(loads) - min(loads) <= max(costs, default=0.0) * (1 + 1e-9)
    assert plan == assign_rows(costs, ranks)
    if len(costs) >= ranks:
        assert all(plan)


# rows of a few groups, whose prompts cost from nothing to more than all the rest
GROUPS = st.lists(
    st.builds(RowCost, st.sampled_from("abcd"), st.floats(0.5, 100), st.sampled_from([0, 5, 300])),
    max_size=40,
)


@given(GROUPS, st.integers(1, 8))
def test_every_row_of_every_group_is_on_one_rank(rows: list[RowCost], ranks: int) -> None:
    plan = plan_ranks(rows, ranks)
    assert len(plan.rows) == len(plan.costs) == ranks
    assert sorted(index for indices in plan.rows for index in indices) == list(range(len(rows)))
    assert all(list(indices) == sorted(indices) for indices in plan.rows)
    assert plan == plan_ranks(rows, ranks)
    assert plan.balance >= 1.0


@given(GROUPS, st.integers(1, 8))
def test_a_rank_costs_what_its_rows_and_each_of_its_prompts_once_cost(
    rows: list[RowCost], ranks: int
) -> None:
    plan = plan_ranks(rows, ranks)
    for indices, cost in zip(plan.rows, plan.costs, strict=True):
        groups = {rows[index].group for index in indices}
        shared = sum(
            max(rows[index].shared for index in indices if rows[index].group == group)
            for group in groups
        )
        assert cost == pytest.approx(sum(rows[index].own for index in indices) + shared)


@given(GROUPS, st.integers(1, 8))
def test_dividing_groups_never_makes_a_step_longer(rows: list[RowCost], ranks: int) -> None:
    groups = sorted({row.group for row in rows})
    whole = [
        sum(row.own for row in rows if row.group == group)
        + max(row.shared for row in rows if row.group == group)
        for group in groups
    ]
    undivided = [sum(whole[index] for index in mine) for mine in assign_rows(whole, ranks)]
    assert max(plan_ranks(rows, ranks).costs) <= max(undivided) * 1.011


def test_siblings_stay_together_while_ranks_are_balanced() -> None:
    rows = [RowCost(group, 10, 100) for group in "abcd" for _ in range(4)]
    plan = plan_ranks(rows, 2)
    assert [{rows[index].group for index in indices} for indices in plan.rows] == [
        {"a", "c"},
        {"b", "d"},
    ]
    assert plan.balance == 1.0


def test_a_group_is_divided_where_it_would_keep_the_other_ranks_waiting() -> None:
    rows = [RowCost("a", 10, 5)] * 8
    plan = plan_ranks(rows, 4)
    assert [len(indices) for indices in plan.rows] == [2, 2, 2, 2]
    assert plan.costs == (25, 25, 25, 25)


def test_a_group_is_not_divided_where_its_prompt_is_nearly_all() -> None:
    plan = plan_ranks([RowCost("a", 1, 1000)] * 4, 2)
    assert sorted(len(indices) for indices in plan.rows) == [0, 4]


@given(LENGTHS, st.integers(1, 2000), st.integers(1, 64))
def test_micro_batches_hold_every_sequence_once_within_the_budget(
    lengths: list[int], budget: int, multiple: int
) -> None:
    plan = pack_sequences(lengths, budget, multiple)
    assert sorted(index for batch in plan for index in batch) == list(range(len(lengths)))
    for batch in plan:
        longest = max(lengths[index] for index in batch)
        padded = -(-longest // multiple) * multiple
        assert len(batch) * padded <= budget or len(batch) == 1
    flat = [lengths[index] for batch in plan for index in batch]
    assert flat == sorted(lengths, reverse=True), "like lengths stand together"


def test_a_row_over_the_budget_is_alone() -> None:
    assert pack_sequences([300, 10, 10], budget=100) == [[0], [1, 2]]


def test_with_equal_lengths_a_micro_batch_has_sequences_of_one_length_only() -> None:
    plan = pack_sequences([30, 10, 30, 10, 11], budget=100, equal_lengths=True)
    assert plan == [[0, 2], [4], [1, 3]]


def test_sorting_keeps_padding_small() -> None:
    lengths = [10, 100] * 16
    plan = pack_sequences(lengths, budget=800)
    padded = sum(len(batch) * max(lengths[index] for index in batch) for batch in plan)
    assert padded == sum(lengths)
