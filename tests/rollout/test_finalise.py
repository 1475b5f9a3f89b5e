"""A group is finalised once in effect, however often and by whomever it is begun."""

import asyncio
import time
from datetime import UTC, datetime

import pytest

from agentrl.configs import RewardConfig
from agentrl.databases.arrays import pack_floats, pack_ints
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import (
    DBRecordData,
    DispatchedSamplingTask,
    Record,
    RecordStatus,
    Slot,
    SlotStatus,
    Split,
    Task,
    TaskStatus,
    VersionSpan,
    place_of,
)
from agentrl.databases.group_scores import GroupScores
from agentrl.databases.records import RecordLedger
from agentrl.databases.tasks import LeaseLost, TaskLedger
from agentrl.rollout.finalise import Finaliser
from agentrl.rollout.mcp.agent_config import AgentConfig
from agentrl.rollout.scorers import Scorers

SCORES = (1.0, 0.0, 0.0)


def make_turn(record: str) -> DispatchedSamplingTask:
    return DispatchedSamplingTask(
        _id=f"{record}-0", record_id=record, turn=0, segment=0, service="http://127.0.0.1:1",
        messages=[], prompt_delta_ids=pack_ints([1, 2, 3]), prompt_len=3,
        output_ids=pack_ints([4, 5]), output_logprobs=pack_floats([-0.5, -0.25]),
        output_text="", finish_reason="stop", versions=[VersionSpan(version=0, start=0, end=2)],
        generate_latency_s=0.0, created_at=datetime.now(UTC),
    )  # fmt: skip


async def scored_group(database: RunDatabase, split: Split = Split.TRAIN) -> Task:
    """A group whose slots are all completed, with the Records and turns that belong to it; its
    finalisation is held by sampler "a"."""
    ids = [f"group-t{traj}-a0" for traj in range(len(SCORES))]
    slots = [
        Slot(traj=traj, status=SlotStatus.COMPLETED, record=ids[traj], score=score)
        for traj, score in enumerate(SCORES)
    ]
    task = Task(
        _id="group", split=split, epoch=1, seq=2, place=place_of(1, 2), task_id="line", query="q",
        pending=0, slots=slots, status=TaskStatus.FINALISING,
        finalisation={"owner": "a", "lease_expires": "2100-01-01"},
    )  # fmt: skip
    await database.tasks.insert_one(task.to_mongo())
    records = RecordLedger(database, lease_seconds=60)
    for traj, score in enumerate(SCORES):
        record = Record(
            _id=ids[traj], task=task.id, task_id="line", traj=traj, attempt=0, split=split,
            epoch=1, owner="a", query="q", turns=[f"{ids[traj]}-0"],
        )  # fmt: skip
        await records.start([record], time.monotonic())
        await records.add_turn(make_turn(record.id))
        scored = {"status": RecordStatus.SCORED, "score": score}
        await records.finish(record.model_copy(update=scored))
    return task


def finaliser(database: RunDatabase, owner: str, **reward: bool) -> Finaliser:
    records = RecordLedger(database, lease_seconds=60)
    return Finaliser(
        TaskLedger(database, owner, lease_seconds=60, max_attempts=1),
        GroupScores(database, owner, lease_seconds=60),
        records,
        Scorers(AgentConfig(), records),
        RewardConfig(**reward),
        temperature=1.0,
    )


async def rows_of(database: RunDatabase) -> list[DBRecordData]:
    return [DBRecordData.from_mongo(row) async for row in database.rows.find().sort("_id")]


async def outcome(database: RunDatabase) -> tuple[object, ...]:
    """All that a finalisation leaves behind."""
    records = [
        (record["_id"], record["status"], record["advantage"])
        async for record in database.records.find().sort("_id")
    ]
    task = await database.tasks.find_one({"_id": "group"})
    assert task is not None
    return records, await rows_of(database), task["status"]


async def test_a_groups_records_become_rows_in_the_tasks_place(database: RunDatabase) -> None:
    task = await scored_group(database)
    assert await finaliser(database, "a").finalise(task) == 3
    records, rows, status = await outcome(database)
    assert status == TaskStatus.COMPLETED
    assert isinstance(records, list) and isinstance(rows, list)
    assert [record[1] for record in records] == [RecordStatus.READY] * 3
    assert sum(record[2] for record in records) == pytest.approx(0.0)
    assert [(row.reward, row.seq) for row in rows] == [(score, task.place) for score in SCORES]


async def test_an_owner_that_died_half_way_leaves_the_same_as_one_that_did_not(
    database: RunDatabase,
) -> None:
    task = await scored_group(database)
    first = finaliser(database, "a")
    await first.finalise(task)
    whole = await outcome(database)
    # As far as the first had come when it died: one row stored, one Record settled.
    await database.rows.delete_many({"_id": {"$ne": "group-t1-a0"}})
    undone = {"status": RecordStatus.SCORED, "advantage": None}
    await database.records.update_many({"_id": {"$ne": "group-t2-a0"}}, {"$set": undone})
    await database.tasks.update_one(
        {"_id": "group"},
        {"$set": {"status": TaskStatus.FINALISING, "finalisation": {"owner": "b"}}},
    )
    await finaliser(database, "b").finalise(task)
    assert await outcome(database) == whole


async def test_two_that_finalise_at_once_leave_the_same_as_one(database: RunDatabase) -> None:
    task = await scored_group(database)
    late, owner = await asyncio.gather(
        finaliser(database, "late").finalise(task),
        finaliser(database, "a").finalise(task),
        return_exceptions=True,
    )
    assert owner == 3
    assert late == 3 or isinstance(late, LeaseLost)
    records, rows, status = await outcome(database)
    assert status == TaskStatus.COMPLETED
    assert isinstance(records, list) and isinstance(rows, list)
    assert {record[1] for record in records} == {RecordStatus.READY}
    assert len(rows) == 3


async def test_a_row_that_is_being_trained_is_not_made_anew(database: RunDatabase) -> None:
    task = await scored_group(database)
    a = finaliser(database, "a")
    await a.finalise(task)
    await database.rows.update_one({"_id": "group-t0-a0"}, {"$set": {"status": "leased"}})
    await a.finalise(task)
    row = await database.rows.find_one({"_id": "group-t0-a0"})
    assert row is not None and row["status"] == "leased"


async def test_what_a_filter_leaves_out_is_abandoned(database: RunDatabase) -> None:
    task = await scored_group(database)
    await database.records.update_many({}, {"$set": {"score": 1.0}})
    assert await finaliser(database, "a", drop_zero_advantage=True).finalise(task) == 0
    assert await database.records.count_documents({"status": RecordStatus.ABANDONED}) == 3


async def test_an_evaluation_makes_no_rows_and_leaves_its_records_scored(
    database: RunDatabase,
) -> None:
    task = await scored_group(database, Split.EVAL)
    assert await finaliser(database, "a").finalise(task) == 0
    records, rows, status = await outcome(database)
    assert (rows, status) == ([], TaskStatus.COMPLETED)
    assert isinstance(records, list)
    assert {record[1] for record in records} == {RecordStatus.SCORED}
