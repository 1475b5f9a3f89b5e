"""Which rows a step of supervised training has: a function of the seed and of the step alone.

A run that is resumed therefore goes on with the rows that it would have had.
"""

import random


class RowOrder:
    """Epoch after epoch, each a permutation of `n_rows` rows of its own.

    A step may span two epochs, so that all steps have the same number of rows.
    """

    def __init__(self, n_rows: int, seed: int) -> None:
        self._n_rows = n_rows
        self._seed = seed
        self._begin()

    def step(self, step: int, rows_per_step: int) -> list[int]:
        """The indices of the rows of a step, which is counted from 1."""
        places = range((step - 1) * rows_per_step, step * rows_per_step)
        return [self._epoch(place // self._n_rows)[place % self._n_rows] for place in places]

    def _begin(self) -> None:
        self._generator = random.Random(self._seed)
        self._drawn = 0  # epochs
        self._last: list[int] = []

    def _epoch(self, epoch: int) -> list[int]:
        """The permutation of an epoch, counted from 0. Those before it are drawn first."""
        if epoch < self._drawn - 1:
            self._begin()
        while self._drawn <= epoch:
            self._last = self._generator.sample(range(self._n_rows), self._n_rows)
            self._drawn += 1
        return self._last
