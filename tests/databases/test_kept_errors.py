"""Errors that Tasks and Records keep, whatever somebody's code said, on a real mongod."""

import time

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Record, RecordStatus, Split
from agentrl.databases.feeder import make_tasks
from agentrl.databases.finalisations import Finalisations
from agentrl.databases.records import RecordLedger
from agentrl.databases.scorings import ScoringLedger
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import TaskLedger

ERROR = "KeyError: \udc80 " + 17_000_000 * "x"


def assert_kept(error: str | None) -> None:
    assert error is not None and error.startswith("KeyError: \ufffd xxx")
    assert "cut here" in error and len(error.encode()) <= 4000


async def test_an_error_of_any_length_and_with_half_characters_is_kept(
    database: RunDatabase,
) -> None:
    ledger = TaskLedger(database, "sampler", lease_seconds=30, max_failures=9)
    await ledger.add(make_tasks([TaskLine(id="0", query="?")], Split.TRAIN, 0, 3, range(1)))
    failed, put_off, quarantined = await ledger.claim(Split.TRAIN, count=3)
    scorings = ScoringLedger(database, ledger, max_failures=9)
    await ledger.fail(failed, ERROR)
    await scorings.put_off(put_off, ERROR, counts=True)
    await scorings.quarantine(quarantined, ERROR)
    document = await database.tasks.find_one({})
    assert document is not None
    for slot in document["slots"]:
        assert_kept(slot["error"])

    await ledger.add(make_tasks([TaskLine(id="1", query="?")], Split.TRAIN, 1, 1, range(1)))
    [claim] = await ledger.claim(Split.TRAIN, epoch=1)
    task = await ledger.complete(claim, 1.0)
    assert task is not None
    finalisations = Finalisations(database, "sampler", 30, 9)
    await finalisations.put_off(task, ERROR, counts=True)
    document = await database.tasks.find_one({"epoch": 1})
    assert document is not None
    assert_kept(document["finalisation"]["error"])

    records = RecordLedger(database, 30)
    record = Record(
        id=claim.record_id, task=claim.task.id, task_id="1", rollout=0, attempt=0,
        split=Split.TRAIN, epoch=1, owner="sampler", query="?",
    )  # fmt: skip
    await records.start([record], time.monotonic())
    await records.finish(record.model_copy(update={"status": RecordStatus.FAILED, "error": ERROR}))
    document = await database.records.find_one({})
    assert document is not None
    assert_kept(document["error"])
