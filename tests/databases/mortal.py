"""Processes of tests that are killed between any two writes to the database."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from agentrl.databases.connection import Documents, RunDatabase

WRITES = {"update_one", "update_many", "find_one_and_update", "bulk_write"}


class Killed(Exception):
    """The process ends here: the write that it was about to make is never made."""


@dataclass(frozen=True)
class MortalDatabase(RunDatabase):
    """The database as seen by a process that will be killed after so many writes."""

    lives: list[int] = field(default_factory=list)  # writes left; empty: no end in sight

    @property
    def tasks(self) -> Documents:
        return self._mortal(super().tasks)

    @property
    def records(self) -> Documents:
        return self._mortal(super().records)

    @property
    def rows(self) -> Documents:
        return self._mortal(super().rows)

    @contextmanager
    def killed_after(self, writes: int | None) -> Iterator[list[bool]]:
        """What is done in the block ends after so many writes; None: it does not. Yields
        [whether it was killed]."""
        killed = [False]
        self.lives[:] = [] if writes is None else [writes]
        try:
            yield killed
        except Killed:
            killed[0] = True
        else:
            self.lives.clear()

    def _mortal(self, collection: Documents) -> Any:
        return MortalCollection(collection, self.lives)


@dataclass(frozen=True)
class MortalCollection:
    """A collection whose writes are counted."""

    collection: Documents
    lives: list[int]

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.collection, name)
        if name not in WRITES:
            return member

        async def write(*args: Any, **kwargs: Any) -> Any:
            if self.lives:
                if self.lives[0] == 0:
                    raise Killed
                self.lives[0] -= 1
            return await member(*args, **kwargs)

        return write
