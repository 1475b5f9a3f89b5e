"""Which rows a step of supervised training has: a function of the seed and of the step alone.

A run that is resumed therefore goes on with the rows that it would have had.
"""

import random
from functools import lru_cache


class RowOrder:
    """Epoch after epoch, each a permutation of `n_rows` rows of its own.

    A step may span two epochs, so that all steps have the same number of rows.
    """

    def __init__(self, n_rows: int, seed: int) -> None:
        self._n_rows = n_rows
        self._seed = seed
        self._epoch = lru_cache(maxsize=2)(self._permutation)

    def step(self, step: int, rows_per_step: int) -> list[int]:
        """The indices of the rows of a step, which is counted from 1."""
        places = range((step - 1) * rows_per_step, step * rows_per_step)
        return [self._epoch(place // self._n_rows)[place % self._n_rows] for place in places]

    def _permutation(self, epoch: int) -> list[int]:
        rows = range(self._n_rows)
        return random.Random(f"{self._seed} {epoch}").sample(rows, self._n_rows)
