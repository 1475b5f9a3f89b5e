"""The time that a stopped trainer may still use: `--drain_seconds` minus the time of a save.

A step that ends in time is finished and saved. Otherwise the step is interrupted, its rows are
released, and the weights before it are saved.
"""

import time
from collections.abc import Callable

_MARGIN = 1.5  # the last save competes with other processes that end


class StepLeft(Exception):
    """All processes interrupt the current step after the same pass."""


class Drain:
    """The time since the first stop signal, compared with `seconds`."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._since: float | None = None

    def begin(self) -> None:
        """Start the clock at the first signal."""
        if self._since is None:
            self._since = self._clock()

    def must_save(self, save_seconds: float | None) -> bool:
        """Whether the remaining time is needed for a save.

        `save_seconds`: duration of the last save; None before the first, which gets half the time.
        """
        if self._since is None:
            return False
        reserved = self._seconds / 2 if save_seconds is None else _MARGIN * save_seconds
        return self._clock() - self._since >= self._seconds - reserved
