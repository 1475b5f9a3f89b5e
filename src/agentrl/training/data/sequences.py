"""Converts token trees, such as the rows of the database, to training sequences.

A row is a token tree, and its sequences are its root-to-leaf paths. A token on several paths is
trained in the first of them only. `forest` merges sequences by shared prefixes, so that each shared
token is computed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.databases.documents import DBRecordData
from agentrl.databases.policies import Lineage
from agentrl.databases.token_tree import UNSAID, TokenTree
from agentrl.training.losses import BatchTotals


@dataclass(frozen=True)
class TrainingSequence:
    """One causal sequence of L tokens: a path of a row.

    `tokens` is the path as one line with the row's columns; `mask` is 1 on the tokens that this
    sequence trains. A token is predicted from the one before it, so the first is never trained.
    """

    tokens: TokenTree
    temperature: float
    row_tokens: int  # trained tokens of the whole row, over all its paths
    trained_before: int = 0  # number of them on the row's earlier paths
    reward: float = 0.0  # of the row

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def trained(self) -> NDArray[np.intp]:
        """Indices of the trained tokens, ascending."""
        return np.flatnonzero(self.tokens["mask"])

    @property
    def inputs(self) -> NDArray[np.int32]:
        """The tokens before the last trained one, which the model computes."""
        return self.tokens["ids"][: self.trained[-1]]


def row_sequences(row: DBRecordData, lineage: Lineage, step: int) -> list[TrainingSequence]:
    """The sequences of a row of the database.

    `step`: optimizer steps in the weights that will be trained, from which staleness counts.
    """
    versions = row.tree["versions"]
    staleness = np.zeros_like(versions)
    for version in row.policy_versions:
        staleness[versions == version] = lineage.age(version, step)
    tree = row.tree.with_columns(staleness=staleness, capped=_capped(row.tree))
    return tree_sequences(tree, row.temperature, row.reward)


def _capped(tree: TokenTree) -> NDArray[np.uint8]:
    """The column `capped`, also of a row that was stored without it."""
    # Such rows have one advantage, of which only a failed turn is left with 0 if it is positive.
    advantages = tree["advantages"]
    likely = (tree["mask"] == 1) & (advantages == 0) & (advantages > 0).any()
    capped: NDArray[np.uint8] = np.where(tree["capped"] == UNSAID, likely, tree["capped"])
    return capped


def tree_sequences(
    tree: TokenTree, temperature: float = 1.0, reward: float = 0.0
) -> list[TrainingSequence]:
    """The tree's root-to-leaf paths that train something, in depth-first order of their leaves."""
    untrained = tree["mask"].copy()  # shrinks as tokens are given to a path: each is trained once
    lines: list[TokenTree] = []
    for path in tree.paths():
        places = tree.places(path)
        mask = untrained[places]
        mask[0] = 0
        untrained[places] = 0
        if mask.any():
            lines.append(tree.take(places).with_columns(mask=mask))
    counts = [int(line["mask"].sum()) for line in lines]
    return [
        TrainingSequence(
            tokens=line,
            temperature=temperature,
            row_tokens=sum(counts),
            trained_before=sum(counts[:index]),
            reward=reward,
        )
        for index, line in enumerate(lines)
    ]


def count_totals(rows: Sequence[Sequence[TrainingSequence]]) -> BatchTotals:
    """One rank's part of the totals of a step. `rows`: each row's sequences."""
    trained = [row[0].row_tokens for row in rows if row]
    advantages = [
        sequence.tokens["advantages"][sequence.trained].astype(np.float64)
        for row in rows
        for sequence in row
    ]
    return BatchTotals(
        tokens=sum(trained),
        sequences=len(trained),
        advantages=float(sum(values.sum() for values in advantages)),
        squared_advantages=float(sum(np.square(values).sum() for values in advantages)),
    )
