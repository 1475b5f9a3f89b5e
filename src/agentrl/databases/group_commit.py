"""Group commit: writes to one collection that wait at the same time go out as one bulk write.

A command to MongoDB costs sender and server far more than a document in it. So a process has at
most one bulk write in flight for each collection. A write that arrives meanwhile waits for the next
bulk write, with all others that arrive. If nothing is in flight, a write goes out at once.

Every write must be repeatable, because after an outage it is repeated: its id is derived from its
subject, or it names the state that it expects. The callers decide what is written, and when
(`records.py`).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pymongo import InsertOne, UpdateOne
from pymongo.errors import BulkWriteError, WriteError

from agentrl.databases.connection import (
    DatabaseUnreachable,
    Documents,
    is_outage,
    retry_through_outages,
)

Write = InsertOne[dict[str, Any]] | UpdateOne

DUPLICATE_KEY = 11000


class NotSent(RuntimeError):
    """The write was no longer allowed when its turn came, and was not sent."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """The writes of one caller; they are sent together."""

    writes: Sequence[Write]
    allowed: Callable[[], bool]
    done: "asyncio.Future[bool]"


class GroupCommit:
    """The writes of this process to one collection."""

    def __init__(self, collection: Documents) -> None:
        self._collection = collection
        self._waiting: list[_Waiter] = []
        self._sender: asyncio.Task[None] | None = None

    async def write(
        self, writes: Sequence[Write], allowed: Callable[[], bool] = lambda: True
    ) -> bool:
        """Return when the server has acknowledged these writes.

        Inserting a document whose `_id` exists counts as done. Returns whether every update of the
        whole *group* found its document. If not, the caller must check its own updates.

        `allowed` is called before each attempt to send. If it returns False, these writes are not
        sent and `NotSent` is raised. A caller that is cancelled in time withdraws its writes.
        Raises the error of these writes, never of others in the group, and `DatabaseUnreachable`
        after a long outage.
        """
        if not writes:
            return True
        waiter = _Waiter(writes, allowed, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        if self._sender is None:
            self._sender = asyncio.create_task(self._send(), name=f"{self._collection.name} writes")
        return await waiter.done

    async def _send(self) -> None:
        """Send group after group until nobody waits."""
        group: list[_Waiter] = []
        try:
            while self._waiting:
                group, self._waiting = self._waiting, []
                await self._send_group(group)
        finally:
            self._sender = None
            for waiter in (*group, *self._waiting):  # not empty only if this task was cancelled
                waiter.done.cancel()
            self._waiting = []

    async def _send_group(self, group: Sequence[_Waiter]) -> None:
        try:
            await retry_through_outages(
                lambda: self._try(group), f"a write to {self._collection.name}"
            )
        except DatabaseUnreachable as error:
            _refuse(group, error)
        except Exception as error:
            # A document that cannot be sent (over 16 MB, or not BSON) fails the whole bulk write.
            # Sending each caller's writes alone finds the one at fault.
            if len(group) == 1:
                _refuse(group, error)
                return
            for waiter in group:
                await self._send_group([waiter])

    async def _try(self, group: Sequence[_Waiter]) -> None:
        """Send the writes of a group that are still wanted, and answer their callers."""
        for waiter in group:
            if not waiter.done.done() and not waiter.allowed():
                waiter.done.set_exception(NotSent(self._collection.name))
        wanted = [waiter for waiter in group if not waiter.done.done()]
        if not wanted:
            return
        writes = [write for waiter in wanted for write in waiter.writes]
        updates = sum(isinstance(write, UpdateOne) for write in writes)
        errors: dict[int, WriteError] = {}
        result: Mapping[str, Any]
        try:
            result = (await self._collection.bulk_write(writes, ordered=False)).bulk_api_result
        except BulkWriteError as error:
            assert error.details is not None
            result = error.details
            if result["writeConcernErrors"] or is_outage(error):
                raise
            errors = _own_errors(result["writeErrors"], writes)
        found_all = result["nMatched"] + result["nUpserted"] == updates
        first = 0
        for waiter in wanted:
            own = range(first, first + len(waiter.writes))
            first = own.stop
            if waiter.done.done():
                continue  # cancelled after its writes were sent
            failed = next((errors[index] for index in own if index in errors), None)
            if failed is None:
                waiter.done.set_result(found_all)
            else:
                waiter.done.set_exception(failed)


def _own_errors(
    details: Sequence[dict[str, Any]], writes: Sequence[Write]
) -> dict[int, WriteError]:
    """Errors by index in the bulk write, without duplicate keys of insertions.

    They do not hold the writes themselves, which may have megabytes.
    """
    return {
        detail["index"]: WriteError(
            detail["errmsg"],
            detail["code"],
            {name: value for name, value in detail.items() if name != "op"},
        )
        for detail in details
        if not (detail["code"] == DUPLICATE_KEY and isinstance(writes[detail["index"]], InsertOne))
    }


def _refuse(group: Sequence[_Waiter], error: Exception) -> None:
    for waiter in group:
        if not waiter.done.done():
            waiter.done.set_exception(error)
