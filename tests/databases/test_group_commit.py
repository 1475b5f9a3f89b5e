"""Group commit: what goes out together, and to whom each error goes."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import AsyncMongoClient, InsertOne, UpdateMany
from pymongo.errors import InvalidDocument, WriteError
from pymongo.monitoring import (
    CommandFailedEvent,
    CommandListener,
    CommandStartedEvent,
    CommandSucceededEvent,
)

from agentrl.databases.batches import MOMENT_S, Pace
from agentrl.databases.connection import Documents, RunDatabase, connect
from agentrl.databases.group_commit import GroupCommit, NotSent
from agentrl.databases.mongod import EmbeddedMongod


class Commands(CommandListener):
    """How many documents each insert command had, and a signal when one is on its way."""

    def __init__(self) -> None:
        self.inserts: list[int] = []
        self.under_way = asyncio.Event()

    def started(self, event: CommandStartedEvent) -> None:
        if event.command_name == "insert":
            self.inserts.append(len(event.command["documents"]))
            self.under_way.set()

    def succeeded(self, event: CommandSucceededEvent) -> None:
        pass

    def failed(self, event: CommandFailedEvent) -> None:
        pass


@pytest.fixture
async def commands() -> Commands:
    return Commands()


@pytest.fixture
async def collection(
    database: RunDatabase, mongod: EmbeddedMongod, commands: Commands
) -> AsyncIterator[Documents]:
    """A collection that takes no negative `n`, over a connection whose commands are listened to."""
    await database.database.create_collection("numbers", validator={"n": {"$gte": 0}})
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(
        mongod.url, event_listeners=[commands]
    )
    yield client[database.name]["numbers"]
    await client.close()
    await database.database.drop_collection("numbers")


def insert(number: int, **fields: Any) -> list[InsertOne[dict[str, Any]]]:
    return [InsertOne({"_id": number, "n": number, **fields})]


async def stored(collection: Documents) -> list[int]:
    return [document["_id"] async for document in collection.find().sort("_id")]


async def begin(commit: GroupCommit, commands: Commands) -> "asyncio.Task[bool]":
    """A write that is on its way to the server."""
    first = asyncio.create_task(commit.write(insert(0)))
    await commands.under_way.wait()
    return first


async def test_a_write_goes_out_at_once_and_those_that_come_meanwhile_together(
    collection: Documents, commands: Commands
) -> None:
    commit = GroupCommit(collection)
    first = await begin(commit, commands)
    await asyncio.gather(first, *(commit.write(insert(number)) for number in range(1, 21)))
    assert commands.inserts == [1, 20]
    assert await stored(collection) == list(range(21))


async def test_with_many_records_in_progress_a_write_waits_a_moment_for_others(
    collection: Documents, commands: Commands
) -> None:
    pace = Pace(lambda: 1000)
    commit, other = GroupCommit(collection, pace), GroupCommit(collection, pace)
    began = time.monotonic()

    async def write(number: int) -> None:
        await asyncio.sleep(number * MOMENT_S / 20)
        await (commit if number % 2 else other).write(insert(number))

    await asyncio.gather(*map(write, range(10)))
    assert commands.inserts == [5, 5]  # one of each, at the same moment
    assert time.monotonic() - began >= MOMENT_S
    assert await stored(collection) == list(range(10))


async def test_with_one_record_in_progress_a_write_waits_for_nobody(
    collection: Documents, commands: Commands
) -> None:
    commit = GroupCommit(collection, Pace(lambda: 1))
    first = await begin(commit, commands)
    await asyncio.gather(first, commit.write(insert(1)))
    assert commands.inserts == [1, 1]


async def test_a_write_at_once_takes_those_that_wait_for_the_moment_with_it(
    collection: Documents, commands: Commands
) -> None:
    pace = Pace(lambda: 10**6)
    commit = GroupCommit(collection, pace)
    await pace.moment(asyncio.Event())
    began = time.monotonic()  # the next moment comes MOMENT_S later or after that
    patient = [asyncio.create_task(commit.write(insert(number))) for number in range(3)]
    await asyncio.sleep(0)
    assert commands.inserts == []
    await commit.write(insert(3), at_once=True)
    await asyncio.gather(*patient)
    assert commands.inserts == [4]
    await commit.write(insert(4))
    assert commands.inserts == [4, 1]
    assert time.monotonic() - began > MOMENT_S / 2  # the next one waits again


async def test_a_write_is_durable_when_it_returns(collection: Documents) -> None:
    commit = GroupCommit(collection)
    for number in range(3):
        await commit.write(insert(number))
        assert await stored(collection) == list(range(number + 1))


async def test_an_error_goes_to_the_caller_whose_write_it_is(collection: Documents) -> None:
    commit = GroupCommit(collection)
    results = await asyncio.gather(
        *(commit.write(insert(number)) for number in (1, -2, 3, -4)), return_exceptions=True
    )
    assert [type(result) for result in results] == [bool, WriteError, bool, WriteError]
    assert all("'op'" not in str(result) for result in results)
    assert await stored(collection) == [1, 3]


async def test_what_cannot_be_sent_fails_its_caller_alone(collection: Documents) -> None:
    commit = GroupCommit(collection)
    results = await asyncio.gather(
        commit.write(insert(1)),
        commit.write(insert(2, what=object())),
        commit.write(insert(3)),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [bool, InvalidDocument, bool]
    assert await stored(collection) == [1, 3]


async def test_inserting_what_is_there_changes_nothing_and_is_no_error(
    collection: Documents,
) -> None:
    commit = GroupCommit(collection)
    await commit.write(insert(1, first=True))
    await asyncio.gather(commit.write(insert(1, first=False)), commit.write(insert(2)))
    assert await stored(collection) == [1, 2]
    assert await collection.find_one({"_id": 1}) == {"_id": 1, "n": 1, "first": True}


async def test_updates_tell_whether_all_of_their_batch_found_their_documents(
    collection: Documents,
) -> None:
    commit = GroupCommit(collection)
    await commit.write([*insert(1), *insert(2)])
    here = UpdateMany({"_id": 1}, {"$set": {"seen": True}})
    nowhere = UpdateMany({"_id": 9}, {"$set": {"seen": True}})
    assert await commit.write([here])
    assert await asyncio.gather(commit.write([here]), commit.write([nowhere])) == [False, False]
    assert await commit.write([UpdateMany({"_id": 3}, {"$set": {"n": 3}}, upsert=True)])


async def test_a_caller_that_is_cancelled_in_time_withdraws_its_writes(
    collection: Documents, commands: Commands
) -> None:
    commit = GroupCommit(collection)
    first = await begin(commit, commands)
    leaving, staying = (asyncio.create_task(commit.write(insert(number))) for number in (1, 2))
    await asyncio.sleep(0)  # both have begun to wait
    leaving.cancel()
    await asyncio.gather(first, staying)
    assert await stored(collection) == [0, 2]


async def test_a_caller_that_is_cancelled_too_late_hinders_nobody(
    collection: Documents, commands: Commands
) -> None:
    commit = GroupCommit(collection)
    first = await begin(commit, commands)
    first.cancel()
    await commit.write(insert(1))
    assert await stored(collection) == [0, 1]


async def test_what_is_no_longer_allowed_when_its_turn_comes_is_not_sent(
    collection: Documents, commands: Commands
) -> None:
    commit = GroupCommit(collection)
    allowed = True
    first = await begin(commit, commands)
    late = asyncio.create_task(commit.write(insert(1), lambda: allowed))
    other = asyncio.create_task(commit.write(insert(2)))
    await asyncio.sleep(0)  # both wait
    allowed = False
    with pytest.raises(NotSent):
        await late
    await asyncio.gather(first, other)
    assert await stored(collection) == [0, 2]


async def test_writes_wait_for_a_server_that_was_killed_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with EmbeddedMongod(tmp_path / "data", tmp_path / "log") as mongod:
        database = await connect(mongod.url, "outage", timeout_s=0.2)
        commit = GroupCommit(database.turns)
        await commit.write(insert(0))
        mongod.kill()
        writes = [asyncio.create_task(commit.write(insert(number))) for number in (1, 2)]
        while "MongoDB does not answer, at a write to dispatched_sampling_tasks" not in caplog.text:
            await asyncio.sleep(0.01)
        writes += [asyncio.create_task(commit.write(insert(number))) for number in (3, 4)]
        mongod.start()
        assert await asyncio.gather(*writes) == [True] * 4
        assert await stored(database.turns) == [0, 1, 2, 3, 4]
        await database.close()
