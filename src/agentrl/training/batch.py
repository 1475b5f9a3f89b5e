"""Rows of the database to training sequences, and sequences to the tensors of a micro-batch.

A row is a token tree. It is trained here by its root-to-leaf paths, each one causal sequence; a
node that several paths share is computed in each of them and trained in the first only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.databases.arrays import unpack_floats, unpack_ints, unpack_mask
from agentrl.databases.documents import DBRecordData
from agentrl.databases.policies import Lineage
from agentrl.training.losses import BatchTotals, LossInputs


@dataclass(frozen=True)
class TrainingSequence:
    """One causal sequence of L tokens. All arrays are [L].

    A token is predicted from the one before it, so `loss_mask[0]` is always False.
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    advantages: NDArray[np.float32]
    logprobs: NDArray[np.float32]  # the sampler's
    staleness: NDArray[np.int32]  # steps that the trained weights are newer than the sampler's
    temperature: float
    row_tokens: int  # trained tokens of the whole row, over all its paths

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class MicroBatch:
    """The tensors of one forward pass: B sequences of T tokens, N trained tokens."""

    input_ids: Tensor  # [B, T] int64, right padded with 0
    positions: Tensor  # [N] int64, into [B * T]: whose hidden state predicts the token
    targets: Tensor  # [N] int64, the token
    temperatures: Tensor  # [N] float32
    behaviour_logprobs: Tensor  # [N] float32
    advantages: Tensor  # [N] float32
    staleness: Tensor  # [N] int64, see `TrainingSequence`
    sequence_tokens: Tensor  # [N] float32, trained tokens of the token's row
    sequence: Tensor  # [N] int64, which of the rank's rows the token is of
    mask: Tensor  # [N] bool, False only in a placeholder, see `placeholder`

    def loss_inputs(self, logprobs: Tensor, entropy: Tensor | None) -> LossInputs:
        """What the loss sees, given logprobs and entropy [N] of the policy being trained."""
        return LossInputs(
            logprobs=logprobs,
            behaviour_logprobs=self.behaviour_logprobs,
            advantages=self.advantages,
            mask=self.mask,
            staleness=self.staleness,
            sequence_tokens=self.sequence_tokens,
            sequence=self.sequence,
            entropy=entropy,
        )


def row_sequences(row: DBRecordData, lineage: Lineage, step: int) -> list[TrainingSequence]:
    """The row's root-to-leaf paths that train something, in depth-first order of their leaves.

    `step`: optimizer steps in the weights that will be trained, from which staleness counts.
    Raises `ValueError` naming the row if its arrays and its tree do not fit together.
    """
    input_ids, versions = unpack_ints(row.input_ids), unpack_ints(row.versions)
    advantages, logprobs = unpack_floats(row.advantages), unpack_floats(row.logprobs)
    untrained = unpack_mask(row.loss_mask) == 0
    for array in (input_ids, versions, advantages, logprobs, untrained):
        if len(array) != row.n_tokens:
            raise ValueError(
                f"row {row.id}: an array has {len(array)} tokens where n_tokens says "
                f"{row.n_tokens}; the document is damaged, remove it from record_data"
            )
    paths = _paths(row)
    staleness = np.zeros_like(versions)
    for version in row.policy_versions:
        staleness[versions == version] = lineage.age(version, step)
    mask = ~untrained  # shrinks as tokens are given to a path: each is trained once
    parts: list[tuple[NDArray[np.intp], NDArray[np.bool_]]] = []
    for path in paths:
        tokens = np.concatenate([np.arange(row.nodes[n].start, row.nodes[n].end) for n in path])
        path_mask = mask[tokens]
        path_mask[0] = False
        mask[tokens] = False
        if path_mask.any():
            parts.append((tokens, path_mask))
    row_tokens = sum(int(path_mask.sum()) for _, path_mask in parts)
    return [
        TrainingSequence(
            input_ids=input_ids[tokens],
            loss_mask=path_mask,
            advantages=advantages[tokens],
            logprobs=logprobs[tokens],
            staleness=staleness[tokens],
            temperature=row.temperature,
            row_tokens=row_tokens,
        )
        for tokens, path_mask in parts
    ]


def _paths(row: DBRecordData) -> list[list[int]]:
    """Root-to-leaf paths as node indices; nodes stand in depth-first order."""
    inner = {node.parent for node in row.nodes}
    position = 0
    for index, node in enumerate(row.nodes):
        if node.start != position or node.end <= node.start or not -1 <= node.parent < index:
            raise ValueError(
                f"row {row.id}: node {index} ({node.start}, {node.end}, parent {node.parent}) is "
                "no part of a tree in depth-first order; the document is damaged, remove it from "
                "record_data"
            )
        position = node.end
    if position != row.n_tokens:
        raise ValueError(
            f"row {row.id}: its nodes end at token {position}, n_tokens says {row.n_tokens}; the "
            "document is damaged, remove it from record_data"
        )
    paths = []
    for leaf in range(len(row.nodes)):
        if leaf in inner:
            continue
        path = [leaf]
        while (parent := row.nodes[path[-1]].parent) >= 0:
            path.append(parent)
        paths.append(path[::-1])
    return paths


def count_totals(rows: Sequence[Sequence[TrainingSequence]]) -> BatchTotals:
    """Trained tokens, and rows that train something, of one rank. `rows`: each row's sequences."""
    trained = [row[0].row_tokens for row in rows if row]
    return BatchTotals(tokens=sum(trained), sequences=len(trained))


def collate(
    sequences: Sequence[TrainingSequence],
    rows: Sequence[int],
    pad_to_multiple_of: int = 1,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Pad `sequences` (at least one) on the right and gather what the loss needs.

    `rows`: of which of the rank's rows each of them is.
    """
    longest = max(len(sequence) for sequence in sequences)
    width = -(-longest // pad_to_multiple_of) * pad_to_multiple_of
    input_ids = np.zeros((len(sequences), width), dtype=np.int64)
    trained = [np.flatnonzero(sequence.loss_mask) for sequence in sequences]
    counts = [len(tokens) for tokens in trained]
    for line, sequence in enumerate(sequences):
        input_ids[line, : len(sequence)] = sequence.input_ids

    def gathered(arrays: list[NDArray[np.generic]]) -> NDArray[np.generic]:
        return np.concatenate(
            [array[tokens] for array, tokens in zip(arrays, trained, strict=True)]
        )

    def repeated(values: list[float]) -> NDArray[np.float32]:
        return np.repeat(np.asarray(values, dtype=np.float32), counts)

    def tensor(array: NDArray[np.generic], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)

    starts = np.repeat(np.arange(len(sequences), dtype=np.int64) * width, counts)
    return MicroBatch(
        input_ids=tensor(input_ids, torch.int64),
        positions=tensor(starts + np.concatenate(trained) - 1, torch.int64),
        targets=tensor(gathered([sequence.input_ids for sequence in sequences]), torch.int64),
        temperatures=tensor(repeated([s.temperature for s in sequences]), torch.float32),
        behaviour_logprobs=tensor(gathered([s.logprobs for s in sequences]), torch.float32),
        advantages=tensor(gathered([s.advantages for s in sequences]), torch.float32),
        staleness=tensor(gathered([s.staleness for s in sequences]), torch.int64),
        sequence_tokens=tensor(repeated([float(s.row_tokens) for s in sequences]), torch.float32),
        sequence=tensor(np.repeat(np.asarray(rows), counts), torch.int64),
        mask=torch.ones(sum(counts), dtype=torch.bool, device=device),
    )


def placeholder(device: torch.device | str = "cpu") -> MicroBatch:
    """A micro-batch without weight, for a rank that has fewer than the others.

    It goes through the model like any other, so that all ranks meet in the same collectives, and
    its masked token adds exactly 0 to loss and gradients.
    """
    one = torch.zeros(1, device=device)
    index = torch.zeros(1, dtype=torch.int64, device=device)
    return MicroBatch(
        input_ids=torch.zeros((1, 2), dtype=torch.int64, device=device),
        positions=index,
        targets=index,
        temperatures=one + 1,
        behaviour_logprobs=one,
        advantages=one,
        staleness=index,
        sequence_tokens=one + 1,
        sequence=index,
        mask=torch.zeros(1, dtype=torch.bool, device=device),
    )
