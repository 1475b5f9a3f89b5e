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

    fill: its value on tokens that the model did not generate, and the default
    stored: its field in a `record_data` document; None: not stored, the trainer computes it
    optional: whether a document may lack that field (older rows lack newer columns); the column
        then has its fill. A document without a required field is damaged.
    """

    dtype: np.dtype[Any]
    fill: float
    stored: str | None
    optional: bool = False


UNSAID = 2  # `capped` in rows that were stored before it, and on tokens that no turn generated

COLUMNS: dict[str, Column] = {
    "ids": Column(INT32, 0, "input_ids"),
    "mask": Column(UINT8, 0, "loss_mask"),  # 1 on the model's own tokens, which are trained
    "logprobs": Column(FLOAT32, 0.0, "logprobs"),  # the sampler's
    "versions": Column(INT32, -1, "versions"),  # of the policy that sampled the token
    "advantages": Column(FLOAT32, 0.0, "advantages"),
    # 1 on a failed turn, which no normalization of advantages may reinforce; 0 on the other turns
    "capped": Column(UINT8, UNSAID, "capped", optional=True),
    "staleness": Column(INT32, 0, None),  # steps that the trained weights are newer
    "reference": Column(FLOAT32, 0.0, None),  # the reference's, where it is computed before steps
}


class Node(NamedTuple):
    """Consecutive tokens of a tree, from `start` to `end` (exclusive).

    `parent`: index of the node that it continues; -1 for a root.
    """

    start: int
    end: int
    parent: int

    @property
    def length(self) -> int:
        """Number of tokens in the node itself."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, eq=False)
class TokenTree:
    """A tree of tokens with per-token columns. `tree["ids"]` is a read-only array [n_tokens].

    Nodes are in depth-first order, so a node's descendants follow it directly. With several roots
    it is a forest. A column that is not given has its fill; a scalar stands for all tokens. Raises
    `ValueError` if nodes and columns do not fit together.

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

    The tree contains the shared prompt once, with one child per segment:

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

    Its paths are the training sequences, one per segment:

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
        """A tree of one node, i.e. a sequence. `columns`: further columns [n_tokens] by name."""
        tokens = np.asarray(ids, dtype=COLUMNS["ids"].dtype)
        nodes = (Node(0, len(tokens), -1),) if len(tokens) else ()
        return cls(nodes, {"ids": tokens, **{n: np.asarray(v) for n, v in columns.items()}})

    @classmethod
    def concat(cls, trees: Sequence["TokenTree"]) -> Self:
        """One forest of all trees, of which there must be at least one."""
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
        """The parent of each node; -1 for a root."""
        return tuple(node.parent for node in self.nodes)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens in each node."""
        return tuple(node.length for node in self.nodes)

    def with_columns(self, **columns: ArrayLike) -> Self:
        """The same tree with these columns replaced."""
        given = {name: np.asarray(values) for name, values in columns.items()}
        return type(self)(self.nodes, {**self.columns, **given})

    def take(self, places: NDArray[np.integer[Any]]) -> "TokenTree":
        """The tokens at `places` [n], in that order, as a tree of one node."""
        nodes = (Node(0, len(places), -1),) if len(places) else ()
        return TokenTree(nodes, {name: values[places] for name, values in self.columns.items()})

    def up_to(self, depth: int) -> "TokenTree":
        """The tokens that have fewer than `depth` tokens before them on their paths."""
        kept: dict[int, int] = {}  # from old to new nodes
        nodes: list[Node] = []
        places: list[NDArray[np.int64]] = []
        before: list[int] = []
        n_tokens = 0
        for index, node in enumerate(self.nodes):
            above = before[node.parent] + self.nodes[node.parent].length if node.parent >= 0 else 0
            before.append(above)
            length = min(node.length, depth - above)
            if length > 0:
                kept[index] = len(nodes)
                nodes.append(Node(n_tokens, n_tokens + length, kept.get(node.parent, -1)))
                places.append(np.arange(node.start, node.start + length))
                n_tokens += length
        taken = np.concatenate(places) if places else np.empty(0, dtype=np.int64)
        columns = {name: values[taken] for name, values in self.columns.items()}
        return TokenTree(tuple(nodes), columns)

    def paths(self) -> list[list[int]]:
        """For each leaf in depth-first order, the node indices from its root to the leaf."""
        inner = {node.parent for node in self.nodes}
        above: list[int] = []  # path to the current node
        paths = []
        for index, node in enumerate(self.nodes):
            while above and above[-1] != node.parent:
                above.pop()
            above.append(index)
            if index not in inner:
                paths.append(list(above))
        return paths

    def places(self, nodes: Sequence[int]) -> Places:
        """The token indices of `nodes`, node by node."""
        stretches = [np.arange(self.nodes[n].start, self.nodes[n].end) for n in nodes]
        return np.concatenate(stretches) if stretches else np.empty(0, dtype=np.int64)

    @property
    def pairs(self) -> int:
        """Number of attention pairs: each token sees itself and all earlier ones on its path."""
        pairs = 0
        before: list[int] = []  # for each node, the number of tokens before it on its path
        for node in self.nodes:
            above = before[node.parent] + self.nodes[node.parent].length if node.parent >= 0 else 0
            before.append(above)
            pairs += node.length * above + node.length * (node.length + 1) // 2
        return pairs

    def pack(self) -> dict[str, Any]:
        """The tree as fields of a `record_data` document.

        Columns are little-endian `bytes` (`COLUMNS`), nodes are sub-documents.
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
        """The tree of a `record_data` document; its columns are views, not copies.

        Other fields are ignored. A missing optional column has its fill. Raises `ValueError` if
        fields are missing or do not fit together.
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
    """The length of the common prefix of two arrays of ids [n]."""
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length


def packed_fields() -> set[str]:
    """The names of the fields that `TokenTree.pack` returns."""
    stored = {column.stored for column in COLUMNS.values() if column.stored is not None}
    return {"n_tokens", "nodes", *stored}


def _check_nodes(nodes: Sequence[Node], n_tokens: int) -> None:
    """Raise ValueError unless nodes cover the tokens as trees in depth-first order."""
    position = 0
    above: list[int] = []  # path to the current node
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
