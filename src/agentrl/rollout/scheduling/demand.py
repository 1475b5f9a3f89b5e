"""Attempts that are begun for somebody who asks for them, and not as many as there is room for."""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from agentrl.rollout.agents.base import AsyncSampler


class Demand(Protocol):
    """Who asks a process for attempts.

    `kind`: makes all of them. `place`: where they are asked for, a part of the process's name: a
    process at the same place takes over what an earlier one left.
    """

    kind: type[AsyncSampler]
    place: str

    def on_change(self, call: Callable[[], None]) -> None:
        """Call this whenever more attempts are wanted."""

    def wanted(self) -> Mapping[str | None, int]:
        """How many attempts are wanted, by the id of the line that they are to be of, if any."""

    def resumed(self, records: Collection[str]) -> None:
        """These attempts were taken over from an earlier process, and are about to go on."""

    def begun(self, record: str) -> None:
        """An attempt was begun for somebody who asked."""

    def ended(self, record: str) -> None:
        """An attempt has ended, whatever it came to."""

    def over(self) -> None:
        """The run is finished: no further attempt will be begun."""
