"""Group commit: writes to one collection that wait at the same time go out as one bulk write.

Every write must be repeatable, because after an outage it is repeated: its id is derived from its
subject, or it names the state that it expects. The callers decide what is written, and when
(`records.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pymongo import InsertOne, UpdateMany
from pymongo.errors import BulkWriteError, WriteError

from agentrl.databases.batches import Batches, Pace, Waiter
from agentrl.databases.connection import (
    Documents,
    is_outage,
    retry_through_outages,
)

# Updates of one document each, by its `_id`. `UpdateOne` would be retried by the driver, for which
# mongod writes to its table of sessions with each update. Here a batch is repeated anyway.
Write = InsertOne[dict[str, Any]] | UpdateMany

DUPLICATE_KEY = 11000


class NotSent(RuntimeError):
    """The write was no longer allowed when its turn came, and was not sent."""


@dataclass(frozen=True, slots=True, eq=False)
class _Writes:
    """The writes of one caller; they are sent together."""

    writes: Sequence[Write]
    allowed: Callable[[], bool]


_Batch = Sequence[Waiter[_Writes, bool]]


class GroupCommit:
    """The writes of this process to one collection."""

    def __init__(self, collection: Documents, pace: Pace | None = None) -> None:
        self._collection = collection
        self._batches = Batches[_Writes, bool](self._send_batch, f"{collection.name} writes", pace)

    async def write(
        self,
        writes: Sequence[Write],
        allowed: Callable[[], bool] = lambda: True,
        *,
        at_once: bool = False,
    ) -> bool:
        """Return when the server has acknowledged these writes.

        Inserting a document whose `_id` exists counts as done. Returns whether every update of the
        whole *batch* found its document. If not, the caller must check its own updates.

        `allowed` is called before each attempt to send. If it returns False, these writes are not
        sent and `NotSent` is raised. A caller that is cancelled in time withdraws its writes.
        `at_once`: they do not wait for the moment of the pace.
        Raises the error of these writes, never of others in the batch, and `DatabaseUnreachable`
        after a long outage.
        """
        if not writes:
            return True
        return await self._batches.ask(_Writes(writes, allowed), at_once=at_once)

    def hurry(self) -> None:
        """Let the writes that wait not wait for the moment of the pace."""
        self._batches.hurry()

    async def _send_batch(self, batch: _Batch) -> None:
        # A document that cannot be sent (over 16 MB, or not BSON) fails the whole bulk write.
        await retry_through_outages(lambda: self._try(batch), f"a write to {self._collection.name}")

    async def _try(self, batch: _Batch) -> None:
        """Send the writes of a batch that are still wanted, and answer their callers."""
        for waiter in batch:
            if not waiter.done.done() and not waiter.request.allowed():
                waiter.refuse(NotSent(self._collection.name))
        wanted = [waiter for waiter in batch if not waiter.done.done()]
        if not wanted:
            return
        writes = [write for waiter in wanted for write in waiter.request.writes]
        updates = sum(isinstance(write, UpdateMany) for write in writes)
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
            own = range(first, first + len(waiter.request.writes))
            first = own.stop
            failed = next((errors[index] for index in own if index in errors), None)
            if failed is None:
                waiter.answer(found_all)
            else:
                waiter.refuse(failed)


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
