"""`agentrl release`, and how what is in quarantine is counted and listed, on a real mongod."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from agentrl import cli
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import (
    Record,
    RecordStatus,
    Slot,
    SlotStatus,
    Split,
    Task,
    TaskStatus,
)
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.launcher.report import gather_report


async def add_quarantined(database: RunDatabase) -> None:
    """A completed group, of which one Record could not be scored, and a group that failed."""
    states = {"one": TaskStatus.COMPLETED, "two": TaskStatus.QUARANTINED}
    for seq, (name, status) in enumerate(states.items()):
        slots = [
            Slot(rollout=0, status=SlotStatus.COMPLETED, record=f"{name}-t0-a0", score=1.0),
            Slot(
                rollout=1, status=SlotStatus.QUARANTINED, record=f"{name}-t1-a0",
                scorings=5, scoring_failures=5, error="KeyError: x (at score, mine.py:3)",
            ),
        ]  # fmt: skip
        task = Task(
            _id=name, split=Split.TRAIN, epoch=0, seq=seq, group_order=seq, task_id=name,
            query="q", pending=0, slots=slots[: 2 if name == "one" else 1], status=status,
            error=None if name == "one" else "ValueError: nothing ranks it",
        )  # fmt: skip
        await database.tasks.insert_one(task.to_mongo())
    record = Record(
        _id="one-t1-a0", task="one", task_id="one", rollout=1, attempt=0, split=Split.TRAIN,
        epoch=0, owner="a", query="q", status=RecordStatus.QUARANTINED,
        error="KeyError: x (at score, mine.py:3)",
    )  # fmt: skip
    await database.records.insert_one(record.to_mongo())


async def agentrl(database: RunDatabase, mongod: EmbeddedMongod, verb: str, *more: str) -> int:
    place = ["--db_connection_string", mongod.url]
    return await asyncio.to_thread(cli.main, [verb, database.name, *more, *place])


async def test_what_is_in_quarantine_is_counted_listed_and_released(
    database: RunDatabase,
    mongod: EmbeddedMongod,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    await add_quarantined(database)
    summary = (await gather_report(database, tmp_path, seconds=1)).summary
    assert (summary.quarantined.groups, summary.quarantined.records) == (1, 1)

    assert await agentrl(database, mongod, "show", "--failed") == 0
    said = capsys.readouterr().out
    for words in (
        "1 task, 1 of 2 rollouts not scored: one (train epoch 0, record one-t1-a0)",
        "1 task, its group not finalised: two (train epoch 0)",
        "group two is in quarantine\n    ValueError: nothing ranks it",
        "record one-t1-a0 is in quarantine\n    KeyError: x (at score, mine.py:3)",
        f"`agentrl release {database.name}` puts back what is in quarantine",
    ):
        assert words in said

    assert await agentrl(database, mongod, "release", "nobody") == 2
    assert "nothing in quarantine has the id nobody" in capsys.readouterr().err
    assert await agentrl(database, mongod, "release", "one-t1-a0") == 0
    assert "0 groups, 1 records and 0 rows are released" in capsys.readouterr().out
    one = Task.from_mongo(await database.tasks.find_one({"_id": "one"}) or {})
    assert (one.status, one.slots[1].status) == (TaskStatus.RUNNING, SlotStatus.SAMPLED)
    assert (one.slots[1].scoring_failures, one.slots[1].scorings, one.slots[1].error) == (
        0,
        6,
        None,
    )
    assert one.score_at is not None
    record = await database.records.find_one({"_id": "one-t1-a0"})
    assert record is not None
    assert (record["status"], record["error"]) == (RecordStatus.SAMPLED, None)

    assert await agentrl(database, mongod, "release") == 0
    assert "1 groups, 0 records and 0 rows are released" in capsys.readouterr().out
    two = Task.from_mongo(await database.tasks.find_one({"_id": "two"}) or {})
    assert (two.status, two.error) == (TaskStatus.FINALISING, None)
    assert await agentrl(database, mongod, "release") == 0
    assert "nothing was released" in capsys.readouterr().out


async def test_what_cannot_be_released_yet_is_told(
    database: RunDatabase, mongod: EmbeddedMongod, capsys: pytest.CaptureFixture[str]
) -> None:
    await add_quarantined(database)
    held = {"status": TaskStatus.FINALISING, "finalisation": {
        "owner": "a", "lease_expires": datetime(2100, 1, 1, tzinfo=UTC)}}  # fmt: skip
    await database.tasks.update_one({"_id": "one"}, {"$set": held})
    assert await agentrl(database, mongod, "release") == 0
    said = capsys.readouterr().out
    assert "1 groups, 0 records and 0 rows are released" in said
    assert "1 stay in quarantine" in said


async def test_a_release_that_was_broken_off_between_a_record_and_its_slot_is_ended_by_the_next(
    database: RunDatabase, mongod: EmbeddedMongod
) -> None:
    await add_quarantined(database)
    begun = {"$set": {"status": RecordStatus.SAMPLED, "error": None}}
    await database.records.update_one({"_id": "one-t1-a0"}, begun)
    assert await agentrl(database, mongod, "release") == 0
    one = Task.from_mongo(await database.tasks.find_one({"_id": "one"}) or {})
    assert (one.status, one.slots[1].status) == (TaskStatus.RUNNING, SlotStatus.SAMPLED)
