"""Merges sequences under their shared prefixes, so that each shared token is computed once. Pure.

Sequences are compared by their tokens: segments of a row, siblings on one prompt and rows with the
same system prompt are merged alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agentrl.databases.token_tree import Node, Places, TokenTree, common_prefix

Tokens = NDArray[np.int32]

# Shorter shared pieces are not merged, because each node is a call of the attention kernel in each
# layer.
MIN_SHARED = 8


@dataclass(frozen=True)
class Forest:
    """S sequences as a forest of T tokens in one line.

    Invariants: `tree["ids"][places[s]]` is sequence s; along it, each node is a child of the one
    before; no token is in two nodes. The tree has only the column of ids; other columns belong to
    the sequences, several of which may share a token.
    """

    tree: TokenTree
    places: tuple[Places, ...]  # indices of each sequence's tokens in the tree
    last_nodes: tuple[int, ...]  # the node that each sequence ends in


@dataclass(eq=False, slots=True)
class _Piece:
    tokens: Tokens
    parent: "_Piece | None"
    children: list["_Piece"] = field(default_factory=list)
    ending: list[int] = field(default_factory=list)  # sequences whose last token is in here

    def child_like(self, tokens: Tokens) -> tuple["_Piece | None", int]:
        """The child with the longest common prefix with `tokens`, and its length."""
        best, most = None, 0
        for child in self.children:
            if child.tokens[0] == tokens[0]:
                shared = common_prefix(child.tokens, tokens)
                if shared > most:
                    best, most = child, shared
        return best, most

    def split(self, at: int, ends: Sequence[int]) -> None:
        """Split after `at` tokens. `ends`: the end of each sequence within its last node."""
        rest = _Piece(self.tokens[at:], self, self.children)
        for child in rest.children:
            child.parent = rest
        rest.ending = [sequence for sequence in self.ending if ends[sequence] > at]
        self.ending = [sequence for sequence in self.ending if ends[sequence] <= at]
        self.tokens, self.children = self.tokens[:at], [rest]


def merge(sequences: Sequence[Tokens], min_shared: int = MIN_SHARED) -> Forest:
    """Merge non-empty `sequences` into a forest. Siblings keep the order of the sequences.

    Shared prefixes of fewer than `min_shared` tokens are not merged.
    """
    top = _Piece(np.empty(0, dtype=np.int32), None)
    ends = [0] * len(sequences)
    for index, tokens in enumerate(sequences):
        _insert(top, index, tokens, ends, min_shared)
    return _lay_out(top, sequences)


def _insert(top: _Piece, index: int, tokens: Tokens, ends: list[int], min_shared: int) -> None:
    node, left = top, tokens
    while True:
        child, shared = node.child_like(left)
        if child is not None and shared == len(left):
            break  # the whole sequence is in the tree already
        if child is not None and shared == len(child.tokens):
            node, left = child, left[shared:]
            if not node.children:
                node.tokens = np.concatenate([node.tokens, left])
                child, shared = node, len(node.tokens)
                break
            continue
        if child is not None and shared >= min_shared:
            _split(child, shared, ends)
            node, left = child, left[shared:]
        child, shared = _Piece(left, node), len(left)
        node.children.append(child)
        break
    child.ending.append(index)
    ends[index] = shared


def _split(node: _Piece, at: int, ends: list[int]) -> None:
    node.split(at, ends)
    for sequence in node.children[0].ending:
        ends[sequence] -= at


def _lay_out(top: _Piece, sequences: Sequence[Tokens]) -> Forest:
    nodes: list[Node] = []
    pieces: list[Tokens] = []
    ways: list[Places] = []  # of each node: places from its root to its end
    places: list[Places] = [np.empty(0, dtype=np.int64)] * len(sequences)
    last_nodes = [0] * len(sequences)
    position = 0
    stack = [(child, -1) for child in reversed(top.children)]
    while stack:
        piece, parent = stack.pop()
        number, end = len(nodes), position + len(piece.tokens)
        nodes.append(Node(position, end, parent))
        pieces.append(piece.tokens)
        own = np.arange(position, end)
        ways.append(own if parent == -1 else np.concatenate([ways[parent], own]))
        position = end
        for sequence in piece.ending:
            places[sequence] = ways[number][: len(sequences[sequence])]
            last_nodes[sequence] = number
        stack.extend((child, number) for child in reversed(piece.children))
    ids = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32)
    return Forest(TokenTree(tuple(nodes), {"ids": ids}), tuple(places), tuple(last_nodes))
