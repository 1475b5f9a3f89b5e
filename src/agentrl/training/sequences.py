"""Rows of the database as the sequences that are trained.

A row is a token tree, and its sequences are its root-to-leaf paths. A token that several paths
share is trained in the first of them only; that it is also computed only once is the work of
`forest`, which merges sequences, of one row or of several, under the prefixes they share.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.databases.arrays import unpack_floats, unpack_ints, unpack_mask
from agentrl.databases.documents import DBRecordData
from agentrl.databases.policies import Lineage
from agentrl.training.losses import BatchTotals


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
    trained_before: int = 0  # of them, those of the row's earlier paths
    reward: float = 0.0  # of the row

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def trained(self) -> NDArray[np.intp]:
        """Where the trained tokens stand, in order."""
        return np.flatnonzero(self.loss_mask)

    @property
    def inputs(self) -> NDArray[np.int32]:
        """The tokens that something trained is predicted from: those before the last trained."""
        return self.input_ids[: self.trained[-1]]


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
    counts = [int(path_mask.sum()) for _, path_mask in parts]
    return [
        TrainingSequence(
            input_ids=input_ids[tokens],
            loss_mask=path_mask,
            advantages=advantages[tokens],
            logprobs=logprobs[tokens],
            staleness=staleness[tokens],
            temperature=row.temperature,
            row_tokens=sum(counts),
            trained_before=sum(counts[:index]),
            reward=row.reward,
        )
        for index, (tokens, path_mask) in enumerate(parts)
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
    """What one rank adds to the totals of a step. `rows`: each row's sequences."""
    trained = [row[0].row_tokens for row in rows if row]
    advantages = [s.advantages[s.loss_mask].astype(np.float64) for row in rows for s in row]
    return BatchTotals(
        tokens=sum(trained),
        sequences=len(trained),
        advantages=float(sum(values.sum() for values in advantages)),
        squared_advantages=float(sum(np.square(values).sum() for values in advantages)),
    )
