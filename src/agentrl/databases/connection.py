"""The connection to a run's MongoDB and its collections.

Each collection's indexes are created here, once per process, by the code that opens it.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from pymongo import ASCENDING, AsyncMongoClient, IndexModel
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.errors import (
    ConfigurationError,
    InvalidURI,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
)

Documents = AsyncCollection[dict[str, Any]]


class DatabaseUnreachable(ConnectionError):
    """MongoDB does not answer, or refuses us. The message is one sentence for the user."""


@dataclass(frozen=True)
class RunDatabase:
    """The collections of one run, in the database named after it."""

    client: AsyncMongoClient[dict[str, Any]]
    database: AsyncDatabase[dict[str, Any]]

    @property
    def name(self) -> str:
        """The run's name."""
        return self.database.name

    @property
    def tasks(self) -> Documents:
        """Task documents, the ledger of sampling."""
        return self.database["tasks"]

    @property
    def records(self) -> Documents:
        """Record documents, the trajectories."""
        return self.database["records"]

    @property
    def turns(self) -> Documents:
        """DispatchedSamplingTask documents."""
        return self.database["dispatched_sampling_tasks"]

    @property
    def rows(self) -> Documents:
        """DBRecordData documents, what the trainer reads."""
        return self.database["record_data"]

    @property
    def services(self) -> Documents:
        """InferenceService documents."""
        return self.database["inference_services"]

    @property
    def policy_versions(self) -> Documents:
        """PolicyVersion documents."""
        return self.database["policy_versions"]

    @property
    def runs(self) -> Documents:
        """The one Run document."""
        return self.database["runs"]

    async def close(self) -> None:
        """Close the client and its sockets."""
        await self.client.close()


_INDEXES: dict[str, list[IndexModel]] = {
    "tasks": [
        # the claim: open groups in order, old ones first
        IndexModel(
            [("split", ASCENDING), ("epoch", ASCENDING), ("seq", ASCENDING)],
            name="claim",
            partialFilterExpression={"pending": {"$gt": 0}},
        ),
        # the reaper, admission and progress counts
        IndexModel([("status", ASCENDING), ("split", ASCENDING)], name="status"),
        # heartbeats: all slots that one sampler holds; only open groups carry owners
        IndexModel([("slots.owner", ASCENDING)], name="owner", sparse=True),
    ],
    "records": [
        IndexModel([("task", ASCENDING), ("traj", ASCENDING)], name="task"),
        IndexModel([("split", ASCENDING), ("finished_at", ASCENDING)], name="recent"),
    ],
    "dispatched_sampling_tasks": [
        IndexModel([("record_id", ASCENDING), ("turn", ASCENDING)], name="record"),
    ],
    "record_data": [
        IndexModel([("status", ASCENDING), ("seq", ASCENDING)], name="lease"),
        IndexModel([("trained.step", ASCENDING)], name="trained"),
    ],
}


def without_password(url: str) -> str:
    """A connection string as it may be shown in an error or a log."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc="***@" + parts.netloc.rsplit("@", 1)[1]))


async def connect(url: str, name: str, timeout_s: float = 30.0) -> RunDatabase:
    """Open database `name` at `url`, waiting up to `timeout_s` seconds for a primary.

    A URL that names a database itself (`mongodb://host/other`) does not change `name`.
    Raises `DatabaseUnreachable` with the URL (without its password) and the time it was tried.
    """
    began = time.monotonic()
    shown = without_password(url)
    try:
        client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(
            url,
            tz_aware=True,
            appname="agentrl",
            serverSelectionTimeoutMS=int(timeout_s * 1000),
        )
    except (InvalidURI, ConfigurationError, ValueError) as error:
        raise DatabaseUnreachable(
            f"--db_connection_string {shown} is no MongoDB URL: {error}"
        ) from None
    database = RunDatabase(client, client[name])
    try:
        await client.admin.command("ping")
        # `ping` is answered by any member; indexes need the primary, so this waits for one.
        for collection, indexes in _INDEXES.items():
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
