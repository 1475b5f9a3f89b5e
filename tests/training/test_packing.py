"""Merging and packing: the invariants that their docstrings state."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.training.data.forest import Forest, merge
from agentrl.training.data.packing import Packing, pack_forest

# few different tokens, so that prefixes are shared
SEQUENCES = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=30).map(
        lambda tokens: np.repeat(np.asarray(tokens, dtype=np.int32), 3)
    ),
    min_size=1,
    max_size=14,
)


def forest_of(sequences: list[np.ndarray], min_shared: int = 4) -> Forest:
    return merge(sequences, min_shared)


@given(SEQUENCES, st.integers(1, 12))
@settings(deadline=None)
def test_a_forest_holds_every_sequence_along_one_way_down(
    sequences: list[np.ndarray], min_shared: int
) -> None:
    forest = forest_of(sequences, min_shared)
    node_of = np.repeat(np.arange(len(forest.tree.lengths)), forest.tree.lengths)
    assert len(node_of) == len(forest.tree["ids"])
    for sequence, places, last in zip(sequences, forest.places, forest.last_nodes, strict=True):
        assert forest.tree["ids"][places].tolist() == sequence.tolist()
        nodes = list(dict.fromkeys(node_of[places].tolist()))
        assert nodes[-1] == last
        assert [forest.tree.parents[node] for node in nodes] == [-1, *nodes[:-1]]
        for node in nodes[:-1]:  # passed through to its end
            assert (node_of[places] == node).sum() == forest.tree.lengths[node]


@given(SEQUENCES)
@settings(deadline=None)
def test_with_no_least_length_every_prefix_stands_once(sequences: list[np.ndarray]) -> None:
    prefixes = {tuple(tokens[:end]) for tokens in sequences for end in range(1, len(tokens) + 1)}
    assert len(forest_of(sequences, 1).tree) == len(prefixes)


def test_a_short_common_beginning_is_not_split_off() -> None:
    one, other = np.arange(40), np.arange(40)
    other[5:] += 100
    forest = forest_of([one.astype(np.int32), other.astype(np.int32)], 6)
    assert forest.tree.lengths == (40, 40)
    assert forest_of([one.astype(np.int32), other.astype(np.int32)], 5).tree.lengths == (5, 35, 35)


def test_a_sequence_within_another_adds_nothing() -> None:
    whole = np.arange(40, dtype=np.int32)
    for order in ([whole, whole[:7]], [whole[:7], whole], [whole, whole]):
        assert forest_of(order).tree.lengths == (40,)


def ways(forest: Forest) -> list[list[int]]:
    """Of each node: the nodes from its root to it."""
    found: list[list[int]] = []
    for node, parent in enumerate(forest.tree.parents):
        found.append([node] if parent == -1 else [*found[parent], node])
    return found


@given(SEQUENCES, st.integers(1, 300))
@settings(max_examples=settings.default.max_examples * 3)
def test_every_sequence_is_in_one_pass_that_has_all_it_needs(
    sequences: list[np.ndarray], budget: int
) -> None:
    forest = forest_of(sequences)
    packing = pack_forest(forest.tree.parents, forest.tree.lengths, forest.last_nodes, budget)
    way = ways(forest)
    parts = [((), part) for part in packing.plain]
    for group in packing.prefixed:
        assert len(group.passes) > 1
        assert list(group.prefix) == way[group.prefix[-1]]
        parts += [(group.prefix, part) for part in group.passes]
    assert sorted(s for _, part in parts for s in part.sequences) == list(range(len(sequences)))
    for prefix, part in parts:
        assert list(part.nodes) == sorted(set(part.nodes))
        assert not set(part.nodes) & set(prefix)
        for node in part.nodes:
            parent = forest.tree.parents[node]
            assert parent in part.nodes or parent == (prefix[-1] if prefix else -1)
        for sequence in part.sequences:
            assert set(way[forest.last_nodes[sequence]]) <= {*prefix, *part.nodes}


@given(SEQUENCES, st.integers(1, 300))
@settings(max_examples=settings.default.max_examples * 3)
def test_a_pass_over_the_budget_is_the_way_to_one_leaf(
    sequences: list[np.ndarray], budget: int
) -> None:
    forest = forest_of(sequences)
    packing = pack_forest(forest.tree.parents, forest.tree.lengths, forest.last_nodes, budget)
    for prefix, part in passes(packing):
        tokens = sum(forest.tree.lengths[node] for node in part.nodes)
        before = sum(forest.tree.lengths[node] for node in prefix)
        children = [forest.tree.parents[node] for node in part.nodes]
        chain = len(children) == len(set(children))
        assert tokens <= max(budget - before, budget // 4) or chain


def passes(packing: Packing) -> list[tuple[tuple[int, ...], object]]:
    found = [((), part) for part in packing.plain]
    return found + [(group.prefix, part) for group in packing.prefixed for part in group.passes]


def test_a_shared_prefix_is_computed_once_for_all_that_stands_behind_it() -> None:
    packing = pack_forest([-1, 0, 0, 0, 0, -1], [100, 60, 50, 40, 30, 20], [1, 2, 3, 4, 5], 220)
    (group,) = packing.prefixed
    assert group.prefix == (0,)
    assert [part.nodes for part in group.passes] == [(1, 2), (3, 4)]
    assert [part.sequences for part in group.passes] == [(0, 1), (2, 3)]
    assert [part.nodes for part in packing.plain] == [(5,)]


def test_a_short_prefix_is_computed_again() -> None:
    packing = pack_forest([-1, 0, 0, 0], [10, 60, 50, 40], [1, 2, 3], 120)
    assert packing.prefixed == ()
    assert [part.nodes for part in packing.plain] == [(0, 1, 3), (0, 2)]
