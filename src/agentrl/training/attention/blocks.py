"""The calls of a layout as blocks that the CPU's kernel computes with little waste. Pure Python.

In a causal call aten's kernel computes up to 256 x 512 scores at once and throws those above the
diagonal away: half of all in a node of 512 tokens. So the causal square of a node is divided into
two smaller squares on the diagonal and the rectangle below it, in which all is seen:

    first tokens    square
    other tokens    rectangle    square

and the squares again, down to `SMALLEST`. Neighbours of equal size are one call.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from agentrl.training.attention.layout import NodeRun, TreeLayout

SMALLEST = 64  # tokens; below, calls cost more than they save


@dataclass(frozen=True)
class Block:
    """`count` times `queries` that attend to `keys`, causally or without a mask.

    The next queries and the next keys begin `stride` tokens after the ones before.
    """

    query: int  # index of the first query
    key: int  # index of the first key
    queries: int
    keys: int
    causal: bool
    count: int = 1
    stride: int = 1


def blocks(layout: TreeLayout) -> list[Block]:
    """The calls of `layout`. The causal ones come first; each query is in one of them."""
    parts = [part for run in layout.runs for part in _divided(run)]
    parts.sort(key=lambda block: not block.causal)
    return parts + [
        Block(s.query, s.key, s.query_end - s.query, s.key_end - s.key, causal=False)
        for s in layout.spans
    ]


def _divided(run: NodeRun) -> Iterator[Block]:
    squares = [(0, run.count, run.length, run.length)]  # offset, count, stride, size
    while squares:
        offset, count, stride, size = squares.pop()
        query, key = run.query + offset, run.key + offset
        if size <= SMALLEST:
            yield Block(query, key, size, size, True, count, stride)
            continue
        first = SMALLEST
        while 2 * first < size:
            first *= 2
        rest = size - first
        yield Block(query + first, key, rest, first, False, count, stride)
        if first == rest and (count == 1 or stride == size):  # halves side by side
            squares.append((offset, 2 * count, first, first))
        else:
            squares += [(offset, count, stride, first), (offset + first, count, stride, rest)]
