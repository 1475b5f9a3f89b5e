"""The tokens of a Record as one value: a tree of nodes, and columns with one entry per token.

    COLUMNS     the per-token columns: dtype, fill and stored field of each, in one table
    TokenTree   nodes and columns, `take`, `concat`, the walk, `pack` and `unpack`

A conversation grows one (`growing_tree.py`), a row of the database is one, the sequences that are
trained are its paths, and a micro-batch concatenates those. A new per-token column is one line in
`COLUMNS`, a value where its tokens are made, and a use. It is `optional`, because rows that were
stored before lack it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from agentrl.databases.arrays import FLOAT32, INT32, UINT8

Places = NDArray[np.int64]  # of tokens in a tree


@dataclass(frozen=True, slots=True)
class Column:
    """A property of every token.

    fill: its value on tokens that no model made, and wherever nobody gave another
    stored: its field in a `record_data` document; None: it is not stored, the trainer makes it
    optional: what a document without that field means. True: the fill on every token, as for a
        column that is newer than the rows of a run. False: the document is damaged.
    """

    dtype: np.dtype[Any]
    fill: float
    stored: str | None
    optional: bool = False


COLUMNS: dict[str, Column] = {
    "ids": Column(INT32, 0, "input_ids"),
    "mask": Column(UINT8, 0, "loss_mask"),  # 1 on the model's own tokens, which are trained
    "logprobs": Column(FLOAT32, 0.0, "logprobs"),  # the sampler's
    "versions": Column(INT32, -1, "versions"),  # of the policy that sampled the token
    "advantages": Column(FLOAT32, 0.0, "advantages"),
    "staleness": Column(INT32, 0, None),  # steps that the trained weights are newer
}


class Node(NamedTuple):
    """A stretch of tokens that belong together: `start` to `end` (half open) of their tree.

    `parent` is the index of the node it continues, -1 for a root.
    """

    start: int
    end: int
    parent: int

    @property
    def length(self) -> int:
        """Tokens of the node, without those it continues."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """Tokens and what is known of each. `tree["ids"]` is a column, a read-only array [n_tokens].

    Nodes stand in depth-first order, so that a node's descendants follow it without a gap; with
    several roots it is a forest. Columns that are not given have their fill everywhere, and a
    number in place of an array stands for all tokens. Raises `ValueError` where nodes and columns
    do not fit together.

    An example. The prompt is [1, 2, 3]. Turn 0 generates [10, 11] by policy version 4, its tool
    call is answered by [20, 21], and turn 1 generates [12, 13] while the weights change to version
    5. Then the context is rewritten: a new segment begins with the prompt [1, 2, 3, 30], shares
    three tokens with the first, and turn 2 generates [14]:

    >>> from agentrl.databases.growing_tree import GrowingTree
    >>> growing = GrowingTree()
    >>> first = growing.begin()
    >>> growing.append([1, 2, 3])
    >>> growing.append([10, 11], {"mask": 1, "logprobs": [-0.5, -0.25], "versions": 4})
    >>> growing.append([20, 21])
    >>> growing.append([12, 13], {"mask": 1, "logprobs": [-1.0, -0.125], "versions": [4, 5]})
    >>> second = growing.begin(parent=first, shared=3)
    >>> growing.append([30])
    >>> growing.append([14], {"mask": 1, "logprobs": [-2.0], "versions": 5})

    The tree has the shared prompt once, and under it what follows it in each segment:

    >>> tree = growing.tree()
    >>> [tuple(node) for node in tree.nodes]
    [(0, 3, -1), (3, 9, 0), (9, 11, 0)]
    >>> tree["ids"].tolist()
    [1, 2, 3, 10, 11, 20, 21, 12, 13, 30, 14]
    >>> tree["mask"].tolist()
    [0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 1]
    >>> tree["logprobs"].tolist()
    [0.0, 0.0, 0.0, -0.5, -0.25, 0.0, 0.0, -1.0, -0.125, 0.0, -2.0]
    >>> tree["versions"].tolist()
    [-1, -1, -1, 4, 4, -1, -1, 4, 5, -1, 5]

    Its paths are what is trained, one sequence for each segment:

    >>> [tree.take(tree.places(path))["ids"].tolist() for path in tree.paths()]
    [[1, 2, 3, 10, 11, 20, 21, 12, 13], [1, 2, 3, 30, 14]]
    """

    nodes: tuple[Node, ...]
    columns: Mapping[str, NDArray[Any]]

    def __post_init__(self) -> None:
        n_tokens = len(self.columns["ids"])
        unknown = sorted(set(self.columns).difference(COLUMNS))
        if unknown:
            raise ValueError(f"no column is called {unknown[0]}; there are {', '.join(COLUMNS)}")
        complete: dict[str, NDArray[Any]] = {}
        for name, column in COLUMNS.items():
            values = np.asarray(self.columns.get(name, column.fill), dtype=column.dtype)
            if values.ndim == 0:
                values = np.broadcast_to(values, n_tokens)  # one entry, whatever n_tokens is
            if values.shape != (n_tokens,):
                raise ValueError(f"{name} has {len(values)} tokens where ids has {n_tokens}")
            complete[name] = values
        object.__setattr__(self, "columns", complete)
        _check_nodes(self.nodes, n_tokens)

    @classmethod
    def line(cls, ids: ArrayLike, **columns: ArrayLike) -> Self:
        """A tree of one node, which is what a sequence is. `columns`: beside the ids, by name."""
        tokens = np.asarray(ids, dtype=COLUMNS["ids"].dtype)
        nodes = (Node(0, len(tokens), -1),) if len(tokens) else ()
        return cls(nodes, {"ids": tokens, **{n: np.asarray(v) for n, v in columns.items()}})

    @classmethod
    def concat(cls, trees: Sequence["TokenTree"]) -> Self:
        """The trees beside each other, as one forest. There must be at least one."""
        nodes: list[Node] = []
        n_tokens = 0
        for tree in trees:
            first = len(nodes)
            nodes += [
                Node(n_tokens + start, n_tokens + end, first + parent if parent >= 0 else -1)
                for start, end, parent in tree.nodes
            ]
            n_tokens += len(tree)
        columns = {name: np.concatenate([tree[name] for tree in trees]) for name in COLUMNS}
        return cls(tuple(nodes), columns)

    def __len__(self) -> int:
        return len(self.columns["ids"])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenTree):
            return NotImplemented
        return self.nodes == other.nodes and all(
            values.tobytes() == other[name].tobytes() for name, values in self.columns.items()
        )

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    @property
    def parents(self) -> tuple[int, ...]:
        """Of each node, -1 for a root."""
        return tuple(node.parent for node in self.nodes)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of each node, its tokens."""
        return tuple(node.length for node in self.nodes)

    def with_columns(self, **columns: ArrayLike) -> Self:
        """The same tree with these columns in place of its own."""
        given = {name: np.asarray(values) for name, values in columns.items()}
        return type(self)(self.nodes, {**self.columns, **given})

    def take(self, places: NDArray[np.integer[Any]]) -> "TokenTree":
        """The tokens at `places`, in that order, as one line."""
        nodes = (Node(0, len(places), -1),) if len(places) else ()
        return TokenTree(nodes, {name: values[places] for name, values in self.columns.items()})

    def paths(self) -> list[list[int]]:
        """The walk: of each leaf, in depth-first order, the nodes from its root down to it."""
        inner = {node.parent for node in self.nodes}
        above: list[int] = []  # the way to the node that the walk is at
        paths = []
        for index, node in enumerate(self.nodes):
            while above and above[-1] != node.parent:
                above.pop()
            above.append(index)
            if index not in inner:
                paths.append(list(above))
        return paths

    def places(self, nodes: Sequence[int]) -> Places:
        """Where the tokens of `nodes` stand, node by node."""
        stretches = [np.arange(self.nodes[n].start, self.nodes[n].end) for n in nodes]
        return np.concatenate(stretches) if stretches else np.empty(0, dtype=np.int64)

    @property
    def pairs(self) -> int:
        """Pairs of a token and one that it sees: itself, or one before it on its path."""
        pairs = 0
        before: list[int] = []  # of each node, tokens on its path that stand before it
        for node in self.nodes:
            above = before[node.parent] + self.nodes[node.parent].length if node.parent >= 0 else 0
            before.append(above)
            pairs += node.length * above + node.length * (node.length + 1) // 2
        return pairs

    def pack(self) -> dict[str, Any]:
        """The fields of a `record_data` document that hold the tree: see `COLUMNS`.

        Columns are little-endian `bytes`, nodes are documents.
        """
        columns = {
            column.stored: self[name].tobytes()
            for name, column in COLUMNS.items()
            if column.stored is not None
        }
        nodes = [node._asdict() for node in self.nodes]
        return {"n_tokens": len(self), "nodes": nodes, **columns}

    @classmethod
    def unpack(cls, document: Mapping[str, Any]) -> Self:
        """The tree of a document, without a copy of its columns.

        Fields that are not the tree's are left alone. An optional column that is not there has its
        fill. Raises `ValueError` if the tree's fields do not fit together, or are not there.
        """
        may_lack = {column.stored for column in COLUMNS.values() if column.optional}
        lacking = sorted(packed_fields() - may_lack - set(document))
        if lacking:
            raise ValueError(f"{lacking[0]} is not there")
        columns: dict[str, NDArray[Any]] = {}
        for name, column in COLUMNS.items():
            if column.stored is None or column.stored not in document:
                continue
            columns[name] = np.frombuffer(document[column.stored], dtype=column.dtype)
            if len(columns[name]) != document["n_tokens"]:
                raise ValueError(
                    f"{column.stored} has {len(columns[name])} tokens where n_tokens says "
                    f"{document['n_tokens']}"
                )
        return cls(tuple(Node(**node) for node in document["nodes"]), columns)


def common_prefix(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many ids two lines of tokens begin with alike."""
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length


def packed_fields() -> set[str]:
    """The names of the fields that `TokenTree.pack` makes."""
    stored = {column.stored for column in COLUMNS.values() if column.stored is not None}
    return {"n_tokens", "nodes", *stored}


def _check_nodes(nodes: Sequence[Node], n_tokens: int) -> None:
    """Raise ValueError unless nodes cover the tokens as trees in depth-first order."""
    position = 0
    above: list[int] = []  # the way to the node
    for index, node in enumerate(nodes):
        while above and above[-1] != node.parent:
            above.pop()
        on_the_way = above[-1] if above else -1
        if node.start != position or node.end <= node.start or node.parent != on_the_way:
            raise ValueError(
                f"node {index} ({node.start}, {node.end}, parent {node.parent}) is no part of a "
                "tree in depth-first order"
            )
        above.append(index)
        position = node.end
    if position != n_tokens:
        raise ValueError(f"its nodes end at token {position}, n_tokens says {n_tokens}")
