"""Assigns the rows of a step to data-parallel ranks, balanced by cost. Pure and deterministic.

`packing` divides a rank's forest into passes.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

from agentrl.databases.row_ledger import RowHeader
from agentrl.training.data.flops import FlopsModel

# A group is divided only if this saves at least this share of a rank's time.
_WORTH_DIVIDING = 0.01


@dataclass(frozen=True)
class RowCost:
    """The cost of a row, divided into its own part and the part shared with its siblings."""

    group: str  # the same for siblings
    own: float  # cost of this row's own tokens
    shared: float = 0.0  # cost paid once for all rows of the group on a rank


@dataclass(frozen=True)
class RankPlan:
    """Row indices of each rank, ascending, and the ranks' costs."""

    rows: tuple[tuple[int, ...], ...]
    costs: tuple[float, ...]

    @property
    def balance(self) -> float:
        """The largest rank's cost over the mean: the factor by which imbalance prolongs a step."""
        return max(self.costs) / mean(self.costs) if any(self.costs) else 1.0


def row_cost(header: RowHeader, costs: FlopsModel) -> RowCost:
    """The cost of a row of the database. Siblings share their first prompt."""
    prompt = header.prompt_len
    shared = costs.total(prompt, prompt * (prompt + 1) / 2, 0)
    total = costs.total(header.n_tokens, header.cost, header.n_train_tokens)
    return RowCost(header.prefix_hash, total - shared, shared)


def plan_ranks(rows: Sequence[RowCost], ranks: int) -> RankPlan:
    """Assign rows to ranks, siblings together as far as balance allows.

    Groups are assigned most expensive first, each to the rank with the lowest cost. Then the most
    expensive group of the most expensive rank is halved and all groups are assigned again, as long
    as this shortens the step, because separated siblings compute their prompt twice. Invariants:
    every row is on exactly one rank; with one rank no group is divided; the most expensive rank
    costs no more than without division.
    """
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.group, []).append(index)
    parts = list(groups.values())
    plan = _place(parts, rows, ranks)
    while (divided := _divide(parts, plan, rows)) is not None:
        again = _place(divided, rows, ranks)
        if not _shorter(again, plan):
            break
        parts, plan = divided, again
    return plan


def assign_rows(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Assign rows that share nothing to ranks, balanced by cost.

    Rows are assigned most expensive first, each to the rank with the lowest cost. Invariants: every
    row is on exactly one rank; the most expensive rank costs at most the cheapest one plus one row;
    with at least as many rows as ranks, and costs above 0, no rank is empty. Returns row indices by
    rank, ascending.
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    plan: list[list[int]] = [[] for _ in range(ranks)]
    for row in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, rank = heapq.heappop(loads)
        plan[rank].append(row)
        heapq.heappush(loads, (load + costs[row], rank))
    return [sorted(rows) for rows in plan]


def _place(parts: Sequence[Sequence[int]], rows: Sequence[RowCost], ranks: int) -> RankPlan:
    by_rank = assign_rows([_cost(part, rows) for part in parts], ranks)
    placed = [sorted(row for part in mine for row in parts[part]) for mine in by_rank]
    return RankPlan(
        rows=tuple(tuple(indices) for indices in placed),
        costs=tuple(_together(indices, rows) for indices in placed),
    )


def _divide(
    parts: Sequence[list[int]], plan: RankPlan, rows: Sequence[RowCost]
) -> list[list[int]] | None:
    """Halve the most expensive part of the most expensive rank; None if its parts have one row."""
    most_expensive = max(range(len(plan.costs)), key=lambda rank: (plan.costs[rank], -rank))
    there = set(plan.rows[most_expensive])
    candidates = [part for part in parts if len(part) > 1 and set(part) <= there]
    if not candidates:
        return None
    chosen = max(candidates, key=lambda part: (_cost(part, rows), [-index for index in part]))
    halves: tuple[list[int], list[int]] = ([], [])
    weights = [0.0, 0.0]
    for index in sorted(chosen, key=lambda index: (-rows[index].own, index)):
        lighter = int(weights[1] < weights[0])
        halves[lighter].append(index)
        weights[lighter] += rows[index].own
    return [part for part in parts if part is not chosen] + [sorted(half) for half in halves]


def _shorter(plan: RankPlan, other: RankPlan) -> bool:
    """Whether `plan` is cheaper at the first difference of the ranks' costs, sorted descending.

    Comparing all ranks relieves several equally expensive ranks one by one.
    """
    for ours, theirs in zip(sorted(plan.costs)[::-1], sorted(other.costs)[::-1], strict=True):
        if abs(ours - theirs) > _WORTH_DIVIDING * theirs:
            return ours < theirs
    return False


def _cost(part: Iterable[int], rows: Sequence[RowCost]) -> float:
    """Cost of rows of one group on the same rank."""
    indices = list(part)
    return sum(rows[index].own for index in indices) + max(rows[index].shared for index in indices)


def _together(indices: Iterable[int], rows: Sequence[RowCost]) -> float:
    groups: dict[str, list[int]] = {}
    for index in indices:
        groups.setdefault(rows[index].group, []).append(index)
    return sum(_cost(part, rows) for part in groups.values())


def pack_sequences(
    lengths: Sequence[int],
    budget: int,
    pad_to_multiple_of: int = 1,
    *,
    equal_lengths: bool = False,
) -> list[list[int]]:
    """Pack one rank's sequences into micro-batches, greedily by descending length.

    A micro-batch of n sequences costs n times its longest one, rounded up to `pad_to_multiple_of`.
    Sequences of similar length are packed together, so that padding is small.
    Invariants: every sequence is in exactly one micro-batch; a micro-batch costs at most `budget`
    tokens, unless it is one sequence that is longer than the budget; with `equal_lengths` its
    sequences have one length. Returns sequence indices by micro-batch, the longest first.
    """
    batches: list[list[int]] = []
    longest = 0
    for sequence in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        fits = batches and (len(batches[-1]) + 1) * longest <= budget
        if fits and not (equal_lengths and lengths[sequence] < lengths[batches[-1][0]]):
            batches[-1].append(sequence)
        else:
            batches.append([sequence])
            longest = -(-lengths[sequence] // pad_to_multiple_of) * pad_to_multiple_of
    return batches
