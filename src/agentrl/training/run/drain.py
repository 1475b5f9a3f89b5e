"""How long a trainer that was told to stop goes on: `--drain_seconds`, less what a save takes.

A step that ends in time is finished and saved. One that does not is left: its rows go back, and
what was trained before it is saved.
"""

import time
from collections.abc import Callable

_MARGIN = 1.5  # a save of the end competes with everything else that ends


class StepLeft(Exception):
    """The step that runs is left, by all processes after the same pass."""


class Drain:
    """The time since the first wish to stop, against `seconds`."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._since: float | None = None

    def begin(self) -> None:
        """A signal came."""
        if self._since is None:
            self._since = self._clock()

    def must_save(self, save_seconds: float | None) -> bool:
        """Whether the time that is left is needed to save.

        `save_seconds`: what the last save took; None before the first, which then gets half.
        """
        if self._since is None:
            return False
        reserved = self._seconds / 2 if save_seconds is None else _MARGIN * save_seconds
        return self._clock() - self._since >= self._seconds - reserved
