"""The planner's invariants, as its docstrings state them."""

from hypothesis import given
from hypothesis import strategies as st

from agentrl.training.planner import assign_rows, pack_sequences

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


def test_sorting_keeps_padding_small() -> None:
    lengths = [10, 100] * 16
    plan = pack_sequences(lengths, budget=800)
    padded = sum(len(batch) * max(lengths[index] for index in batch) for batch in plan)
    assert padded == sum(lengths)
