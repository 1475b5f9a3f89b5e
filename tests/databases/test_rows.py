"""The ledger of training on a real mongod."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pymongo.asynchronous.collection import AsyncCollection

from agentrl.databases import policies
from agentrl.databases.arrays import pack_floats, pack_halves
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DBRecordData, RowStatus, TrainedStep
from agentrl.databases.policies import Lineage
from agentrl.databases.row_ledger import RowHeader, RowLedger, count_rows, fetch_rows
from agentrl.databases.token_tree import TokenTree

BEFORE = Lineage({version: version - 10 for version in range(10)})  # steps before the first


def row(seq: int, *versions: int) -> DBRecordData:
    return DBRecordData(
        id=f"r{seq}", task="t", group_order=seq, reward=1.0, n_train_tokens=1, cost=2.0,
        policy_versions=list(versions) or [0], temperature=1.0,
        tree=TokenTree.line(
            [seq, 7], mask=[0, 1], advantages=[0, 1], logprobs=[0, -1], versions=[-1, 0]
        ),
        prefix_hash="p",
    )  # fmt: skip


async def fill(database: RunDatabase, *rows: DBRecordData) -> None:
    await database.rows.insert_many([row.to_mongo() for row in rows])


async def stored(database: RunDatabase) -> dict[str, DBRecordData]:
    cursor = database.rows.find().sort("group_order", 1)
    return {row["_id"]: DBRecordData.from_mongo(row) async for row in cursor}


async def statuses(database: RunDatabase) -> dict[str, str]:
    return {name: row.status for name, row in (await stored(database)).items()}


async def lease(ledger: RowLedger, step: int, count: int, **more: bool) -> list[str]:
    """Lease whatever its age; ids."""
    return ids(await ledger.lease(step, count, BEFORE, 99, **more))


def ids(headers: Sequence[RowHeader]) -> list[str]:
    return [header.id for header in headers]


async def train(ledger: RowLedger, step: int, count: int) -> list[str]:
    rows = await lease(ledger, step, count)
    assert await ledger.commit(step, rows) == len(rows)
    return rows


async def test_a_step_leases_the_oldest_rows_and_commits_them_once(database: RunDatabase) -> None:
    await fill(database, *(row(seq) for seq in (3, 1, 2, 0)))
    ledger = RowLedger(database, "trainer", fence=1)
    assert await lease(ledger, 1, 2) == ["r0", "r1"]
    assert await lease(ledger, 1, 3) == ["r0", "r1", "r2"], "topped up to what it should have"
    payloads = (await fetch_rows(database, ["r2", "r0"])).rows
    assert [payload.tree["ids"].tolist() for payload in payloads] == [[2, 7], [0, 7]]
    for _ in range(2):  # the answer may have been lost
        assert await ledger.commit(1, ["r0", "r1", "r2"]) == 3
    counts = await count_rows(database)
    assert (counts[RowStatus.TRAINED], counts[RowStatus.READY]) == (3, 1)
    assert [len(row.trained) for row in (await stored(database)).values()] == [1, 1, 1, 0]


async def test_a_row_with_any_version_that_is_too_old_is_evicted_and_not_trained(
    database: RunDatabase,
) -> None:
    lineage = Lineage({0: 0, 1: 1, 2: 2, 3: 3})
    # a token of a version that is published meanwhile is no reason to evict, nor yet to train
    await fill(database, row(0, 1), row(1, 1, 3), row(2, 2, 3), row(3, 3), row(4, 3, 4))
    ledger = RowLedger(database, "trainer", fence=1)
    assert await ledger.evict(4, lineage, max_staleness=1) == 2
    assert ids(await ledger.lease(4, 9, lineage, max_staleness=1)) == ["r2", "r3"]
    assert list((await statuses(database)).values()) == [
        "evicted", "evicted", "leased", "leased", "ready",
    ]  # fmt: skip


async def test_a_row_too_old_that_comes_after_the_eviction_is_not_leased(
    database: RunDatabase,
) -> None:
    ledger, lineage = RowLedger(database, "trainer", fence=1), Lineage({0: 0, 1: 1, 2: 2})
    await ledger.evict(3, lineage, 1)
    await fill(database, row(0, 0), row(1, 1))
    assert ids(await ledger.lease(3, 9, lineage, 1)) == ["r1"]


async def test_age_is_counted_in_steps_of_the_lineage_not_in_version_numbers(
    database: RunDatabase,
) -> None:
    # a trainer made steps 1 to 3, died, and its successor went on from step 1 as version 4
    for version, step in enumerate((0, 1, 2, 3, 1, 2)):
        await policies.publish(database, version, step, f"v{version}")
    lineage = await policies.load_lineage(database)
    assert lineage.steps == {0: 0, 1: 1, 2: 2, 3: 3, 4: 1, 5: 2}
    await policies.publish(database, 6, 3, "v6")
    lineage = await policies.load_lineage(database, lineage)
    assert lineage.newest == 6
    await fill(database, *(row(version, version) for version in range(7)))
    ledger = RowLedger(database, "trainer", fence=1)
    assert ids(await ledger.lease(4, 9, lineage, max_staleness=1)) == ["r2", "r3", "r5", "r6"]


@given(
    steps=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    versions=st.sets(st.integers(-1, 13), min_size=1, max_size=4),
    step=st.integers(0, 14),
    bound=st.integers(0, 5),
)
def test_a_row_is_too_old_if_a_known_token_is_or_if_nobody_knows_it(
    steps: list[int], versions: set[int], step: int, bound: int
) -> None:
    lineage = Lineage(dict(enumerate(steps)))
    young = lineage.young_versions(step, bound)
    assert young == [v for v, made in enumerate(steps) if step - made <= bound]
    known = {version for version in versions if version in lineage.steps}
    oldest = max((lineage.age(version, step) for version in known), default=0)
    lost = any(version < 0 for version in versions)
    assert lineage.too_old(versions, step, bound) == (oldest > bound or lost)


async def test_the_database_evicts_as_the_pure_function_says(database: RunDatabase) -> None:
    lineage = Lineage({0: 0, 1: 1, 2: 3, 3: 1, 5: 2})
    rows = [
        row(seq, *versions)
        for seq, versions in enumerate([(v,) for v in range(8)] + [(0, 5), (2, 5), (3, 7), (1, 2)])
    ]
    await fill(database, *rows)
    await RowLedger(database, "trainer", fence=1).evict(4, lineage, max_staleness=1)
    evicted = {name for name, status in (await statuses(database)).items() if status == "evicted"}
    assert evicted == {row.id for row in rows if lineage.too_old(row.policy_versions, 3, 1)}


async def test_a_resume_restores_the_state_after_the_checkpoints_step(
    database: RunDatabase,
) -> None:
    await fill(database, row(9, 0), *(row(seq, 1) for seq in range(6)))
    crashed = RowLedger(database, "crashed", fence=1)
    lineage = Lineage({0: 0, 1: 1})
    assert await train(crashed, 1, 1) == ["r0"]
    after = await stored(database)
    await crashed.evict(2, lineage, max_staleness=0)
    assert (await stored(database))["r9"].status == RowStatus.EVICTED
    await train(crashed, 2, 2)
    await lease(crashed, 3, 1)
    resumed = RowLedger(database, "resumed", fence=2)
    assert await resumed.rewind(1) == 4
    assert await stored(database) == after
    assert await resumed.rewind(1) == 0
    assert await lease(resumed, 2, 1) == ["r1"]


async def test_a_resume_restores_how_often_and_when_a_row_was_trained(
    database: RunDatabase,
) -> None:
    await fill(database, *(row(seq) for seq in range(3)))
    crashed = RowLedger(database, "crashed", 1, max_trained_count=3, retrained_interval=2)
    for step in range(1, 4):
        await train(crashed, step, 1)
    after = await stored(database)
    for step in range(4, 8):
        await train(crashed, step, 2)
    assert [len(row.trained) for row in (await stored(database)).values()] == [3, 3, 2]
    resumed = RowLedger(database, "resumed", 2, max_trained_count=3, retrained_interval=2)
    await resumed.rewind(3)
    assert await stored(database) == after


async def test_a_replaced_trainer_commits_nothing_and_takes_nothing_from_its_successor(
    database: RunDatabase,
) -> None:
    await fill(database, *(row(seq) for seq in range(6)))
    zombie = RowLedger(database, "zombie", fence=1)
    stale = await lease(zombie, 1, 2)
    successor = RowLedger(database, "successor", fence=2)
    await successor.rewind(0)
    assert await train(successor, 1, 2) == ["r0", "r1"]
    assert await lease(successor, 2, 2) == ["r2", "r3"]

    assert await zombie.commit(1, stale) == 0
    assert await zombie.rewind(0) == 0, "nor does it undo what the successor trained"
    assert await lease(zombie, 2, 9) == ["r4", "r5"]
    assert await zombie.release() == 2
    assert await lease(zombie, 2, 9) == ["r4", "r5"]
    assert await successor.commit(2, ["r2", "r3"]) == 2

    # what it leased in its ignorance is not lost
    assert await successor.returning(3)
    assert await lease(successor, 3, 2) == ["r4", "r5"]
    trainers = [[step.trainer for step in row.trained] for row in (await stored(database)).values()]
    assert trainers == [["successor"]] * 4 + [[]] * 2


async def test_a_rewind_misses_no_row_that_a_dying_trainer_commits_meanwhile(
    database: RunDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(database, *(row(seq) for seq in range(4)))
    dying = RowLedger(database, "dying", fence=1)
    leased = await lease(dying, 1, 4)
    resumed = RowLedger(database, "resumed", fence=2)
    update_many, commits = AsyncCollection.update_many, [leased[3:], leased[2:3]]

    async def rows_move_behind_the_scan(collection, query, update, **options):  # type: ignore[no-untyped-def]
        # as a commit does whose rows change place in the index that the rewind reads
        hidden = {"$and": [query, {"_id": {"$nin": leased[2:]}}]} if commits else query
        result = await update_many(collection, hidden, update, **options)
        if commits:
            trained = TrainedStep(step=1, trainer="dying", fence=1).model_dump()
            change = {"status": RowStatus.TRAINED, "trained": [trained]}
            await update_many(collection, {"_id": {"$in": commits.pop()}}, {"$set": change})
        return result

    monkeypatch.setattr(AsyncCollection, "update_many", rows_move_behind_the_scan)
    await resumed.rewind(0)
    assert set((await statuses(database)).values()) == {RowStatus.READY}


async def test_a_row_is_trained_as_often_as_asked_and_not_sooner(database: RunDatabase) -> None:
    await fill(database, row(0))
    ledger = RowLedger(database, "trainer", 1, max_trained_count=2, retrained_interval=3)
    await lease(ledger, 1, 1)
    assert await ledger.returning(2), "it will be trained again"
    await ledger.commit(1, ["r0"])
    assert await lease(ledger, 3, 1) == []
    assert await lease(ledger, 4, 1) == ["r0"]
    assert not await ledger.returning(5)
    await ledger.commit(4, ["r0"])
    assert (await statuses(database))["r0"] == RowStatus.TRAINED
    assert await lease(ledger, 9, 1) == []


async def test_the_interval_is_waived_where_nothing_else_is_left(database: RunDatabase) -> None:
    await fill(database, row(0))
    ledger = RowLedger(database, "trainer", 1, max_trained_count=2, retrained_interval=9)
    await train(ledger, 1, 1)
    assert await lease(ledger, 2, 1) == []
    assert await lease(ledger, 2, 1, waive_interval=True) == ["r0"]


def kept(row: DBRecordData) -> list[tuple[int, dict[str, bytes]]]:
    return [
        (mark.step, mark.model_dump(include={"logprobs", "entropies"}, exclude_none=True))
        for mark in row.trained
    ]


async def test_the_trainers_logprobs_and_entropies_come_and_go_with_the_mark_of_their_step(
    database: RunDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.databases.row_ledger._LARGEST_MARKS", 8)  # several commands
    await fill(database, *(row(seq) for seq in range(4)))
    zombie = RowLedger(database, "zombie", fence=1, max_trained_count=2)
    rows = await lease(zombie, 1, 4)
    first = {row: {"logprobs": pack_floats([-float(at), -1.0])} for at, row in enumerate(rows[:3])}
    for _ in range(2):  # the answer may have been lost
        assert await zombie.commit(1, rows, first) == 4
    again = await lease(zombie, 2, 2)
    second = {
        row: {"logprobs": pack_floats([-9.0, -9.0]), "entropies": pack_halves([at, 2.0])}
        for at, row in enumerate(again)
    }
    assert await zombie.commit(2, again, second) == 2
    found = await stored(database)
    assert kept(found["r0"]) == [(1, first["r0"]), (2, second["r0"])]
    assert kept(found["r2"]) == [(1, first["r2"])]
    assert kept(found["r3"]) == [(1, {})]
    held = await lease(zombie, 3, 2)
    successor = RowLedger(database, "successor", fence=2, max_trained_count=2)
    await successor.rewind(1)
    assert await zombie.commit(3, held, {row: {"logprobs": b"late"} for row in held}) == 0
    found = await stored(database)
    assert [kept(each) for each in found.values()] == [
        [(1, first["r0"])], [(1, first["r1"])], [(1, first["r2"])], [(1, {})],
    ]  # fmt: skip
