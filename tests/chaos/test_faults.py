"""Faults drawn from a seed: all that must be among them are, and none hits what is still down."""

from itertools import pairwise

from faults import REQUIRED, Fault, draw_faults, role
from hypothesis import given
from hypothesis import strategies as st

MEMBERS = (
    "mongod", "tools", "judge", "service-0", "service-1", "trainer", "sampler-0", "sampler-1",
)  # fmt: skip

draws = st.builds(
    lambda seed, count, spacing, lease: draw_faults(
        seed, count, count * spacing, MEMBERS, lease_s=lease
    ),
    st.integers(0, 10**6), st.integers(1, 40), st.floats(2, 20), st.floats(1, 10),
)  # fmt: skip


@given(st.integers(0, 1000))
def test_the_same_seed_draws_the_same_faults(seed: int) -> None:
    assert draw_faults(seed, 30, 300, MEMBERS, 4) == draw_faults(seed, 30, 300, MEMBERS, 4)


@given(st.integers(0, 10**6), st.integers(len(REQUIRED), 40))
def test_all_required_faults_are_drawn(seed: int, count: int) -> None:
    faults = draw_faults(seed, count, 10.0 * count, MEMBERS, 4)
    assert len(faults) == count
    assert {(fault.kind, role(fault.target)) for fault in faults} >= set(REQUIRED)


@given(draws)
def test_a_member_has_come_back_before_its_next_fault(faults: list[Fault]) -> None:
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)
    for member in MEMBERS:
        of_member = [fault for fault in faults if fault.target == member]
        assert all(first.ends_s < then.at_s for first, then in pairwise(of_member))
