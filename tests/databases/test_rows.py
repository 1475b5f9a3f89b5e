"""The ledger of training on a real mongod."""

import pytest
from pymongo.asynchronous.collection import AsyncCollection

from agentrl.databases.arrays import pack_floats, pack_ints, pack_mask, unpack_ints
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DBRecordData, Node, RowStatus
from agentrl.databases.rows import RowLedger


def row(seq: int, version: int = 0) -> DBRecordData:
    return DBRecordData(
        id=f"r{seq}", task="t", seq=seq, reward=1.0, n_tokens=2, n_train_tokens=1, cost=2.0,
        min_version=version, max_version=version, temperature=1.0,
        nodes=[Node(start=0, end=2, parent=-1)], input_ids=pack_ints([seq, 7]),
        loss_mask=pack_mask([0, 1]), advantages=pack_floats([0, 1]), logprobs=pack_floats([0, -1]),
        versions=pack_ints([-1, version]), prefix_hash="p",
    )  # fmt: skip


async def fill(database: RunDatabase, *rows: DBRecordData) -> None:
    await database.rows.insert_many([row.to_mongo() for row in rows])


async def statuses(database: RunDatabase) -> dict[str, str]:
    return {row["_id"]: row["status"] async for row in database.rows.find()}


async def test_a_step_leases_the_oldest_rows_and_commits_them_once(database: RunDatabase) -> None:
    await fill(database, *(row(seq) for seq in (3, 1, 2, 0)))
    ledger = RowLedger(database, "trainer")
    assert [header.id for header in await ledger.lease(1, 2, 0)] == ["r0", "r1"]
    assert [header.id for header in await ledger.lease(1, 1, 0)] == ["r2"]
    leased = database.rows.find({"status": RowStatus.LEASED, "step": 1}).sort("seq", 1)
    assert [row["_id"] async for row in leased] == ["r0", "r1", "r2"]
    payloads = await ledger.fetch(["r2", "r0"])
    assert [unpack_ints(payload.input_ids).tolist() for payload in payloads] == [[2, 7], [0, 7]]
    assert await ledger.commit(1) == 3
    assert await ledger.commit(1) == 0
    counts = await ledger.counts()
    assert (counts[RowStatus.TRAINED], counts[RowStatus.READY]) == (3, 1)


async def test_rows_older_than_the_bound_are_evicted_and_not_trained(database: RunDatabase) -> None:
    await fill(database, row(0, version=3), row(1, version=5), row(2, version=4))
    ledger = RowLedger(database, "trainer")
    assert [header.id for header in await ledger.lease(1, 9, oldest_version=4)] == ["r1", "r2"]
    assert (await statuses(database))["r0"] == RowStatus.EVICTED


async def test_a_row_too_old_that_comes_during_a_lease_is_not_leased(
    database: RunDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(database, row(1, version=5))
    evict = AsyncCollection.update_many

    async def evict_then_finalise(collection, query, update):  # type: ignore[no-untyped-def]
        result = await evict(collection, query, update)
        if "min_version" in query:
            await fill(database, row(0, version=3))
        return result

    monkeypatch.setattr(AsyncCollection, "update_many", evict_then_finalise)
    leased = await RowLedger(database, "trainer").lease(1, 9, oldest_version=4)
    assert [header.id for header in leased] == ["r1"]


async def test_a_resume_makes_later_steps_and_open_leases_ready_again(
    database: RunDatabase,
) -> None:
    await fill(database, *(row(seq) for seq in range(4)))
    crashed = RowLedger(database, "crashed")
    for step in (1, 2):
        await crashed.lease(step, 1, 0)
        await crashed.commit(step)
    await crashed.lease(3, 1, 0)
    resumed = RowLedger(database, "resumed")
    assert await resumed.rewind(1) == 2
    assert await statuses(database) == {
        "r0": RowStatus.TRAINED, "r1": RowStatus.READY, "r2": RowStatus.READY,
        "r3": RowStatus.READY,
    }  # fmt: skip
    assert [header.id for header in await resumed.lease(2, 1, 0)] == ["r1"]
    assert await crashed.commit(3) == 0


async def test_a_row_is_trained_as_often_as_asked_and_not_sooner(database: RunDatabase) -> None:
    await fill(database, row(0))
    ledger = RowLedger(database, "trainer", max_trained_count=2, retrained_interval=3)
    await ledger.lease(1, 1, 0)
    await ledger.commit(1)
    assert await ledger.lease(3, 1, 0) == []
    assert len(await ledger.lease(4, 1, 0)) == 1
    await ledger.commit(4)
    assert (await statuses(database))["r0"] == RowStatus.TRAINED
    assert await ledger.lease(9, 1, 0) == []
