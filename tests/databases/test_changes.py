"""Waiting for changes, on a real replica set, a real standalone server, and over restarts."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pymongo
import pytest
from ports import free_port
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import PyMongoError

from agentrl.databases import changes as changes_module
from agentrl.databases.changes import (
    LONGEST_PAUSE_S,
    LONGEST_UNSEEN_S,
    Changes,
    inserted,
    updated,
)
from agentrl.databases.connection import (
    DatabaseUnreachable,
    RunDatabase,
    connect,
    retry_through_outages,
)
from agentrl.databases.mongod import EmbeddedMongod, find_mongod

LONG = 60.0  # a wait that only a change can end in time


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a mongod that is no replica set and so has no change streams."""
    folder, port = tmp_path_factory.mktemp("standalone"), free_port()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                str(find_mongod()), "--dbpath", str(folder), "--port", str(port), "--bind_ip",
                "127.0.0.1", "--nounixsocket", "--wiredTigerCacheSizeGB", "0.25",
            ],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield f"mongodb://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def restartable(tmp_path: Path) -> Iterator[EmbeddedMongod]:
    """A replica set of the test's own, to kill."""
    with EmbeddedMongod(tmp_path / "data", tmp_path / "log") as server:
        yield server


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[RunDatabase]:
    database = await connect(url, "test")
    try:
        yield database
    finally:
        await database.close()


async def until(changes: Changes, database: RunDatabase, count: int) -> int:
    """Wait for so many rows as a waiter does; returns how many looks that took."""
    looks = 1
    while await database.rows.count_documents({}) < count:
        await changes.wait(LONG)
        looks += 1
    return looks


async def test_a_change_between_look_and_wait_ends_the_wait(database: RunDatabase) -> None:
    async with Changes(database, inserted(database.rows)) as changes:
        assert changes.streaming
        for number in range(3):
            await database.rows.insert_one({"_id": number})
            async with asyncio.timeout(LONG / 2):
                await changes.wait(LONG)


async def test_a_change_after_a_long_quiet_ends_the_wait_soon(database: RunDatabase) -> None:
    async with Changes(database, inserted(database.rows)) as changes:
        wait = asyncio.create_task(changes.wait(LONG))
        await asyncio.sleep(1)  # the stream is asked less often by now
        assert not wait.done()
        await database.rows.insert_one({"_id": 0})
        async with asyncio.timeout(LONG / 10):
            await wait


async def test_only_the_changes_of_interest_end_a_wait(database: RunDatabase) -> None:
    await database.tasks.insert_one({"_id": "task", "status": "running", "slots": []})
    completed = updated(database.tasks, "status", "completed")
    async with Changes(database, inserted(database.rows), completed) as changes:
        wait = asyncio.create_task(changes.wait(LONG))
        await database.records.insert_one({"_id": "not a row"})
        await database.tasks.update_one(
            {"_id": "task"}, {"$set": {"slots": [{"status": "leased"}]}}
        )
        await database.tasks.update_one({"_id": "task"}, {"$set": {"status": "finalising"}})
        await asyncio.sleep(2 * LONGEST_UNSEEN_S)  # the stream has seen them
        assert not wait.done()
        await database.tasks.update_one({"_id": "task"}, [{"$set": {"status": "completed"}}])
        async with asyncio.timeout(LONG / 2):
            await wait


@pytest.mark.parametrize("ticks", range(5))
async def test_a_waiter_that_is_cancelled_as_a_change_comes_ends(
    database: RunDatabase, ticks: int
) -> None:
    async with Changes(database, inserted(database.rows)) as changes:

        async def wait_for_ever() -> None:
            while True:
                await changes.wait(LONG)

        waiter = asyncio.create_task(wait_for_ever())
        await asyncio.sleep(0.1)  # it waits
        changes._changed.set()
        for _ in range(ticks):
            await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.wait({waiter}, timeout=2)
        assert waiter.cancelled()


async def test_that_there_are_no_change_streams_is_said_once_however_many_wait(
    standalone: str, caplog: pytest.LogCaptureFixture
) -> None:
    changes_module._say_once.cache_clear()  # a test before may have had it said
    caplog.set_level("INFO", logger=changes_module.__name__)
    async with (
        connected(standalone) as database,
        Changes(database, inserted(database.rows)),
        Changes(database, inserted(database.tasks)),
    ):
        logged = [record for record in caplog.records if record.name == changes_module.__name__]
    [said] = [record.getMessage() for record in logged]
    assert said == (
        "no change stream: MongoDB is a single server, no replica set, so changes are polled "
        "every 0.05 to 1 s, with the same results"
    )


async def test_without_change_streams_waits_are_pauses(
    standalone: str,
) -> None:
    async with (
        connected(standalone) as database,
        Changes(database, inserted(database.rows)) as changes,
    ):
        assert not changes.streaming
        async with asyncio.timeout(LONG / 2):
            await changes.wait(LONG)  # ends, though nothing changes

        waiter = asyncio.create_task(until(changes, database, 1))
        await database.rows.insert_one({"_id": 0})
        async with asyncio.timeout(LONG / 2):
            await waiter


async def test_a_wait_outlives_the_servers_restart_and_misses_nothing(
    restartable: EmbeddedMongod,
) -> None:
    async with (
        connected(restartable.url) as database,
        Changes(database, inserted(database.rows)) as changes,
    ):
        waiter = asyncio.create_task(
            retry_through_outages(lambda: until(changes, database, 2), "a wait for rows")
        )
        await database.rows.insert_one({"_id": 0})
        restartable.kill()
        await asyncio.to_thread(restartable.start)
        # by another process, before ours has found its way back
        with MongoClient[dict[str, object]](restartable.url) as client:
            client["test"]["record_data"].insert_one({"_id": 1})
        async with asyncio.timeout(LONG / 2):
            await waiter
            while not changes.streaming:
                await changes.wait(LONGEST_PAUSE_S)


async def test_an_outage_is_waited_for_and_one_that_does_not_end_is_told(
    restartable: EmbeddedMongod,
) -> None:
    async with connected(restartable.url) as database:
        restartable.kill()
        insert = asyncio.create_task(
            retry_through_outages(
                lambda: database.rows.update_one({"_id": 1}, {"$set": {"n": 1}}, upsert=True),
                "a row",
            )
        )
        await asyncio.to_thread(restartable.start)
        await insert
        assert await database.rows.count_documents({}) == 1
    restartable.kill()
    lost = AsyncMongoClient[dict[str, object]](restartable.url, serverSelectionTimeoutMS=100)
    with pytest.raises(DatabaseUnreachable, match=r"answer for \d+ s, at the look for rows"):
        await retry_through_outages(
            lambda: lost.admin.command("ping"), "the look for rows", patience_s=0.5
        )
    await lost.close()


async def test_a_process_that_stops_while_the_database_is_away_does_not_wait_for_it(
    restartable: EmbeddedMongod,
) -> None:
    database = await connect(restartable.url, "test", timeout_s=300)
    # Several sessions: the failure below costs one, the goodbye would end the others.
    await asyncio.gather(*(database.tasks.find_one() for _ in range(8)))
    restartable.kill()
    with pymongo.timeout(1), pytest.raises(PyMongoError):
        await database.tasks.find_one()  # the client notices
    async with asyncio.timeout(LONG):
        await database.close()
