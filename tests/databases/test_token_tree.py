"""Token trees: the worked example, what they refuse, and how they grow."""

import doctest
import runpy
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.databases import documents, token_tree
from agentrl.databases.arrays import FLOAT32, INT32
from agentrl.databases.growing_tree import GrowingTree
from agentrl.databases.token_tree import COLUMNS, Column, Node, TokenTree, packed_fields


def test_the_worked_example_holds() -> None:
    results = doctest.testmod(token_tree)
    assert results.attempted > 10
    assert results.failed == 0


#        0: tokens 0-2
#        ├── 1: 2-4
#        │   ├── 2: 4-5
#        │   └── 3: 5-7
#        └── 4: 7-8
#        5: 8-9
NODES = tuple(
    Node(*node) for node in [(0, 2, -1), (2, 4, 0), (4, 5, 1), (5, 7, 1), (7, 8, 0), (8, 9, -1)]
)
TREE = TokenTree(NODES, {"ids": np.arange(10, 19), "logprobs": -np.arange(9)})


def test_the_walk_goes_to_every_leaf_in_depth_first_order() -> None:
    assert TREE.paths() == [[0, 1, 2], [0, 1, 3], [0, 4], [5]]
    assert TREE.places([0, 1, 3]).tolist() == [0, 1, 2, 3, 5, 6]
    assert TREE.take(TREE.places([0, 4]))["logprobs"].tolist() == [0, -1, -7]


def test_pairs_are_those_of_a_token_and_itself_or_one_before_it_on_its_path() -> None:
    depths = {
        place: depth for path in TREE.paths() for depth, place in enumerate(TREE.places(path))
    }
    assert TREE.pairs == sum(depth + 1 for depth in depths.values())


def test_trees_beside_each_other_keep_their_paths() -> None:
    both = TokenTree.concat([TREE, TokenTree.line([7, 8]), TREE])
    expected = [
        tree.take(tree.places(path))["ids"].tolist()
        for tree in (TREE, TokenTree.line([7, 8]), TREE)
        for path in tree.paths()
    ]
    assert [both.take(both.places(path))["ids"].tolist() for path in both.paths()] == expected


def test_a_column_that_nobody_gave_has_its_fill_and_a_number_stands_for_all_tokens() -> None:
    line = TokenTree.line([5, 6, 7], advantages=0.5)
    assert line["versions"].tolist() == [-1, -1, -1]
    assert line["advantages"].tolist() == [0.5, 0.5, 0.5]
    assert {name: values.dtype for name, values in line.columns.items()} == {
        name: column.dtype for name, column in COLUMNS.items()
    }


@pytest.mark.parametrize(
    ("nodes", "columns", "said"),
    [
        ([(0, 3, -1)], {"mask": [0, 1]}, "mask has 2 tokens where ids has 3"),
        ([(0, 3, -1)], {"weights": [0, 1, 1]}, "no column is called weights"),
        ([(0, 2, -1)], {}, "nodes end at token 2"),
        ([(0, 2, -1), (1, 3, 0)], {}, "node 1"),
        ([(0, 2, -1), (2, 2, 0), (2, 3, 0)], {}, "node 1"),
        ([(0, 3, 0)], {}, "node 0"),
        ([(0, 1, -1), (1, 2, -1), (2, 3, 0)], {}, "node 2"),  # its parent's place has passed
    ],
)
def test_nodes_and_columns_that_do_not_fit_together_are_refused(
    nodes: list[tuple[int, int, int]], columns: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        TokenTree(tuple(Node(*node) for node in nodes), {"ids": [1, 2, 3], **columns})


def test_what_is_packed_is_little_endian_and_unpacks_to_the_same() -> None:
    packed = TREE.pack()
    assert set(packed) == packed_fields()
    assert packed["input_ids"][:4] == bytes([10, 0, 0, 0])
    assert TokenTree.unpack({**packed, "reward": 1.0}) == TREE


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"logprobs": b"\0" * 8}, "logprobs has 2 tokens where n_tokens says 9"),
        ({"logprobs": b"\0" * 9}, "element size"),
        ({"n_tokens": 8}, "where n_tokens says 8"),
    ],
)
def test_a_document_whose_arrays_are_damaged_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TokenTree.unpack({**TREE.pack(), **change})


def test_a_document_without_one_of_its_arrays_is_refused() -> None:
    packed = TREE.pack()
    del packed["versions"]
    with pytest.raises(ValueError, match="versions is not there"):
        TokenTree.unpack(packed)


def test_a_document_older_than_an_optional_column_has_its_fill_and_of_no_other_column(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    older = TREE.pack()
    monkeypatch.setitem(COLUMNS, "turn", Column(INT32, -1, "turn", optional=True))
    tree = TokenTree.unpack(older)
    assert tree["turn"].tolist() == [-1] * 9
    assert tree["ids"].tolist() == TREE["ids"].tolist()
    newer = tree.with_columns(turn=np.arange(9))
    assert TokenTree.unpack(newer.pack()) == newer
    with pytest.raises(ValueError, match="turn has 2 tokens where n_tokens says 9"):
        TokenTree.unpack({**older, "turn": b"\0" * 8})
    monkeypatch.setitem(COLUMNS, "turn", Column(INT32, -1, "turn"))
    with pytest.raises(ValueError, match="turn is not there"):
        TokenTree.unpack(older)


def test_the_columns_that_a_row_cannot_do_without_are_required() -> None:
    for name in ("ids", "mask", "logprobs", "versions", "advantages"):
        assert not COLUMNS[name].optional


@pytest.mark.parametrize("taken", ["reward", "_id", "tree", "nodes", "n_tokens", "logprobs"])
def test_a_column_stored_under_a_name_that_a_row_has_already_is_refused_at_import(
    monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    runpy.run_path(documents.__file__)
    monkeypatch.setitem(COLUMNS, "weights", Column(FLOAT32, 0, taken))
    with pytest.raises(ValueError, match=f"column 'weights' .*{taken!r}"):
        runpy.run_path(documents.__file__)


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=300)


@given(
    st.lists(
        st.tuples(TOKENS, st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 400)),
        min_size=1,
        max_size=5,
    )
)
def test_a_tree_that_grew_has_every_branch_as_it_was_appended(
    steps: list[tuple[list[int], int, int, int]],
) -> None:
    growing = GrowingTree()
    branches: list[list[tuple[int, int]]] = []  # of each: ids with their versions
    for version, (ids, draw, depth, cut) in enumerate(steps):
        parent, shared = None, 0
        if branches and draw % 4:
            parent = draw % len(branches)
            shared = 1 + depth % len(branches[parent])
        growing.begin(parent, shared)
        before = [] if parent is None else branches[parent][:shared]
        growing.append([9] * 3, {"logprobs": -1.0})
        growing.cut(len(before))  # leaves nothing behind
        growing.append(ids, {"versions": version})
        kept = max(len(before) + 1, len(before) + len(ids) - cut)
        growing.cut(kept)
        branches.append([*before, *((token, version) for token in ids)][:kept])
    tree = growing.tree()
    assert len(tree) == len(growing)
    assert not tree["logprobs"].any()
    lines = [tree.take(tree.places(path)) for path in tree.paths()]
    found = [list(zip(line["ids"], line["versions"], strict=True)) for line in lines]
    for number, branch in enumerate(branches):
        assert any(path[: len(branch)] == branch for path in found)
        assert growing.length(number) == len(branch)
        line = growing.line(number)
        assert list(zip(line["ids"], line["versions"], strict=True)) == branch


def test_a_branch_that_is_dropped_leaves_the_tree_as_it_was() -> None:
    growing = GrowingTree()
    growing.begin()
    growing.append([1, 2, 3], {"versions": 4})
    before = growing.tree()
    growing.begin(0, 2)
    growing.append([7, 8, 9], {"versions": 5})
    growing.drop()
    assert growing.tree() == before
    growing.append([4])
    assert growing.tree()["versions"].tolist() == [4, 4, 4, -1]
