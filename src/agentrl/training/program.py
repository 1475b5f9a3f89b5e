"""The forward and backward passes of one step, and how they are run.

Every rank runs the same passes in the same order, because each is a collective of the sharded
model; a rank that has less to compute runs placeholders.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.training.attention import has_tree_attention
from agentrl.training.batch import MicroBatch, collate_forest, collate_padded, placeholder
from agentrl.training.forest import merge
from agentrl.training.logprobs import token_logprobs
from agentrl.training.parallel import Mesh
from agentrl.training.planner import pack_sequences, pack_trees
from agentrl.training.sequences import TrainingSequence

# What a pass gives to whom: the number of the micro-batch, the micro-batch, its predictions'
# logprobs [M] and entropy [M]. Returns the scalar to differentiate, or None.
Consume = Callable[[int, MicroBatch, Tensor, Tensor | None], Tensor | None]


@dataclass(frozen=True)
class Program:
    """This rank's micro-batches of a step, as many as every other rank has."""

    batches: Sequence[MicroBatch]

    @property
    def n_micro_batches(self) -> int:
        """How many forward and backward passes over trained tokens there are."""
        return len(self.batches)


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
    tree = has_tree_attention(model)
    if tree:
        plan = _plan_trees(sequences, micro_batch_tokens)
    else:
        lengths = [len(sequence.inputs) for sequence in sequences]
        plan = pack_sequences(lengths, micro_batch_tokens, pad_to_multiple_of)
    collate = collate_forest if tree else collate_padded
    batches = [
        collate(
            [sequences[index] for index in part],
            [row_of[index] for index in part],
            pad_to_multiple_of,
            mesh.device,
        )
        for part in plan
    ]
    missing = _most(max(len(batches), 1), mesh) - len(batches)
    empty = placeholder(pad_to_multiple_of, mesh.device, tree=tree)
    return Program([*batches, *[empty] * missing])


def run_program(
    model: PreTrainedModel,
    program: Program,
    chunk_size: int,
    with_entropy: bool,
    consume: Consume,
) -> None:
    """One pass over all micro-batches, forward and, of what `consume` returns, backward.

    Collective. Under `torch.no_grad()` with a `consume` that returns None it is forward only.
    """
    for number, batch in enumerate(program.batches):
        logprobs, entropy = token_logprobs(model, batch, chunk_size, with_entropy)
        loss = consume(number, batch, logprobs, entropy)
        if loss is not None:
            loss.backward()


def _plan_trees(sequences: Sequence[TrainingSequence], budget: int) -> list[list[int]]:
    """Sequences by micro-batch, trees whole."""
    forest = merge([sequence.inputs for sequence in sequences])
    tree_of: list[int] = []  # of each node
    sizes: list[int] = []
    for parent, length in zip(forest.parents, forest.lengths, strict=True):
        if parent == -1:
            sizes.append(0)
        tree_of.append(len(sizes) - 1)
        sizes[-1] += length
    return [
        [s for s, node in enumerate(forest.last_nodes) if tree_of[node] in trees]
        for trees in map(set, pack_trees(sizes, budget))
    ]


def _most(count: int, mesh: Mesh) -> int:
    """The largest `count` of any rank. Collective."""
    most = torch.tensor(count, dtype=torch.int64, device=mesh.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.dp_group)
    return int(most)
