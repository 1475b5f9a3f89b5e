"""The connection to a run's MongoDB and its collections, with retries while the server is away.

The code that opens a database creates each collection's indexes, once per process.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import pymongo
from pymongo import ASCENDING, DESCENDING, AsyncMongoClient, IndexModel
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import (
    BulkWriteError,
    ConfigurationError,
    ConnectionFailure,
    CursorNotFound,
    NotPrimaryError,
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

PATIENCE_S = 300.0  # the longest outage of the database that a run survives
_GOODBYE_S = 2.0
_UNTOLD_S = 2.0  # a database that answers within this is not waited for
# A member whose network or machine is gone closes no connection: an operation that waits for its
# answer would wait for many minutes. The driver asks each member this often whether it is there.
# Where one does not answer for both times together, it interrupts the operations that wait for it.
_LOOK_MS, _CONNECT_MS = 1000, 4000
# The driver waits without an end for a connection of its pool and for an answer, and may lose
# either when it interrupts operations. A limit on its sockets would stop change streams; ours is
# on the whole operation.
_POOL_MS, _ANSWER_S = 60_000, 600.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0  # between two tries while the database is away

# Error codes of a server that is temporarily unable to serve. PyMongo retries once, which is too
# early during an election or while a disk is full.
_PASSING = frozenset(
    {
        6, 7, 89, 9001,  # one member cannot reach another
        91, 189, 10107, 11600, 11602, 13435, 13436,  # not the primary any more, or shutting down
        64, 134, 262,  # no majority answers in time
        14031,  # the disk is full
    }
)  # fmt: skip


class DatabaseUnreachable(InfrastructureFailure):
    """MongoDB does not answer, or refuses us. The message is one sentence for the user."""

    def __init__(self, message: str) -> None:
        super().__init__(message, dependency="the database")


def is_outage(error: BaseException) -> bool:
    """Whether the error is temporary: no connection, shutdown, election, no majority, a full disk,
    or cursors lost in a restart."""
    if isinstance(error, ConnectionFailure | CursorNotFound):
        return True
    if isinstance(error, BulkWriteError):
        details = error.details or {}
        told = [*details.get("writeErrors", []), *details.get("writeConcernErrors", [])]
        return any(each.get("code") in _PASSING for each in told)
    return isinstance(error, OperationFailure) and error.code in _PASSING


def reason_of(error: Exception) -> str:
    """What an error of the driver says, without its settings and the whole reply of the server."""
    return str(error).split(", Timeout:")[0].split(", full error:")[0]


class _Collection:
    """A collection of a run's database, by name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, database: "RunDatabase", owner: type) -> Documents:
        return database.database[self.name]


@dataclass(frozen=True)
class RunDatabase:
    """The collections of one run. The database has the run's name."""

    client: AsyncMongoClient[dict[str, Any]]
    database: AsyncDatabase[dict[str, Any]]

    tasks = _Collection("tasks")  # Task, the ledger of sampling
    records = _Collection("records")  # Record, the trajectories
    turns = _Collection("dispatched_sampling_tasks")  # DispatchedSamplingTask
    tool_results = _Collection("tool_results")  # ToolResult
    tool_lists = _Collection("tool_lists")  # ToolList
    rows = _Collection("record_data")  # DBRecordData, what the trainer reads
    parts = _Collection("record_data_parts")  # columns of long rows: `row_parts.py`
    services = _Collection("inference_services")  # InferenceService
    samplers = _Collection("samplers")  # SamplerLoad: `loads.py`
    device_use = _Collection("device_use")  # DeviceUse: `device_use.py`
    policy_versions = _Collection("policy_versions")  # PolicyVersion
    runs = _Collection("runs")  # the one Run
    evaluations = _Collection("evaluations")  # Evaluation, of `agentrl eval`
    step_metrics = _Collection("step_metrics")  # figures of the trainer's steps: `step_metrics.py`
    notes = _Collection("notes")  # Note, of people on Records
    keys = _Collection("keys")  # of its services: `service_key.py`
    outages = _Collection("outages")  # what each sampler waits for: `outages.py`

    def durable(self, collection: Documents) -> Documents:
        """The collection with majority reads, for decisions that are made once.

        What it returns survives a failure of the primary. It may be some milliseconds old.
        """
        return collection.with_options(read_concern=ReadConcern("majority"))

    @property
    def name(self) -> str:
        """The run's name."""
        return self.database.name

    async def close(self) -> None:
        """Close the client and its sockets.

        PyMongo first sends the server a message, for at most `_GOODBYE_S`: a process must be able
        to stop while the database is away.
        """
        with pymongo.timeout(_GOODBYE_S):
            await self.client.close()


# All collections of a run.
COLLECTIONS = frozenset(
    value.name for value in vars(RunDatabase).values() if isinstance(value, _Collection)
)

BEFORE_ALL = datetime(2000, 1, 1, tzinfo=UTC)  # before every document

_SUMMED = (
    "split", "versions.min", "score", "epoch", "tokens.generated", "n_segments", "n_continuations",
    "n_drifts",
)  # fmt: skip

_INDEXES: dict[str, list[IndexModel]] = {
    "tasks": [
        # claims up to an admission limit, oldest group first: only groups with free slots
        IndexModel(
            [("split", ASCENDING), ("group_order", ASCENDING)],
            name="free",
            partialFilterExpression={"pending": {"$gt": 0}},
        ),
        # claims in begun groups, at any position
        IndexModel(
            [("split", ASCENDING), ("group_order", ASCENDING)],
            name="free_begun",
            partialFilterExpression={"pending": {"$gt": 0}, "status": TaskStatus.RUNNING},
        ),
        # claims by what tasks name, while some of that is held back: `free_groups.py`
        IndexModel(
            [
                ("split", ASCENDING),
                ("agent_name", ASCENDING),
                ("scorer", ASCENDING),
                ("status", ASCENDING),
                ("group_order", ASCENDING),
            ],
            name="free_kinds",
            partialFilterExpression={"pending": {"$gt": 0}},
        ),
        # claims of scorings, longest waiting first
        IndexModel(
            [("score_at", ASCENDING)],
            name="to_score",
            partialFilterExpression={"score_at": {"$type": "date"}},
        ),
        # claims of finalisations, longest waiting first
        IndexModel(
            [("finalisation.lease_expires", ASCENDING)],
            name="to_finalise",
            partialFilterExpression={"status": TaskStatus.FINALISING},
        ),
        # the reaper, admission and progress counts
        IndexModel(
            [("status", ASCENDING), ("split", ASCENDING), ("group_order", ASCENDING)], name="state"
        ),
        # At most one group at each place; and the newest group, after which feeding continues.
        # `data` is part of it because a step may be evaluated again with other data.
        IndexModel(
            [("split", ASCENDING), ("group_order", ASCENDING), ("data", ASCENDING)],
            name="order",
            unique=True,
        ),
        # outcomes of the latest groups
        IndexModel(
            [("split", ASCENDING), ("completed_at", ASCENDING)],
            name="completed",
            partialFilterExpression={"completed_at": {"$gt": BEFORE_ALL}},
        ),
        # groups with a rollout that failed
        IndexModel(
            [("split", ASCENDING), ("group_order", ASCENDING)],
            name="failed",
            partialFilterExpression={"slots.error": {"$type": "string"}},
        ),
    ],
    "records": [
        IndexModel([("task", ASCENDING), ("rollout", ASCENDING)], name="task"),
        IndexModel([("split", ASCENDING), ("finished_at", ASCENDING)], name="recent"),
        IndexModel([("split", ASCENDING), ("started_at", ASCENDING)], name="started"),
        # the best and the worst, the longest, those with the most turns: page after page
        *(
            IndexModel(
                [("split", ASCENDING), *fields, ("_id", ASCENDING)],
                name=name,
                partialFilterExpression={"finished_at": {"$gt": BEFORE_ALL}},
            )
            for name, fields in (
                ("by_score", [("score", ASCENDING), ("tokens.generated", DESCENDING)]),
                ("by_length", [("tokens.generated", ASCENDING)]),
                ("by_turns", [("n_turns", ASCENDING)]),
            )
        ),
        # what sums over a run ask for, by policy: no document is read for them
        IndexModel([(field, ASCENDING) for field in _SUMMED], name="results"),
        # Records with turns that were not sampled again
        IndexModel(
            [("split", ASCENDING), ("replay.tokens", ASCENDING)],
            name="replayed",
            partialFilterExpression={"replay.tokens": {"$gt": 0}},
        ),
        # attempts that failed
        IndexModel(
            [("split", ASCENDING), ("finished_at", ASCENDING)],
            name="failed",
            partialFilterExpression={"status": RecordStatus.FAILED},
        ),
        # Records in quarantine
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
        # ready rows that are too old
        IndexModel([("status", ASCENDING), ("policy_versions", ASCENDING)], name="versions"),
        # rows leased for a step, or evicted at it; trained rows are not in this index
        IndexModel(
            [("status", ASCENDING), ("step", ASCENDING)],
            name="held",
            partialFilterExpression={"step": {"$gt": 0}},
        ),
        IndexModel([("trained.step", ASCENDING)], name="trained"),
    ],
    "policy_versions": [IndexModel([("version", ASCENDING)], name="version")],
    "outages": [
        # long after they count no more: samplers that were killed leave theirs
        IndexModel([("heartbeat", ASCENDING)], name="silent", expireAfterSeconds=600),
    ],
    "samplers": [IndexModel([("at", ASCENDING)], name="silent", expireAfterSeconds=600)],
}


async def retry_through_outages(
    operation: Callable[[], Awaitable[T]], what: str, patience_s: float = PATIENCE_S
) -> T:
    """Repeat `operation` while the database is away, for at most `patience_s` seconds.

    The operation must be idempotent: if an answer was lost, the server may have executed it
    already. It is also repeated if it has not ended after ten minutes. `what` names it in the log
    and the error, as in "the commit of step 3". Raises `DatabaseUnreachable` after `patience_s`;
    other errors of the operation pass through.
    """
    began = time.monotonic()
    pause = _FIRST_PAUSE_S
    while True:
        try:
            async with asyncio.timeout(_ANSWER_S) as limit:
                result = await operation()
        except TimeoutError:
            if not limit.expired():
                raise
            logger.warning("MongoDB gave no answer for %g s, at %s: trying again", _ANSWER_S, what)
            began = time.monotonic()
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


@contextmanager
def wait_told(shown: str, timeout_s: float) -> Iterator[None]:
    """Say once that the server is waited for, if the block takes long. `shown`: its URL without a
    password."""
    told = asyncio.get_running_loop().call_later(
        _UNTOLD_S, logger.warning, "waiting for MongoDB at %s, for up to %g s", shown, timeout_s
    )
    try:
        yield
    finally:
        told.cancel()


async def connect(
    url: str, name: str, timeout_s: float = 30.0, *, only_look: bool = False
) -> RunDatabase:
    """Open database `name` at `url`, waiting up to `timeout_s` seconds for a primary.

    `only_look`: create no database and no index. A database in the URL (`mongodb://host/other`) is
    ignored. Raises `DatabaseUnreachable`, with the URL (without its password) in the message.
    A warning names a server that has not answered after two seconds.
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
            heartbeatFrequencyMS=_LOOK_MS,
            connectTimeoutMS=_CONNECT_MS,
            waitQueueTimeoutMS=_POOL_MS,
        )
    except URL_ERRORS as error:
        raise DatabaseUnreachable(
            f"--db_connection_string {shown} is not a MongoDB URL: {error}"
        ) from None
    # These override the URL's options. A write that only one member has can be undone: a slot would
    # be leased twice, or a row lost. A secondary may answer with old data.
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
        with wait_told(shown, timeout_s):
            await client.admin.command("ping")
            # Any member answers `ping`. Creating indexes waits for a primary.
            while True:
                try:
                    for collection, indexes in ({} if only_look else _INDEXES).items():
                        await database.database[collection].create_indexes(indexes)
                    break
                except NotPrimaryError:  # it starts, and is still being elected
                    if time.monotonic() - began > timeout_s:
                        raise
                    await asyncio.sleep(_FIRST_PAUSE_S)
    except ServerSelectionTimeoutError:
        await client.close()
        raise DatabaseUnreachable(
            f"MongoDB at {shown} did not answer within {time.monotonic() - began:.0f} s: "
            "is it running, and is the address right?"
        ) from None
    except ConfigurationError as error:  # a name of mongodb+srv that DNS does not know, say
        await client.close()
        raise DatabaseUnreachable(f"MongoDB at {shown} cannot be asked: {error}") from None
    except OperationFailure as error:
        await client.close()
        raise DatabaseUnreachable(
            f"MongoDB at {shown} refused database {name!r}: {error.details or error}"
        ) from None
    except (PyMongoError, asyncio.CancelledError):
        await client.close()
        raise
    return database
