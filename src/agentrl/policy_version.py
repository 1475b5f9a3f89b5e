"""Spans of tokens by the policy version that sampled them.

Both the answers of `inference` and the stored turns of `databases` have them. These packages do not
import each other, so the type is defined here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens `start <= i < end` were sampled by policy `version`.

    Stored as `{version, start, end}`; a stored span with other fields is refused.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # read by the documents that hold spans

    version: int
    start: int
    end: int


def join_spans(first: Sequence[VersionSpan], then: Sequence[VersionSpan]) -> list[VersionSpan]:
    """Join the spans of two pieces of one output. Positions of `then` count from its begin."""
    spans = list(first)
    offset = spans[-1].end if spans else 0
    for span in then:
        moved = VersionSpan(span.version, span.start + offset, span.end + offset)
        if spans and spans[-1].version == moved.version:
            spans[-1] = replace(spans[-1], end=moved.end)
        else:
            spans.append(moved)
    return spans


def cut_spans(spans: Sequence[VersionSpan], begin: int, end: int) -> list[VersionSpan]:
    """Return the spans of tokens `begin` to `end` (half open), with positions from `begin`."""
    return [
        VersionSpan(span.version, max(span.start, begin) - begin, min(span.end, end) - begin)
        for span in spans
        if span.start < end and span.end > begin
    ]


def check_spans(spans: Sequence[VersionSpan], length: int) -> None:
    """Raise ValueError unless the spans cover `length` tokens in order and without gaps."""
    if not spans_cover(spans, length):
        raise ValueError(f"the version spans do not cover {length} tokens: {show_spans(spans)}")


def spans_cover(spans: Sequence[VersionSpan], length: int) -> bool:
    """Whether the spans cover each of `length` tokens exactly once and in order."""
    end = 0
    for span in spans:
        if span.start != end or span.end < end:
            return False
        end = span.end
    return end == length


def show_spans(spans: Sequence[VersionSpan]) -> str:
    """Format the spans for display."""
    return ", ".join(f"v{span.version} [{span.start}, {span.end})" for span in spans) or "none"
