"""Who computes what in one optimizer step: rows to ranks, sequences to micro-batches. Pure.

Both functions are deterministic: equal arguments give equal plans, on every rank.
"""

import heapq
from collections.abc import Sequence


def assign_rows(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Rows to data-parallel ranks, balanced by cost.

    Longest processing time first: each row, the dearest first, goes to the rank with the least.
    Invariants: every row is on exactly one rank; the dearest rank has at most the cheapest rank's
    cost plus one row's; with at least as many rows as ranks no rank is empty (if costs are above
    0). Returns the rows' indices by rank, in the order given.
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    plan: list[list[int]] = [[] for _ in range(ranks)]
    for row in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, rank = heapq.heappop(loads)
        plan[rank].append(row)
        heapq.heappush(loads, (load + costs[row], rank))
    return [sorted(rows) for rows in plan]


def pack_sequences(
    lengths: Sequence[int], budget: int, pad_to_multiple_of: int = 1
) -> list[list[int]]:
    """One rank's sequences to as few micro-batches as a greedy pass over sorted lengths gives.

    A micro-batch of n sequences costs n times its longest one, rounded up to
    `pad_to_multiple_of`: sequences of like length go together, so that padding is small.
    Invariants: every sequence is in exactly one micro-batch; a micro-batch costs at most `budget`
    tokens, unless it is one sequence that is longer than the budget. Returns sequence indices by
    micro-batch, the longest first.
    """
    batches: list[list[int]] = []
    longest = 0
    for sequence in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if batches and (len(batches[-1]) + 1) * longest <= budget:
            batches[-1].append(sequence)
        else:
            batches.append([sequence])
            longest = -(-lengths[sequence] // pad_to_multiple_of) * pad_to_multiple_of
    return batches
