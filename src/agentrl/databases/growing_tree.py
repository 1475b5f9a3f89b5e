"""A token tree while it grows: branches that begin one after the other, and tokens at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from agentrl.databases.token_tree import COLUMNS, Node, TokenTree

Ids = Sequence[int] | NDArray[np.integer[Any]]

_ROOM = 256  # initial capacity of a column, in tokens


@dataclass(frozen=True, slots=True)
class _Branch:
    """A path that shares the first `shared` tokens of branch `parent`.

    Its own tokens begin at index `start` and end where those of the next branch begin.
    """

    parent: int | None
    shared: int
    start: int


class GrowingTree:
    """Tokens in order of arrival. Only the last branch grows.

    Each column is one array with spare capacity, so appending takes amortised constant time. A
    column without values has no array.
    """

    def __init__(self) -> None:
        self._branches: list[_Branch] = []
        self._columns: dict[str, NDArray[Any]] = {}
        self._n_tokens = 0
        self._column("ids", 0)

    def __len__(self) -> int:
        """Number of tokens in all branches; shared tokens count once."""
        return self._n_tokens

    def length(self, branch: int) -> int:
        """Number of tokens on a branch, shared ones included. -1 is the last branch."""
        start, end = self._own(branch)
        return self._branches[branch].shared + end - start

    def begin(self, parent: int | None = None, shared: int = 0) -> int:
        """Begin a branch that shares the first `shared` tokens of `parent`. Returns its number."""
        assert shared == 0 if parent is None else 0 < shared <= self.length(parent)
        self._branches.append(_Branch(parent, shared, self._n_tokens))
        return len(self._branches) - 1

    def append(self, ids: Ids, columns: Mapping[str, ArrayLike] | None = None) -> None:
        """Append tokens to the last branch.

        `columns`: values by column name, one per token or one for all. Other columns get their
        fill. Raises ValueError for an unknown column.
        """
        end = self._n_tokens + len(ids)
        self._column("ids", end)[self._n_tokens : end] = ids
        for name, values in (columns or {}).items():
            self._column(name, end)[self._n_tokens : end] = values
        self._n_tokens = end

    def cut(self, length: int) -> None:
        """Remove the tokens of the last branch after its first `length`."""
        branch = self._branches[-1]
        assert length >= branch.shared, "tokens of an earlier branch cannot be taken back"
        end = branch.start + length - branch.shared
        for name, values in self._columns.items():
            values[end : self._n_tokens] = COLUMNS[name].fill
        self._n_tokens = end

    def drop(self) -> None:
        """Remove the last branch."""
        self.cut(self._branches[-1].shared)
        self._branches.pop()

    def ids(self, branch: int, length: int | None = None) -> NDArray[np.int32]:
        """The ids along a branch, shared ones included: all, or the first `length`."""
        return self._along(branch, "ids", self.length(branch) if length is None else length)

    def own_ids(self, branch: int) -> NDArray[np.int32]:
        """The ids of a branch without shared ones, as a view."""
        start, end = self._own(branch)
        return self._column("ids", self._n_tokens)[start:end]

    def line(self, branch: int) -> TokenTree:
        """The tokens along a branch, shared ones included, as a tree of one node."""
        length = self.length(branch)
        columns = {name: self._along(branch, name, length) for name in self._columns}
        return TokenTree.line(columns.pop("ids"), **columns)

    def tree(self) -> TokenTree:
        """The tree of all branches. A branch that leaves a node in the middle splits the node.

        A branch without own tokens adds no node.
        """
        stretches = self._depth_first()
        number = {id(stretch): index for index, stretch in enumerate(stretches)}
        ends = np.cumsum([stretch.length for stretch in stretches], dtype=np.int64).tolist()
        nodes = tuple(
            Node(start, end, -1 if stretch.parent is None else number[id(stretch.parent)])
            for stretch, start, end in zip(stretches, [0, *ends], ends, strict=False)
        )
        columns = {}
        for name in self._columns:
            values = self._column(name, self._n_tokens)
            pieces = [values[stretch.start : stretch.end] for stretch in stretches]
            columns[name] = np.concatenate(pieces) if pieces else values[:0]
        return TokenTree(nodes, columns)

    def _column(self, name: str, n_tokens: int) -> NDArray[Any]:
        """A column with capacity for `n_tokens`; unused entries have the fill."""
        if name not in COLUMNS:
            raise ValueError(f"no column is called {name}; there are {', '.join(COLUMNS)}")
        values = self._columns.get(name)
        held = 0 if values is None else len(values)
        if values is None or held < n_tokens:
            room = max(n_tokens, 2 * held, _ROOM)
            grown = np.full(room, COLUMNS[name].fill, dtype=COLUMNS[name].dtype)
            if values is not None:
                grown[:held] = values
            self._columns[name] = values = grown
        return values

    def _own(self, branch: int) -> tuple[int, int]:
        """Start and end index of a branch's own tokens."""
        number = range(len(self._branches))[branch]
        last = number + 1 == len(self._branches)
        end = self._n_tokens if last else self._branches[number + 1].start
        return self._branches[number].start, end

    def _along(self, branch: int, name: str, length: int) -> NDArray[Any]:
        """The first `length` entries of a column along a branch."""
        values = self._column(name, self._n_tokens)
        pieces = []
        at: int | None = branch
        while at is not None:
            here = self._branches[at]
            if length > here.shared:
                pieces.append(values[here.start : here.start + length - here.shared])
            length, at = min(length, here.shared), here.parent
        return np.concatenate(pieces[::-1]) if pieces else values[:0]

    def _depth_first(self) -> list["_Stretch"]:
        roots: list[_Stretch] = []
        ends: list[_Stretch] = []  # the last stretch of each branch
        for number, branch in enumerate(self._branches):
            (start, end), parent = self._own(number), None
            if branch.parent is not None:
                parent = _ending_at(branch.shared, ends, branch.parent)
            if parent is not None and start == end:
                ends.append(parent)
                continue
            stretch = _Stretch(start, end, branch.shared, parent)
            (roots if parent is None else parent.children).append(stretch)
            ends.append(stretch)
        ordered: list[_Stretch] = []
        waiting = roots[::-1]
        while waiting:
            stretch = waiting.pop()
            ordered.append(stretch)
            waiting.extend(reversed(stretch.children))
        return ordered


@dataclass(slots=True, eq=False)
class _Stretch:
    """Tokens `start` to `end`, in order of arrival, that will form a node."""

    start: int
    end: int
    before: int  # number of tokens before it on its path
    parent: "_Stretch | None"
    children: list["_Stretch"] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.end - self.start


def _ending_at(depth: int, ends: list[_Stretch], branch: int) -> _Stretch:
    """The stretch on a branch's path that ends at `depth`; a longer one is split there."""
    stretch = ends[branch]
    while stretch.before >= depth:
        assert stretch.parent is not None, "a branch shares tokens that its parent does not have"
        stretch = stretch.parent
    cut = stretch.start + depth - stretch.before
    if stretch.end > cut:
        rest = _Stretch(cut, stretch.end, depth, stretch, stretch.children)
        for child in rest.children:
            child.parent = rest
        stretch.end, stretch.children = cut, [rest]
        ends[:] = [rest if end is stretch else end for end in ends]
    return stretch
