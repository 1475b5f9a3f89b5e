"""The work of one step on one rank: its rows as micro-batches, which any model may be run over.

The policy is trained on them, the reference and the critic look at the same ones. Every rank has
the same number of them, because each forward and backward pass is a collective of a sharded model.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.training.batch import (
    MicroBatch,
    TrainingSequence,
    collate,
    count_totals,
    placeholder,
)
from agentrl.training.losses import BatchTotals
from agentrl.training.parallel import Mesh
from agentrl.training.planner import pack_sequences, split_to

T = TypeVar("T")


@dataclass(frozen=True)
class StepWork:
    """Made by `plan_work`."""

    sequences: Sequence[TrainingSequence]
    row_of: Sequence[int]  # by sequence
    rows: int  # of this rank
    plan: Sequence[Sequence[int]]  # sequences by micro-batch; an empty one computes without weight
    totals: BatchTotals  # of all ranks
    divides_rows: bool  # whether any rank has a row's tokens in several micro-batches
    pad_to_multiple_of: int
    device: torch.device

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[MicroBatch]:
        for indices in self.plan:
            if not indices:
                yield placeholder(self.device)
                continue
            yield collate(
                [self.sequences[index] for index in indices],
                [self.row_of[index] for index in indices],
                self.pad_to_multiple_of,
                self.device,
            )

    @torch.no_grad()
    def evaluate(self, forward: Callable[[MicroBatch], T]) -> list[T]:
        """What `forward` gives for each micro-batch, without gradients."""
        return [forward(batch) for batch in self]

    def train(self, loss: Callable[[int, MicroBatch], Tensor]) -> None:
        """Add the gradient of the sum of `loss(number, micro-batch)` over all micro-batches."""
        for number, batch in enumerate(self):
            loss(number, batch).backward()


def plan_work(
    rows: Sequence[Sequence[TrainingSequence]],
    budget: int,
    pad_to_multiple_of: int,
    mesh: Mesh,
) -> StepWork:
    """Divide this rank's rows, each given as its sequences, into micro-batches. Collective.

    `budget`: tokens of a micro-batch, padding included. Raises `ValueError` if no rank has a token
    to train.
    """
    sequences = [sequence for row in rows for sequence in row]
    row_of = [number for number, row in enumerate(rows) for _ in row]
    plan = pack_sequences([len(sequence) for sequence in sequences], budget, pad_to_multiple_of)
    totals = _summed(count_totals(rows), mesh)
    if totals.tokens == 0:
        raise ValueError("a step has no trained token in any of its rows")
    plan = split_to(plan, _most(max(len(plan), 1), mesh))
    return StepWork(
        sequences=sequences,
        row_of=row_of,
        rows=len(rows),
        plan=plan,
        totals=totals,
        divides_rows=bool(_most(_divides_rows(plan, row_of), mesh)),
        pad_to_multiple_of=pad_to_multiple_of,
        device=mesh.device,
    )


def _divides_rows(plan: Sequence[Sequence[int]], row_of: Sequence[int]) -> bool:
    in_micro_batch: dict[int, int] = {}  # by row, the first that has it
    return any(
        in_micro_batch.setdefault(row_of[index], number) != number
        for number, indices in enumerate(plan)
        for index in indices
    )


def _summed(local: BatchTotals, mesh: Mesh) -> BatchTotals:
    counts = torch.tensor([local.tokens, local.sequences], dtype=torch.int64, device=mesh.device)
    dist.all_reduce(counts, group=mesh.dp_group)
    tokens, sequences = counts.tolist()
    return BatchTotals(tokens, sequences)


def _most(count: int, mesh: Mesh) -> int:
    """The most that any rank has."""
    most = torch.tensor(count, dtype=torch.int64, device=mesh.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.dp_group)
    return int(most)
