"""What a sampler knows of its own leases: for which Records it may still write.

The server's clock decides when a lease ends. A process that was stopped or cut off must not write
before it has asked the server again. So it keeps, on its own monotonic clock, the time until which
the last answer surely holds. After that time a write waits for the next heartbeat. It goes on if
the lease was extended, and is refused if the lease was lost.

No I/O here; heartbeats are `TaskLedger.heartbeat`'s.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Set

from agentrl.databases.tasks import LeaseLost


class HeldLeases:
    """The leases of one process, by Record id.

    `asked`: this clock's time *before* the claim or heartbeat was sent. The server counts from its
    arrival, so a lease never ends later here than on the server.
    """

    def __init__(self, lease_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._until: dict[str, float] = {}
        self._news = asyncio.Event()
        self._closed = False

    def count(self) -> int:
        """The number of Records in progress."""
        return len(self._until)

    def shortest(self) -> float | None:
        """Seconds until the first lease ends, unless a heartbeat extends it; None without leases.

        Negative if it may have ended.
        """
        return min(self._until.values()) - self._clock() if self._until else None

    def begin(self, records: Collection[str], asked: float) -> None:
        """The slots of these Records were claimed."""
        self._until.update(dict.fromkeys(records, asked + self._lease_seconds))

    def answered(self, held: Set[str], lost: Set[str], asked: float) -> None:
        """A heartbeat has extended the leases of `held`; those of `lost` are gone.

        Records that have ended meanwhile are ignored.
        """
        until = asked + self._lease_seconds
        self._until.update(dict.fromkeys(self._until.keys() & held, until))
        for record in lost:
            self._until.pop(record, None)
        self._tell()

    def end(self, record: str) -> None:
        """The Record is finished: its lease is no longer needed."""
        self._until.pop(record, None)

    def close(self) -> None:
        """Heartbeats have ended: a lease that expires is lost."""
        self._closed = True
        self._tell()

    def holds(self, record: str) -> bool:
        """Whether the lease is certainly ours now."""
        return self._clock() < self._until.get(record, -float("inf"))

    async def assured(self, record: str) -> None:
        """Return when the lease is certainly ours; waits for a heartbeat's answer if necessary.

        Raises `LeaseLost` if the lease is gone.
        """
        while not self.holds(record):
            if self._closed or record not in self._until:
                raise LeaseLost(f"the lease on the slot of record {record} is gone")
            await self._news.wait()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
