"""Version spans: joined, cut, and checked against the tokens that they are of."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from agentrl.policy_version import VersionSpan, check_spans, cut_spans, join_spans


def test_spans_that_meet_with_one_version_are_one_span() -> None:
    first = [VersionSpan(1, 0, 4), VersionSpan(2, 4, 6)]
    assert join_spans(first, [VersionSpan(2, 0, 3), VersionSpan(3, 3, 4)]) == [
        VersionSpan(1, 0, 4), VersionSpan(2, 4, 9), VersionSpan(3, 9, 10)
    ]  # fmt: skip


@given(st.lists(st.integers(0, 3), max_size=20), st.data())
def test_a_part_of_the_spans_says_of_each_token_what_the_whole_does(
    versions: list[int], data: st.DataObject
) -> None:
    begin = data.draw(st.integers(0, len(versions)))
    end = data.draw(st.integers(begin, len(versions)))
    spans: list[VersionSpan] = []
    for version in versions:
        spans = join_spans(spans, [VersionSpan(version, 0, 1)])
    part = cut_spans(spans, begin, end)
    check_spans(part, end - begin)
    assert [s.version for s in part for _ in range(s.start, s.end)] == versions[begin:end]


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [VersionSpan(0, 0, 2)],
        [VersionSpan(0, 1, 3)],
        [VersionSpan(0, 0, 1), VersionSpan(1, 2, 3)],
        [VersionSpan(0, 0, 4), VersionSpan(1, 4, 3)],
    ],
)
def test_spans_that_leave_a_token_without_its_version_are_refused(
    spans: list[VersionSpan],
) -> None:
    with pytest.raises(ValueError, match="do not cover 3 tokens"):
        check_spans(spans, 3)


def test_a_stored_span_has_these_fields_and_no_other() -> None:
    stored = TypeAdapter(VersionSpan)
    span = VersionSpan(4, 0, 2)
    assert stored.dump_python(span) == {"version": 4, "start": 0, "end": 2}
    assert stored.validate_python({"version": 4, "start": 0, "end": 2}) == span
    with pytest.raises(ValidationError):
        stored.validate_python({"version": 4, "start": 0, "end": 2, "by": "me"})
