"""The connection to a run's MongoDB and its collections, with retries while the server is away.

The code that opens a database creates each collection's indexes, once per process.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pymongo
from pymongo import ASCENDING, AsyncMongoClient, IndexModel
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import (
    ConfigurationError,
    ConnectionFailure,
    CursorNotFound,
    InvalidURI,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
)

from agentrl.databases.documents import TaskStatus
from agentrl.redaction import without_passwords

logger = logging.getLogger(__name__)

Documents = AsyncCollection[dict[str, Any]]
T = TypeVar("T")

PATIENCE_S = 300.0  # an outage of the database that a run outlives
_GOODBYE_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0  # between two tries while the database is away

# The server is gone, is going, or came back without the cursors it had.
OUTAGE = (ConnectionFailure, CursorNotFound)


class DatabaseUnreachable(ConnectionError):
    """MongoDB does not answer, or refuses us. The message is one sentence for the user."""


class _Collection:
    """A collection of a run's database, by the name that it has there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, database: "RunDatabase", owner: type) -> Documents:
        return database.database[self.name]


@dataclass(frozen=True)
class RunDatabase:
    """The collections of one run, in the database named after it, by the documents they hold."""

    client: AsyncMongoClient[dict[str, Any]]
    database: AsyncDatabase[dict[str, Any]]

    tasks = _Collection("tasks")  # Task, the ledger of sampling
    records = _Collection("records")  # Record, the trajectories
    turns = _Collection("dispatched_sampling_tasks")  # DispatchedSamplingTask
    tool_results = _Collection("tool_results")  # ToolResult
    rows = _Collection("record_data")  # DBRecordData, what the trainer reads
    services = _Collection("inference_services")  # InferenceService
    policy_versions = _Collection("policy_versions")  # PolicyVersion
    runs = _Collection("runs")  # the one Run

    @property
    def name(self) -> str:
        """The run's name."""
        return self.database.name

    async def close(self) -> None:
        """Close the client and its sockets.

        PyMongo tells the server goodbye first. That is waited for a moment only: a process that
        stops while the database is away must not wait for it.
        """
        with pymongo.timeout(_GOODBYE_S):
            await self.client.close()


# What a run keeps in its database, and nothing else there is a run's.
COLLECTIONS = frozenset(
    value.name for value in vars(RunDatabase).values() if isinstance(value, _Collection)
)

_INDEXES: dict[str, list[IndexModel]] = {
    "tasks": [
        # claims up to an admission limit, old groups first: only groups with free slots
        IndexModel(
            [("split", ASCENDING), ("group_order", ASCENDING)],
            name="free",
            partialFilterExpression={"pending": {"$gt": 0}},
        ),
        # claims in begun groups, wherever they are
        IndexModel(
            [("split", ASCENDING), ("group_order", ASCENDING)],
            name="free_begun",
            partialFilterExpression={"pending": {"$gt": 0}, "status": TaskStatus.RUNNING},
        ),
        # the reaper, admission and progress counts
        IndexModel(
            [("status", ASCENDING), ("split", ASCENDING), ("group_order", ASCENDING)], name="state"
        ),
        # what came of the latest groups
        IndexModel(
            [("split", ASCENDING), ("completed_at", ASCENDING)],
            name="completed",
            partialFilterExpression={"status": TaskStatus.COMPLETED},
        ),
    ],
    "records": [
        IndexModel([("task", ASCENDING), ("rollout", ASCENDING)], name="task"),
        IndexModel([("split", ASCENDING), ("finished_at", ASCENDING)], name="recent"),
    ],
    "dispatched_sampling_tasks": [
        IndexModel([("record_id", ASCENDING), ("turn", ASCENDING)], name="record"),
    ],
    "tool_results": [IndexModel([("record_id", ASCENDING)], name="record")],
    "record_data": [
        IndexModel([("status", ASCENDING), ("group_order", ASCENDING)], name="lease"),
        IndexModel([("trained.step", ASCENDING)], name="trained"),
    ],
    "policy_versions": [IndexModel([("version", ASCENDING)], name="version")],
}


async def retry_through_outages(
    operation: Callable[[], Awaitable[T]], what: str, patience_s: float = PATIENCE_S
) -> T:
    """Do `operation` until the database has answered, through an outage of `patience_s` seconds.

    For operations that may be done twice: an answer that was lost on its way does not tell whether
    the server had already done it. `what` is for the log and the error, as in "the commit of step
    3". Raises `DatabaseUnreachable` after that time; other errors of the operation are its own.
    """
    began = time.monotonic()
    pause = _FIRST_PAUSE_S
    while True:
        try:
            result = await operation()
        except OUTAGE as error:
            away = time.monotonic() - began
            if away + pause > patience_s:
                raise DatabaseUnreachable(
                    f"MongoDB did not answer for {away:.0f} s, at {what}: is it running, and "
                    f"reachable? ({error})"
                ) from error
            if pause == _FIRST_PAUSE_S:
                logger.warning("MongoDB does not answer, at %s: trying again (%s)", what, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        else:
            if pause > _FIRST_PAUSE_S:
                away = time.monotonic() - began
                logger.warning("MongoDB answers again after %.1f s, at %s", away, what)
            return result


async def connect(
    url: str, name: str, timeout_s: float = 30.0, *, only_look: bool = False
) -> RunDatabase:
    """Open database `name` at `url`, waiting up to `timeout_s` seconds for a primary.

    `only_look`: a database that is not there is not made.

    A URL that names a database itself (`mongodb://host/other`) does not change `name`.
    Raises `DatabaseUnreachable` with the URL (without its password) and the time it was tried.
    """
    began = time.monotonic()
    shown = without_passwords(url)
    try:
        client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(
            url,
            tz_aware=True,
            appname="agentrl",
            serverSelectionTimeoutMS=int(timeout_s * 1000),
        )
    except (InvalidURI, ConfigurationError, ValueError) as error:
        raise DatabaseUnreachable(
            f"--db_connection_string {shown} is not a MongoDB URL: {error}"
        ) from None
    database = RunDatabase(client, client[name])
    try:
        await client.admin.command("ping")
        # `ping` is answered by any member; indexes need the primary, so this waits for one.
        for collection, indexes in ({} if only_look else _INDEXES).items():
            await database.database[collection].create_indexes(indexes)
    except ServerSelectionTimeoutError:
        await client.close()
        raise DatabaseUnreachable(
            f"MongoDB at {shown} did not answer within {time.monotonic() - began:.0f} s: "
            "is it running, and is the address right?"
        ) from None
    except OperationFailure as error:
        await client.close()
        raise DatabaseUnreachable(
            f"MongoDB at {shown} refused database {name!r}: {error.details or error}"
        ) from None
    except (PyMongoError, asyncio.CancelledError):
        await client.close()
        raise
    return database
