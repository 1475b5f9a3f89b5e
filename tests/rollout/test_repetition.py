"""What counts as going round in circles."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.agents.repetition import LOOP_TIMES, LOOP_TOKENS, call_key, loops, repeats


def call(name: str = "find", result: str = "B7", **arguments: Any) -> bytes:
    return call_key(name, arguments, result)


def test_a_turn_whose_calls_were_made_before_with_the_same_results_is_a_repetition() -> None:
    earlier = {call(item="chain", deep={"a": 1, "b": 2}), call("add")}
    assert repeats([call(deep={"b": 2, "a": 1}, item="chain")], earlier)
    assert repeats([call("add"), call(item="chain", deep={"a": 1, "b": 2})], earlier)


@pytest.mark.parametrize(
    "calls",
    [
        [],  # a turn without calls asks nothing, new or not
        [call(item="rope")],
        [call("stock", item="chain")],
        [call(item="chain", result="B8")],  # it is another one by now
        [call(item="chain"), call(item="rope")],  # one of them is new
    ],
)
def test_a_turn_that_finds_out_something_new_is_no_repetition(calls: list[bytes]) -> None:
    assert not repeats(calls, {call(item="chain")})


@given(
    thought=st.lists(st.integers(0, 9), max_size=300),
    stretch=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    times=st.integers(LOOP_TIMES, 40),
    cut=st.integers(0, 39),
)
def test_a_stretch_over_and_over_is_a_loop_wherever_it_is_cut_off(
    thought: list[int], stretch: list[int], times: int, cut: int
) -> None:
    tail = stretch * max(times, -(-LOOP_TOKENS // len(stretch))) + stretch[: cut % len(stretch)]
    assert loops(thought + tail)
    assert not loops([*thought, *tail, 10])  # it has come out of it


_STRETCHES = st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.integers(1, 30))


@given(st.lists(_STRETCHES, max_size=3))
def test_loops_are_what_comparing_all_periods_finds(parts: list[tuple[list[int], int]]) -> None:
    ids = [token for stretch, times in parts for token in stretch * times][:300]
    assert loops(ids) == any(
        _period_of_tail(ids, length) * LOOP_TIMES <= length
        for length in range(LOOP_TOKENS, len(ids) + 1)
    )


def _period_of_tail(ids: Sequence[int], length: int) -> int:
    tail = ids[len(ids) - length :]
    return next(p for p in range(1, length + 1) if tail[p:] == tail[: length - p])


def test_a_long_turn_that_says_one_thing_after_the_other_is_no_loop() -> None:
    assert not loops(list(range(5000)))
    assert not loops([1, 2, 3] * 20)  # 60 tokens: a row of dashes, a small table
    assert not loops(list(range(100)) * (LOOP_TIMES - 1))
