"""The connection to a run's MongoDB and its collections, with retries while the server is away.

The code that opens a database creates each collection's indexes, once per process.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import pymongo
from pymongo import ASCENDING, AsyncMongoClient, IndexModel
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import (
    BulkWriteError,
    ConnectionFailure,
    CursorNotFound,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
)
from pymongo.read_concern import ReadConcern
from pymongo.read_preferences import ReadPreference
from pymongo.write_concern import WriteConcern

from agentrl.databases.documents import RecordStatus, TaskStatus
from agentrl.databases.mongodb_url import URL_ERRORS, why_no_url
from agentrl.failures import InfrastructureFailure
from agentrl.redaction import without_passwords

logger = logging.getLogger(__name__)

Documents = AsyncCollection[dict[str, Any]]
T = TypeVar("T")

PATIENCE_S = 300.0  # an outage of the database that a run outlives
_GOODBYE_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0  # between two tries while the database is away

# Codes with which a server says that it cannot serve now, and that pass. PyMongo repeats what meets
# one of them once; while members elect a primary, or a disk is full, that is too soon.
_PASSING = frozenset(
    {
        6, 7, 89, 9001,  # a member cannot be reached by another
        91, 189, 10107, 11600, 11602, 13435, 13436,  # it is no primary any more, or is stopping
        64, 134, 262,  # no majority answers in time
        14031,  # its disk is full
    }
)  # fmt: skip


class DatabaseUnreachable(InfrastructureFailure):
    """MongoDB does not answer, or refuses us. The message is one sentence for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(message, dependency="the database")


def is_outage(error: BaseException) -> bool:
    """Whether the database is away for a time: gone, going, electing a primary, without a majority,
    or without space; or it came back without the cursors that it had."""
    if isinstance(error, ConnectionFailure | CursorNotFound):
        return True
    if isinstance(error, BulkWriteError):
        details = error.details or {}
        told = [*details.get("writeErrors", []), *details.get("writeConcernErrors", [])]
        return any(each.get("code") in _PASSING for each in told)
    return isinstance(error, OperationFailure) and error.code in _PASSING


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
    parts = _Collection("record_data_parts")  # columns of long rows: `row_parts.py`
    services = _Collection("inference_services")  # InferenceService
    policy_versions = _Collection("policy_versions")  # PolicyVersion
    runs = _Collection("runs")  # the one Run
    outages = _Collection("outages")  # what each sampler waits for: `outages.py`

    def durable(self, collection: Documents) -> Documents:
        """The collection as a majority of the members knows it, for what is not asked again: it is
        not undone when the primary fails. It may be some milliseconds behind."""
        return collection.with_options(read_concern=ReadConcern("majority"))

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

BEFORE_ALL = datetime(2000, 1, 1, tzinfo=UTC)  # a time that no document is of

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
        # claims of scorings, those that have waited longest first
        IndexModel(
            [("score_at", ASCENDING)],
            name="to_score",
            partialFilterExpression={"score_at": {"$type": "date"}},
        ),
        # the same of finalisations
        IndexModel(
            [("finalisation.lease_expires", ASCENDING)],
            name="to_finalise",
            partialFilterExpression={"status": TaskStatus.FINALISING},
        ),
        # the reaper, admission and progress counts
        IndexModel(
            [("status", ASCENDING), ("split", ASCENDING), ("group_order", ASCENDING)], name="state"
        ),
        # One group has one place, whoever feeds; and the newest group, where feeding goes on.
        # An evaluation of the same step may come again with other data.
        IndexModel(
            [("split", ASCENDING), ("group_order", ASCENDING), ("data", ASCENDING)],
            name="order",
            unique=True,
        ),
        # what came of the latest groups
        IndexModel(
            [("split", ASCENDING), ("completed_at", ASCENDING)],
            name="completed",
            partialFilterExpression={"completed_at": {"$gt": BEFORE_ALL}},
        ),
    ],
    "records": [
        IndexModel([("task", ASCENDING), ("rollout", ASCENDING)], name="task"),
        IndexModel([("split", ASCENDING), ("finished_at", ASCENDING)], name="recent"),
        # what waits for a person
        IndexModel(
            [("status", ASCENDING)],
            name="quarantined",
            partialFilterExpression={"status": RecordStatus.QUARANTINED},
        ),
    ],
    "dispatched_sampling_tasks": [
        IndexModel([("record_id", ASCENDING), ("turn", ASCENDING)], name="record"),
    ],
    "tool_results": [IndexModel([("record_id", ASCENDING)], name="record")],
    "record_data": [
        IndexModel([("status", ASCENDING), ("group_order", ASCENDING)], name="lease"),
        # which of those that wait are too old
        IndexModel([("status", ASCENDING), ("policy_versions", ASCENDING)], name="versions"),
        # what is leased for a step, or was too old for it: rows that are trained are not in it
        IndexModel(
            [("status", ASCENDING), ("step", ASCENDING)],
            name="held",
            partialFilterExpression={"step": {"$gt": 0}},
        ),
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
        except PyMongoError as error:
            if not is_outage(error):
                raise
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
    if (fault := why_no_url(url)) is not None:
        raise DatabaseUnreachable(fault)
    try:
        client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(
            url,
            tz_aware=True,
            appname="agentrl",
            serverSelectionTimeoutMS=int(timeout_s * 1000),
        )
    except URL_ERRORS as error:
        raise DatabaseUnreachable(
            f"--db_connection_string {shown} is not a MongoDB URL: {error}"
        ) from None
    # Whatever the URL says: what one member alone has can be undone, and then a slot is leased
    # twice or a row is lost. And another member than the primary may answer with what was.
    database = RunDatabase(
        client,
        client.get_database(
            name,
            write_concern=WriteConcern("majority"),
            read_concern=ReadConcern(),
            read_preference=ReadPreference.PRIMARY,
        ),
    )
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
