"""A trainer that is killed before its n-th write: a process of its own, started by tests.

Writes are commands that change the database and renames of files, which is how checkpoints and
weights come into being.
"""

import itertools
import os
import signal
import sys

from pymongo import monitoring

from agentrl.training.trainer import main

WRITES = {"insert", "update", "findAndModify", "delete"}


class Killer(monitoring.CommandListener):
    """Counts writes and kills this process right before number `last`."""

    def __init__(self, last: int) -> None:
        self._last = last
        self._count = itertools.count(1)
        rename = os.rename

        def renaming(source: str, target: str) -> None:
            self.write()
            rename(source, target)

        os.rename = renaming  # type: ignore[assignment]

    def write(self) -> None:
        if next(self._count) == self._last:
            os.kill(os.getpid(), signal.SIGKILL)

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        if event.command_name in WRITES:
            self.write()

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None: ...

    def failed(self, event: monitoring.CommandFailedEvent) -> None: ...


def train(flags: list[str], last: int) -> None:
    """Train, and be killed before write number `last`, if it comes to that."""
    monitoring.register(Killer(last))
    sys.exit(main(flags))
