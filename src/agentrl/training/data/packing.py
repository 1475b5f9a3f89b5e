"""Packs one rank's sequences into passes of bounded size. Pure and deterministic.

Trees within the budget are computed whole, several in one pass. A larger tree is divided into
subtrees that fit. The nodes above them, their shared prefix, are computed once, and each pass over
subtrees attends to the prefix's keys and values (see `attention.prefix_keys`). A prefix that is too
short for this is computed again in each pass.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Fewest tokens that computing a shared prefix once must save, because it needs a separate forward
# and backward pass.
MIN_SAVED = 64


@dataclass(frozen=True)
class PackedPass:
    """One forward and backward pass: nodes in depth-first order, and sequences that end there."""

    nodes: tuple[int, ...]
    sequences: tuple[int, ...]


@dataclass(frozen=True)
class PrefixPasses:
    """Passes whose roots are all children of the last node of one prefix."""

    prefix: tuple[int, ...]  # nodes, from a root downwards
    passes: tuple[PackedPass, ...]


@dataclass(frozen=True)
class Packing:
    """All passes of a rank. Prefixes with the most passes, and the largest passes, come first."""

    prefixed: tuple[PrefixPasses, ...]
    plain: tuple[PackedPass, ...]


@dataclass(frozen=True)
class _Subtree:
    """Nodes `first` to `end` (half open), which one pass computes, below the nodes `above`."""

    above: tuple[int, ...]
    first: int
    end: int
    size: int  # tokens, without those above
    sequences: tuple[int, ...]

    @property
    def nodes(self) -> range:
        return range(self.first, self.end)


def pack_forest(
    parents: Sequence[int], lengths: Sequence[int], last_nodes: Sequence[int], budget: int
) -> Packing:
    """Divide a forest, nodes in depth-first order, into passes of at most `budget` tokens.

    `last_nodes`: of each sequence, the node that it ends in. Invariants:

    * every sequence is in exactly one pass, which holds all nodes on its way from the root, but
      for those of the shared prefix that the pass stands behind;
    * a pass has at most `budget` tokens, or what its prefix leaves of it, but a quarter of it at
      least; or else it is the way to one leaf, which is never divided;
    * a node is computed more than once only above subtrees that did not fit: where that would have
      saved fewer than `MIN_SAVED` tokens, and again in a prefix that goes on further down.
    """
    ends, sizes = _subtrees(parents, lengths)
    ending: dict[int, list[int]] = {}
    for sequence, node in enumerate(last_nodes):
        ending.setdefault(node, []).append(sequence)
    items: list[_Subtree] = []
    waiting: list[int] = []  # sequences that end in a node above the next item
    above: list[int] = []
    node = 0
    while node < len(parents):
        while above and parents[node] != above[-1]:
            above.pop()
        room = budget - sum(lengths[upper] for upper in above)
        leaf = ends[node] == node + 1
        waiting += ending.get(node, []) if not leaf and sizes[node] > room else []
        if not leaf and sizes[node] > room:
            above.append(node)
            node += 1
            continue
        inside = [s for lower in range(node, ends[node]) for s in ending.get(lower, [])]
        items.append(_Subtree(tuple(above), node, ends[node], sizes[node], (*waiting, *inside)))
        waiting = []
        node = ends[node]
    return _pack(items, lengths, budget)


def _pack(items: Iterable[_Subtree], lengths: Sequence[int], budget: int) -> Packing:
    by_prefix: dict[tuple[int, ...], list[_Subtree]] = {}
    for item in items:
        by_prefix.setdefault(item.above, []).append(item)
    prefixed: list[PrefixPasses] = []
    rest: list[_Subtree] = []
    for prefix, below in by_prefix.items():
        prefix_tokens = sum(lengths[node] for node in prefix)
        room = max(budget - prefix_tokens, budget // 4)
        bins = _first_fit([(item, item.size) for item in below], room)
        if prefix_tokens * (len(bins) - 1) >= MIN_SAVED:
            passes = tuple(_pass_over(group, with_above=False) for group in bins)
            prefixed.append(PrefixPasses(prefix, passes))
        else:
            rest += below
    weighted = [(item, item.size + sum(lengths[node] for node in item.above)) for item in rest]
    plain = tuple(_pass_over(group, with_above=True) for group in _first_fit(weighted, budget))
    prefixed.sort(key=lambda group: (-len(group.passes), group.prefix))
    return Packing(tuple(prefixed), plain)


def _first_fit(items: Sequence[tuple[_Subtree, int]], budget: int) -> list[list[_Subtree]]:
    """First-fit decreasing: each item, largest first, goes to the first bin with room."""
    bins: list[list[_Subtree]] = []
    loads: list[int] = []
    for item, size in sorted(items, key=lambda pair: (-pair[1], pair[0].first)):
        fitting = (index for index, load in enumerate(loads) if load + size <= budget)
        index = next(fitting, len(bins))
        if index == len(bins):
            bins.append([])
            loads.append(0)
        bins[index].append(item)
        loads[index] += size
    order = sorted(range(len(bins)), key=lambda index: (-loads[index], index))
    return [bins[index] for index in order]


def _pass_over(group: Sequence[_Subtree], *, with_above: bool) -> PackedPass:
    nodes = {node for item in group for node in item.nodes}
    if with_above:
        nodes |= {node for item in group for node in item.above}
    sequences = sorted(sequence for item in group for sequence in item.sequences)
    return PackedPass(tuple(sorted(nodes)), tuple(sequences))


def _subtrees(parents: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """For each node: the index after its last descendant, and the tokens of its subtree."""
    ends = [node + 1 for node in range(len(parents))]
    sizes = list(lengths)
    for node in reversed(range(len(parents))):
        if parents[node] >= 0:
            ends[parents[node]] = max(ends[parents[node]], ends[node])
            sizes[parents[node]] += sizes[node]
    return ends, sizes
