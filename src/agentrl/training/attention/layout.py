"""The layout of a forest's nodes in one line of tokens, and the attention calls that it needs.

Pure Python and numpy. Nodes are in depth-first order, so that the descendants of a node are one
contiguous slice of tokens directly after it:

    prompt | branch | branch of the branch | another branch | another prompt | ...

A token attends to all tokens of its node's ancestors, and causally within its node. This needs one
causal call per node (`runs`; neighbours of equal length share a call) and, for each inner node, one
call without a mask in which all its descendants attend to it (`spans`). No masked score is computed
and no token is copied. A sequence is a tree of one node. Packed sequences are a forest without
inner nodes, which needs causal calls only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class NodeRun:
    """`count` neighbouring nodes of `length` tokens each, every one attending to itself."""

    query: int  # index of their first query
    key: int  # index of their first key
    count: int
    length: int


@dataclass(frozen=True)
class AttentionSpan:
    """The queries of some descendants of a node, all of which attend to all keys of the node."""

    query: int
    query_end: int
    key: int
    key_end: int


class TreeLayout:
    """A forest in one line.

    Invariants: every token is in one node; a node's parent stands before it, and only other
    descendants of that parent stand between the two.
    """

    def __init__(
        self,
        parents: Sequence[int],
        lengths: Sequence[int],
        queries: tuple[int, int] | None = None,
    ) -> None:
        """`parents` (-1: a root) and `lengths` in tokens of the nodes, in depth-first order.

        `queries`: range (half open) of the tokens that are queries; None means all. All tokens are
        keys. Raises `ValueError` for empty nodes and for another order.
        """
        self.parents = tuple(parents)
        self.lengths = tuple(lengths)
        self.starts, depths, self.ends = _places(self.parents, self.lengths)
        self.n_tokens = sum(self.lengths)
        self.queries = (0, self.n_tokens) if queries is None else queries
        self._depths = depths
        self._restricted: dict[tuple[int, int], TreeLayout] = {}

    @property
    def n_queries(self) -> int:
        """The number of queries."""
        return self.queries[1] - self.queries[0]

    @cached_property
    def longest_path(self) -> int:
        """Tokens from a root to the deepest leaf."""
        return max((d + n for d, n in zip(self._depths, self.lengths, strict=True)), default=0)

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """Position of each query in its sequence, counted from the root, [n_queries]."""
        every = np.arange(self.n_tokens)
        offsets = np.asarray(self._depths) - np.asarray(self.starts)
        positions: NDArray[np.int64] = every + np.repeat(offsets, self.lengths)
        return positions[slice(*self.queries)]

    @cached_property
    def visible_until(self) -> NDArray[np.int64]:
        """One past the last token that sees each token, [n_tokens].

        Token q sees token k if and only if k <= q < visible_until[k].
        """
        return np.repeat(np.asarray(self.ends), self.lengths)

    @cached_property
    def runs(self) -> tuple[NodeRun, ...]:
        """The causal calls. Query indices count from the first query."""
        runs: list[NodeRun] = []
        for start, end in self._query_pieces():
            length = end - start
            last = runs[-1] if runs else None
            if last is not None and last.length == length:
                runs[-1] = NodeRun(last.query, last.key, last.count + 1, length)
            else:
                runs.append(NodeRun(start - self.queries[0], start, 1, length))
        return tuple(runs)

    @cached_property
    def spans(self) -> tuple[AttentionSpan, ...]:
        """The calls without a mask. Query indices count from the first query."""
        first, last = self.queries
        spans = []
        for start, length, end in zip(self.starts, self.lengths, self.ends, strict=True):
            # A node within which the queries begin or end is split there.
            cuts = [start, *(cut for cut in (first, last) if start < cut < start + length)]
            for key, key_end in zip(cuts, [*cuts[1:], start + length], strict=True):
                query, query_end = max(key_end, first), min(end, last)
                if query < query_end:
                    spans.append(AttentionSpan(query - first, query_end - first, key, key_end))
        return tuple(spans)

    @cached_property
    def pairs(self) -> int:
        """Number of pairs of a query and a key that it sees: the cost of attention."""
        causal = sum(run.count * run.length * (run.length + 1) // 2 for run in self.runs)
        return causal + sum(
            (span.query_end - span.query) * (span.key_end - span.key) for span in self.spans
        )

    def restrict(self, start: int, end: int) -> "TreeLayout":
        """The layout with the same keys and only tokens `start` to `end` (half open) as queries.

        Equal calls return one object. Each layer makes them, and kernels keep their index tensors
        and masks by layout.
        """
        if not 0 <= start <= end <= self.n_tokens:
            raise ValueError(f"queries {start} to {end} of {self.n_tokens} tokens")
        queries = (start, end)
        if queries not in self._restricted:
            self._restricted[queries] = TreeLayout(self.parents, self.lengths, queries)
        return self._restricted[queries]

    def _query_pieces(self) -> list[tuple[int, int]]:
        """Start and end of the queries within each node."""
        first, last = self.queries
        pieces = [
            (max(start, first), min(start + length, last))
            for start, length in zip(self.starts, self.lengths, strict=True)
        ]
        return [(start, end) for start, end in pieces if start < end]


def _places(
    parents: Sequence[int], lengths: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """For each node: its first token, the tokens before it on its path, the end of its subtree."""
    starts: list[int] = []
    depths: list[int] = []
    way: list[int] = []  # path from the root to the last node
    position = 0
    for node, (parent, length) in enumerate(zip(parents, lengths, strict=True)):
        while way and way[-1] != parent:
            way.pop()
        if length <= 0 or (parent != -1 and not way):
            raise ValueError(
                f"node {node} ({length} tokens, parent {parent}) is empty or not in depth-first "
                "order"
            )
        way.append(node)
        starts.append(position)
        depths.append(0 if parent == -1 else depths[parent] + lengths[parent])
        position += length
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    for node in reversed(range(len(parents))):
        if parents[node] >= 0:
            ends[parents[node]] = max(ends[parents[node]], ends[node])
    return tuple(starts), tuple(depths), tuple(ends)
