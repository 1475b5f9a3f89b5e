"""The runs of a MongoDB, listed and dropped from outside.

Reading creates no database and no index.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pymongo import AsyncMongoClient
from pymongo.errors import OperationFailure, PyMongoError

from agentrl.databases.connection import (
    COLLECTIONS,
    DatabaseUnreachable,
    RunDatabase,
    reason_of,
    wait_told,
)
from agentrl.databases.documents import Run
from agentrl.databases.mongodb_url import URL_ERRORS, why_no_url
from agentrl.databases.runs import load_run
from agentrl.databases.server_time import server_time
from agentrl.redaction import without_passwords

_OTHERS = frozenset({"admin", "local", "config"})


@dataclass(frozen=True)
class StoredRun:
    """A run in a MongoDB. `live`: a trainer holds it. `bytes`: its size on the server's disk."""

    database: RunDatabase
    run: Run
    live: bool
    bytes: int


@asynccontextmanager
async def server(url: str, timeout_s: float = 10.0) -> AsyncIterator[AsyncMongoClient[Any]]:
    """A client of the MongoDB at `url`.

    Raises `DatabaseUnreachable`, also for PyMongo errors inside the block.
    """
    shown = without_passwords(url)
    if (fault := why_no_url(url)) is not None:
        raise DatabaseUnreachable(fault)
    try:
        client: AsyncMongoClient[Any] = AsyncMongoClient(
            url, tz_aware=True, appname="agentrl", serverSelectionTimeoutMS=int(timeout_s * 1000)
        )
    except URL_ERRORS as error:
        raise DatabaseUnreachable(
            f"--db_connection_string {shown} is not a MongoDB URL: {error}"
        ) from None
    try:
        with wait_told(shown, timeout_s):
            await client.admin.command("ping")
        yield client
    except OperationFailure as error:
        raise DatabaseUnreachable(
            f"MongoDB at {shown} refuses: {(error.details or {}).get('errmsg', error)}"
        ) from None
    except PyMongoError as error:
        reason = reason_of(error)
        raise DatabaseUnreachable(f"MongoDB at {shown} does not answer: {reason}") from None
    finally:
        await client.close()


async def stored_runs(client: AsyncMongoClient[Any], only: str | None = None) -> list[StoredRun]:
    """All runs of a server, or the run named `only`. A run is a database with a `Run` document."""
    now = await server_time(client)
    found = []
    named = {} if only is None else {"name": only}
    for listed in await (await client.list_databases(filter=named)).to_list():
        name = listed["name"]
        if name in _OTHERS:
            continue
        database = RunDatabase(client, client[name])
        run = await load_run(database)
        if run is not None:
            live = run.lease_expires is not None and run.lease_expires > now
            found.append(StoredRun(database, run, live, listed["sizeOnDisk"]))
    return found


async def drop_run(stored: StoredRun) -> list[str]:
    """Remove a run from its MongoDB. Collections that are not a run's stay; returns their names."""
    database = stored.database.database
    names = await database.list_collection_names()
    others = sorted(name for name in names if name not in COLLECTIONS and "system." not in name)
    if not others:
        await stored.database.client.drop_database(database)
        return []
    for name in COLLECTIONS & set(names):
        await database.drop_collection(name)
    return others
