"""The rows of a file for the ranks that train them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentrl.databases.tree_file import TreeFile
from agentrl.training.data.flops import FlopsModel
from agentrl.training.data.planner import assign_rows
from agentrl.training.data.sequences import TrainingSequence, tree_sequences
from agentrl.training.data.stream import StepRows
from agentrl.training.parallel import Mesh


class FileRows:
    """The rows of `file`, balanced over the data-parallel ranks by `costs`.

    reference: of each pair, the mean logprob of the reference over the trained tokens of the chosen
        and of the rejected answer [n, 2]; None where it is computed in each step
    """

    def __init__(self, file: TreeFile, costs: FlopsModel, mesh: Mesh) -> None:
        self.file = file
        self.mesh = mesh
        self.reference: NDArray[np.float64] | None = None
        self._costs = costs

    def __len__(self) -> int:
        return len(self.file)

    def of(self, rows: Sequence[int]) -> StepRows:
        """The rows with these indices; one that is in twice has two ids."""
        file = self.file
        costs = [
            self._costs.total(*map(float, (file.n_tokens[i], file.pairs[i], file.n_trained[i])))
            for i in rows
        ]
        by_rank = assign_rows(costs, self.mesh.dp_size)
        ids = [[f"{file.place(rows[at])} #{at}" for at in of_rank] for of_rank in by_rank]
        mine = [self._sequences(rows[at]) for at in by_rank[self.mesh.dp_rank]]
        return StepRows([], 1.0, ids, self.mesh.dp_rank, mine)

    def _sequences(self, row: int) -> list[TrainingSequence]:
        tree = self.file[row]
        if self.reference is not None:
            chosen, rejected = self.reference[row]
            # A loss sums over each answer, so that its mean serves for each of its tokens.
            of_token = np.where(tree["advantages"] < 0, rejected, chosen)
            tree = tree.with_columns(reference=of_token)
        return tree_sequences(tree)


def place_of(row: str) -> int:
    """The index of a row with this id among those that `FileRows.of` was asked for."""
    return int(row.rpartition("#")[2])
