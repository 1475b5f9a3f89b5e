"""The forward and backward passes of one step, and how they are run.

Every rank runs the same passes in the same order, because each is a collective of the sharded
model; a rank that has less to compute runs placeholders.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.training.attention import has_tree_attention
from agentrl.training.batch import (
    MicroBatch,
    TrunkBatch,
    collate_padded,
    collate_part,
    collate_trunk,
    placeholder,
    placeholder_trunk,
)
from agentrl.training.forest import merge
from agentrl.training.logprobs import compute_trunk, token_logprobs
from agentrl.training.packing import pack_forest
from agentrl.training.parallel import Mesh
from agentrl.training.planner import pack_sequences
from agentrl.training.sequences import TrainingSequence

# What a pass gives to whom: the number of the micro-batch, the micro-batch, its predictions'
# logprobs [M] and entropy [M]. Returns the scalar to differentiate, or None.
Consume = Callable[[int, MicroBatch, Tensor, Tensor | None], Tensor | None]


@dataclass(frozen=True)
class Section:
    """Micro-batches, and the trunk that some of them stand behind, computed before them."""

    trunk: TrunkBatch | None
    batches: tuple[MicroBatch, ...]


@dataclass(frozen=True)
class Program:
    """This rank's passes of a step: as many as every other rank's, in sections of equal shape."""

    sections: tuple[Section, ...]

    @property
    def batches(self) -> list[MicroBatch]:
        """All micro-batches, in order."""
        return [batch for section in self.sections for batch in section.batches]


def make_program(
    model: PreTrainedModel,
    rows: Sequence[Sequence[TrainingSequence]],
    micro_batch_tokens: int,
    pad_to_multiple_of: int,
    mesh: Mesh,
) -> Program:
    """Divide `rows` (this rank's, each as its sequences) into micro-batches. Collective."""
    sequences = [sequence for row in rows for sequence in row]
    row_of = [number for number, row in enumerate(rows) for _ in row]
    pad, device = pad_to_multiple_of, mesh.device
    tree = has_tree_attention(model)
    trunks: list[Section] = []
    if tree:
        forest = merge([sequence.inputs for sequence in sequences])
        packing = pack_forest(forest.parents, forest.lengths, forest.last_nodes, micro_batch_tokens)
        for group in packing.trunks:
            batches = tuple(
                collate_part(forest, part, group.trunk, sequences, row_of, pad, device)
                for part in group.parts
            )
            trunks.append(Section(collate_trunk(forest, group.trunk, pad, device), batches))
        plain = [
            collate_part(forest, part, (), sequences, row_of, pad, device) for part in packing.plain
        ]
    else:
        lengths = [len(sequence.inputs) for sequence in sequences]
        plain = [
            collate_padded([sequences[i] for i in part], [row_of[i] for i in part], pad, device)
            for part in pack_sequences(lengths, micro_batch_tokens, pad)
        ]
    return _align(trunks, plain, placeholder(pad, device, tree=tree), pad, mesh)


def run_program(
    model: PreTrainedModel,
    program: Program,
    chunk_size: int,
    with_entropy: bool,
    consume: Consume,
) -> None:
    """One pass over all micro-batches, forward and, of what `consume` returns, backward.

    Collective. Under `torch.no_grad()` it is forward only. The micro-batches are counted as in
    `Program.batches`.
    """
    number = 0
    for section in program.sections:
        trunk = None if section.trunk is None else compute_trunk(model, section.trunk)
        for batch in section.batches:
            behind = trunk if batch.trunk_tokens else None
            logprobs, entropy = token_logprobs(model, batch, chunk_size, with_entropy, behind)
            loss = consume(number, batch, logprobs, entropy)
            if loss is not None:
                loss.backward()
            number += 1
        if trunk is not None and torch.is_grad_enabled():
            trunk.backward()


def _align(
    trunks: Sequence[Section], plain: Sequence[MicroBatch], empty: MicroBatch, pad: int, mesh: Mesh
) -> Program:
    """Fill up with `empty` and empty trunks to what the ranks with most have. Collective.

    A section has as many micro-batches as any rank's has; where this rank's has fewer, plain ones
    take the places, and empty ones when those are used up.
    """
    n_trunks = _most([len(trunks)], mesh)[0]
    mine = [len(section.batches) for section in trunks]
    shape = _most([*mine, *[1] * (n_trunks - len(mine))], mesh) if n_trunks else []
    left = deque(plain)
    sections = []
    for index, size in enumerate(shape):
        own = trunks[index] if index < len(trunks) else None
        batches = [] if own is None else list(own.batches)
        while len(batches) < size:
            batches.append(left.popleft() if left else empty)
        trunk = placeholder_trunk(pad, mesh.device) if own is None else own.trunk
        sections.append(Section(trunk, tuple(batches)))
    # a step has one pass at least
    n_left = _most([max(len(left), 1 - n_trunks)], mesh)[0]
    if n_left:
        sections.append(Section(None, (*left, *[empty] * (n_left - len(left)))))
    return Program(tuple(sections))


def _most(counts: Sequence[int], mesh: Mesh) -> list[int]:
    """The largest of each of `counts` on any rank. Collective."""
    most = torch.tensor(counts, dtype=torch.int64, device=mesh.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.dp_group)
    result: list[int] = most.tolist()
    return result
