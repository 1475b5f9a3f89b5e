"""The schedule of forward and backward passes of one step, and its execution.

Every rank runs the same passes in the same order, because each is a collective of the sharded
model. A rank that has fewer micro-batches runs placeholders.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from agentrl.training.attention import SharedPrefix
from agentrl.training.data.batch import (
    MicroBatch,
    SharedPrefixBatch,
    collate_padded,
    collate_pass,
    collate_prefix,
    placeholder,
    placeholder_prefix,
)
from agentrl.training.data.forest import merge
from agentrl.training.data.packing import pack_forest
from agentrl.training.data.planner import pack_sequences
from agentrl.training.data.sequences import TrainingSequence, count_totals
from agentrl.training.losses import BatchTotals
from agentrl.training.model.batch_form import BatchForm, batch_form
from agentrl.training.model.logprobs import compute_prefix
from agentrl.training.parallel import Mesh, reduce_over_replicas

Output = TypeVar("Output")
# Computes a pass over a micro-batch that may follow a shared prefix: logprobs or values.
Forward = Callable[[MicroBatch, SharedPrefix | None], Output]
# Consumes the output of a micro-batch, given its number. Returns the scalar to differentiate, or
# None.
Consume = Callable[[int, MicroBatch, Output], Tensor | None]


def go_on() -> None:
    """Default of `between_passes`: do nothing."""


@dataclass(frozen=True)
class Section:
    """Micro-batches, and the shared prefix that some of them follow, which is computed first."""

    prefix: SharedPrefixBatch | None
    batches: tuple[MicroBatch, ...]


@dataclass(frozen=True)
class Schedule:
    """This rank's passes of a step. All ranks have equally many, in sections of equal shape."""

    sections: tuple[Section, ...]
    n_rows: int  # of this rank
    totals: BatchTotals  # of all ranks
    divides_rows: bool  # whether any rank has tokens of one row in several micro-batches
    between_passes: Callable[[], None] = go_on  # may raise, on all ranks alike: leaves the step

    @property
    def batches(self) -> list[MicroBatch]:
        """All micro-batches, in order."""
        return [batch for section in self.sections for batch in section.batches]


def make_schedule(
    model: PreTrainedModel,
    rows: Sequence[Sequence[TrainingSequence]],
    micro_batch_tokens: int,
    pad_to_multiple_of: int,
    mesh: Mesh,
    between_passes: Callable[[], None] = go_on,
) -> Schedule:
    """Divide `rows` (this rank's, each as its sequences) into micro-batches. Collective.

    Raises `ValueError` if no rank has a token to train.
    """
    totals = _all_reduce_sum(count_totals(rows), mesh)
    if totals.tokens == 0:
        raise ValueError("a step has no trained token in any of its rows")
    sequences = [sequence for row in rows for sequence in row]
    row_of = [number for number, row in enumerate(rows) for _ in row]
    pad, device = pad_to_multiple_of, mesh.device
    form = batch_form(model)
    tree = form is BatchForm.TREE
    prefixed: list[Section] = []
    if tree:
        forest = merge([sequence.inputs for sequence in sequences])
        packing = pack_forest(
            forest.tree.parents, forest.tree.lengths, forest.last_nodes, micro_batch_tokens
        )
        for group in packing.prefixed:
            batches = tuple(
                collate_pass(forest, one, group.prefix, sequences, row_of, pad, device)
                for one in group.passes
            )
            prefixed.append(Section(collate_prefix(forest, group.prefix, pad, device), batches))
        plain = [
            collate_pass(forest, one, (), sequences, row_of, pad, device) for one in packing.plain
        ]
    else:
        lengths = [len(sequence.inputs) for sequence in sequences]
        equal = form is BatchForm.EQUAL_LENGTHS
        if equal:
            pad = 1  # padding makes a sequence longer
        plain = [
            collate_padded([sequences[i] for i in part], [row_of[i] for i in part], pad, device)
            for part in pack_sequences(lengths, micro_batch_tokens, pad, equal_lengths=equal)
        ]
    sections = _align(prefixed, plain, placeholder(pad, device, tree=tree), pad, mesh)
    return Schedule(
        sections=sections,
        n_rows=len(rows),
        totals=totals,
        divides_rows=bool(_all_reduce_max([_divides_rows(sections)], mesh)[0]),
        between_passes=between_passes,
    )


def run_schedule(
    model: PreTrainedModel, schedule: Schedule, forward: Forward[Output], consume: Consume[Output]
) -> None:
    """One pass of `model` over all micro-batches: forward and, of what `consume` returns, backward.

    Collective. Under `torch.no_grad()` it is forward only. The micro-batches are counted as in
    `Schedule.batches`. Replicas of the model reduce gradients at the last backward pass only.
    """
    number = 0
    left = len(schedule.batches) + sum(section.prefix is not None for section in schedule.sections)
    for section in schedule.sections:
        prefix = None if section.prefix is None else compute_prefix(model, section.prefix)
        for batch in section.batches:
            behind = prefix if batch.prefix_tokens else None
            loss = consume(number, batch, forward(batch, behind))
            left -= 1
            if loss is not None:
                reduce_over_replicas(model, now=not left)
                loss.backward()
            number += 1
            schedule.between_passes()
        if prefix is not None:
            left -= 1
            if torch.is_grad_enabled():
                reduce_over_replicas(model, now=not left)
                prefix.backward()
    if not torch.is_grad_enabled():
        _reshard(model)  # parameters stay gathered for a backward pass, which is not run


def forget_passes(model: PreTrainedModel) -> None:
    """Reset gradients and sharding of a model after an interrupted step, or an interrupted pass."""
    model.zero_grad(set_to_none=True)
    if isinstance(model, FSDPModule) and model._get_fsdp_state()._is_root:
        # Else FSDP would take the next forward pass for the rest of the interrupted one, and add to
        # sums that are not reduced over replicas yet. Before the first pass it is no root.
        model.reset_iter_state()
    _reshard(model)
    model.zero_grad(set_to_none=True)  # now those of the shards


def _reshard(model: PreTrainedModel) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _align(
    prefixed: Sequence[Section],
    plain: Sequence[MicroBatch],
    empty: MicroBatch,
    pad: int,
    mesh: Mesh,
) -> tuple[Section, ...]:
    """Pad sections with `empty` micro-batches and prefixes to equal shapes on all ranks.

    Each section gets the largest number of micro-batches of any rank. Plain micro-batches fill this
    rank's free places first, then empty ones. Collective.
    """
    n_prefixed = _all_reduce_max([len(prefixed)], mesh)[0]
    mine = [len(section.batches) for section in prefixed]
    shape = _all_reduce_max([*mine, *[1] * (n_prefixed - len(mine))], mesh) if n_prefixed else []
    left = deque(plain)
    sections = []
    for index, size in enumerate(shape):
        own = prefixed[index] if index < len(prefixed) else None
        batches = [] if own is None else list(own.batches)
        while len(batches) < size:
            batches.append(left.popleft() if left else empty)
        prefix = placeholder_prefix(pad, mesh.device) if own is None else own.prefix
        sections.append(Section(prefix, tuple(batches)))
    # A step has at least one pass.
    n_left = _all_reduce_max([max(len(left), 1 - n_prefixed)], mesh)[0]
    if n_left:
        sections.append(Section(None, (*left, *[empty] * (n_left - len(left)))))
    return tuple(sections)


def _divides_rows(sections: Sequence[Section]) -> bool:
    """Whether any row has tokens in several micro-batches."""
    rows = [
        row
        for section in sections
        for batch in section.batches
        for row in batch.sequence[batch.mask].unique().tolist()
    ]
    return len(set(rows)) < len(rows)


def _all_reduce_sum(local: BatchTotals, mesh: Mesh) -> BatchTotals:
    """The sums over data-parallel ranks. Collective."""
    sums = torch.tensor(astuple(local), dtype=torch.float64, device=mesh.device)
    dist.all_reduce(sums, group=mesh.dp_group)
    tokens, sequences, advantages, squares = sums.tolist()
    return BatchTotals(int(tokens), int(sequences), advantages, squares)


def _all_reduce_max(counts: Sequence[int], mesh: Mesh) -> list[int]:
    """The largest of each of `counts` on any rank. Collective."""
    most = torch.tensor(counts, dtype=torch.int64, device=mesh.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.dp_group)
    result: list[int] = most.tolist()
    return result
