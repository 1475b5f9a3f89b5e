"""Waiting for a change in a run's database, with as few requests as possible.

    async with Changes(database, inserted(database.rows)) as changes:
        while not await enough():
            await changes.wait(timeout_s=5.0)

If the server has change streams (a replica set), a wait ends soon after a change. Otherwise, and
while a stream is broken, it ends after a pause that grows with each wait. Correctness does not
depend on it: a wait may end without a change, and always ends after its timeout. A wait does not
say what changed; the caller reads that itself.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from functools import cache
from types import TracebackType
from typing import Any, Self

from pymongo.asynchronous.change_stream import AsyncDatabaseChangeStream
from pymongo.errors import OperationFailure, PyMongoError

from agentrl.databases.connection import Documents, RunDatabase, is_outage

logger = logging.getLogger(__name__)

Interest = Mapping[str, Any]  # a filter of change events

FIRST_PAUSE_S = 0.05  # the first pause between polls, and the least time between two looks
LONGEST_PAUSE_S = 1.0
LONGEST_UNSEEN_S = 0.25  # longest pause between two requests to an open stream
_PAUSE_GROWTH = 1.5
_NOT_A_REPLICA_SET = 40573  # MongoDB's error code
_REOPEN_S = 0.5  # between two tries to open a broken stream


def inserted(collection: Documents) -> Interest:
    """A document was inserted into the collection."""
    return {"ns.coll": collection.name, "operationType": "insert"}


def updated(collection: Documents, field: str, *values: object) -> Interest:
    """An update set this top-level field to one of `values`, or to anything if none is given."""
    condition = {"$in": list(values)} if values else {"$exists": True}
    return {
        "ns.coll": collection.name,
        "operationType": "update",
        f"updateDescription.updatedFields.{field}": condition,
    }


@cache
def _say_once(sentence: str) -> None:
    """Log a sentence once per process: all its waiters get the same answer from the server."""
    logger.info(sentence)


def _why_none(error: OperationFailure) -> str:
    """Why there is no change stream, and what is done instead."""
    reason = (
        "is a single server, no replica set"
        if error.code == _NOT_A_REPLICA_SET
        else f"refuses it ({(error.details or {}).get('errmsg', error)})"
    )
    return (
        f"no change stream: MongoDB {reason}, so changes are polled every "
        f"{FIRST_PAUSE_S:g} to {LONGEST_PAUSE_S:g} s, with the same results"
    )


class Changes:
    """Waits for changes that match any of `interests`. For one waiter.

    No change is missed between a look and the following wait: the stream is open before the first
    look, and its events are remembered. A broken stream is opened again; this also ends a wait,
    because changes may have been missed meanwhile.
    """

    def __init__(self, database: RunDatabase, *interests: Interest) -> None:
        self._database = database.database
        # The server sends only each event's resume token: rows can be large.
        self._pipeline: list[dict[str, Any]] = [
            {"$match": {"$or": list(interests)}},
            {"$project": {"_id": 1}},
        ]
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()  # the stream was opened, or could not be
        self._streaming = False
        self._pause = FIRST_PAUSE_S
        self._woken = -FIRST_PAUSE_S
        self._reader: asyncio.Task[None] | None = None

    @property
    def streaming(self) -> bool:
        """Whether a change stream is open. If not, a wait is a pause."""
        return self._streaming

    async def wait(self, timeout_s: float, *, found: bool = False) -> None:
        """Return after a change or a pause, at the latest after `timeout_s` seconds.

        `found`: the look before this wait found something, so the pause is short again.
        """
        if found:
            self._pause = FIRST_PAUSE_S
        if not self._streaming:
            timeout_s = min(timeout_s, self._pause)
            self._pause = min(self._pause * _PAUSE_GROWTH, LONGEST_PAUSE_S)
        with contextlib.suppress(TimeoutError):
            # Not `wait_for`: Python 3.11's drops a cancellation that comes with the change.
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
            # A burst of changes leads to one look.
            await asyncio.sleep(self._woken + FIRST_PAUSE_S - time.monotonic())
        self._changed.clear()
        self._woken = time.monotonic()

    async def __aenter__(self) -> Self:
        self._reader = asyncio.create_task(self._read(), name="changes")
        settled = asyncio.create_task(self._settled.wait())
        await asyncio.wait([settled, self._reader], return_when=asyncio.FIRST_COMPLETED)
        settled.cancel()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._reader is not None
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader

    async def _read(self) -> None:
        """Keep a stream open as long as the server supports it."""
        while True:
            try:
                stream = await self._database.watch(self._pipeline, max_await_time_ms=1)
            except PyMongoError as error:
                if is_outage(error):
                    logger.debug("no change stream for now: %s", error)
                    self._settled.set()
                    await asyncio.sleep(_REOPEN_S)
                    continue
                if not isinstance(error, OperationFailure):
                    raise
                _say_once(_why_none(error))
                self._settled.set()
                return
            async with stream:
                self._streaming = True
                if self._settled.is_set():  # a reopened stream: changes may have been missed
                    self._changed.set()
                self._settled.set()
                try:
                    await self._follow(stream)
                except PyMongoError as error:
                    logger.debug("a change stream broke and is opened again: %s", error)
                finally:
                    self._streaming = False
                    self._changed.set()  # end the current wait: the next one is a pause
            await asyncio.sleep(_REOPEN_S)

    async def _follow(self, stream: AsyncDatabaseChangeStream[dict[str, Any]]) -> None:
        """Ask the stream for events until it ends: soon after one, and less often without any.

        A request that waits in the server is woken by every write to it, of any process. So each
        one returns at once, and the pause is here.
        """
        pause = FIRST_PAUSE_S
        while stream.alive:
            if await stream.try_next() is None:
                await asyncio.sleep(pause)
                pause = min(pause * _PAUSE_GROWTH, LONGEST_UNSEEN_S)
            else:
                self._changed.set()
                pause = FIRST_PAUSE_S
