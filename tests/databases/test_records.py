"""Records and their turns, as one sampler writes them."""

import asyncio
import time
from datetime import UTC, datetime

import pytest

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import (
    DispatchedSamplingTask,
    Record,
    RecordStatus,
    Split,
)
from agentrl.databases.records import RecordLedger, Settlement
from agentrl.databases.tasks import LeaseLost
from agentrl.databases.transitions import TransitionRefused
from agentrl.policy_version import VersionSpan

SAMPLED, SCORED, FAILED = RecordStatus.SAMPLED, RecordStatus.SCORED, RecordStatus.FAILED


def make_record(number: int = 0) -> Record:
    return Record(
        _id=f"task-t{number}-a0", task="task", task_id="line", rollout=number, attempt=0,
        split=Split.TRAIN, epoch=0, owner="sampler", query="How many?",
        started_at=datetime.now(UTC),
    )  # fmt: skip


def make_turn(record: Record, number: int) -> DispatchedSamplingTask:
    return DispatchedSamplingTask(
        _id=f"{record.id}-{number}", record_id=record.id, turn=number, segment=0,
        service="http://127.0.0.1:1", messages=[], prompt_delta_ids=b"", prompt_len=0,
        output_ids=b"", output_logprobs=b"", output_text="", finish_reason="stop",
        versions=[VersionSpan(version=0, start=0, end=0)], generate_latency_s=0.0,
        created_at=datetime.now(UTC),
    )  # fmt: skip


async def begun(database: RunDatabase, count: int = 1) -> tuple[RecordLedger, list[Record]]:
    ledger = RecordLedger(database, lease_seconds=60)
    records = [make_record(number) for number in range(count)]
    await ledger.start(records, time.monotonic())
    return ledger, records


async def status(database: RunDatabase, record: Record) -> str:
    document = await database.records.find_one({"_id": record.id})
    assert document is not None
    return str(document["status"])


def ended(record: Record, status: RecordStatus = SCORED) -> Record:
    return record.model_copy(update={"status": status, "score": 1.0})


async def finish(ledger: RecordLedger, record: Record) -> None:
    """Store a Record as sampled, and then as scored."""
    await ledger.sampled(record.model_copy(update={"status": SAMPLED}))
    await ledger.finish(ended(record))


async def test_a_record_is_stored_from_its_start_to_its_score(database: RunDatabase) -> None:
    ledger, records = await begun(database, 2)
    assert await database.records.count_documents({"status": RecordStatus.SAMPLING}) == 2
    for number in range(3):
        turn = make_turn(records[0], number)
        await ledger.add_turn(turn)
        records[0].turns.append(turn.id)
    await ledger.sampled(records[0].model_copy(update={"status": SAMPLED}))
    again = RecordLedger(database, lease_seconds=60)  # of another process, that scores it
    resumed = await again.resume(records[0].id, time.monotonic())
    assert (resumed.status, resumed.score, resumed.turns) == (SAMPLED, None, records[0].turns)
    await again.finish(ended(resumed))
    stored = Record.from_mongo(await database.records.find_one({"_id": records[0].id}) or {})
    assert (stored.status, stored.score, stored.turns) == (SCORED, 1.0, records[0].turns)
    assert stored.started_at is not None and stored.finished_at is not None
    assert stored.sampled_at is not None
    assert stored.finished_at >= stored.sampled_at >= stored.started_at
    assert (stored.task, stored.query, stored.owner) == ("task", "How many?", "sampler")
    turns = await ledger.turns([records[0].id, records[1].id])
    assert [turn.turn for turn in turns[records[0].id]] == [0, 1, 2]
    assert turns[records[1].id] == []
    assert await status(database, records[1]) == RecordStatus.SAMPLING


async def test_a_record_that_was_given_up_for_dead_cannot_be_scored(database: RunDatabase) -> None:
    ledger, [record] = await begun(database)
    await database.records.update_one({"_id": record.id}, {"$set": {"status": FAILED}})
    for store, wanted in ((ledger.sampled, SAMPLED), (ledger.finish, SCORED)):
        with pytest.raises(TransitionRefused) as refused:
            await store(ended(record, wanted))
        assert (refused.value.found, refused.value.wanted) == (FAILED, wanted)
    assert await status(database, record) == FAILED


async def test_what_was_not_stored_as_sampled_cannot_be_scored(database: RunDatabase) -> None:
    ledger, [record] = await begun(database)
    with pytest.raises(TransitionRefused, match="is sampling, so it cannot become scored"):
        await ledger.finish(ended(record))


async def test_finishing_again_what_the_server_had_done_before_its_answer_was_lost_is_no_error(
    database: RunDatabase,
) -> None:
    ledger, [record] = await begun(database)
    await database.records.update_one({"_id": record.id}, {"$set": {"status": SCORED}})
    await ledger.finish(ended(record))


async def test_one_records_refusal_is_not_its_companions(database: RunDatabase) -> None:
    ledger, records = await begun(database, 3)
    await database.records.update_one({"_id": records[1].id}, {"$set": {"status": FAILED}})
    results = await asyncio.gather(
        *(finish(ledger, record) for record in records), return_exceptions=True
    )
    assert [type(result) for result in results] == [type(None), TransitionRefused, type(None)]
    assert [await status(database, record) for record in records] == [SCORED, FAILED, SCORED]


async def test_without_a_lease_nothing_is_written(database: RunDatabase) -> None:
    ledger, [record] = await begun(database)
    ledger.leases.answered(set(), {record.id}, time.monotonic())
    with pytest.raises(LeaseLost):
        await ledger.add_turn(make_turn(record, 0))
    with pytest.raises(LeaseLost):
        await ledger.finish(ended(record))
    assert await database.turns.count_documents({}) == 0
    assert await status(database, record) == RecordStatus.SAMPLING


@pytest.mark.parametrize("kept", [True, False])
async def test_a_sampler_that_was_stopped_writes_only_after_its_lease_was_extended(
    database: RunDatabase, kept: bool
) -> None:
    ledger, [record] = await begun(database)
    ledger.leases.answered({record.id}, set(), time.monotonic() - 61)  # as if stopped since
    turn = asyncio.create_task(ledger.add_turn(make_turn(record, 0)))
    await database.client.admin.command("ping")
    assert not turn.done()
    held, lost = ({record.id}, set[str]()) if kept else (set[str](), {record.id})
    ledger.leases.answered(held, lost, time.monotonic())
    if kept:
        await turn
    else:
        with pytest.raises(LeaseLost):
            await turn
    assert await database.turns.count_documents({}) == kept


async def test_settling_passes_over_what_is_settled_and_refuses_what_has_no_score(
    database: RunDatabase,
) -> None:
    ledger, records = await begun(database, 3)
    for record in records[:2]:
        await finish(ledger, record)
    settled = {records[0].id: Settlement(RecordStatus.READY, 1.0, None)}
    await ledger.settle(settled)
    left_out = Settlement(RecordStatus.ABANDONED, -1.0, "balance_sample")
    both = settled | {records[1].id: left_out}
    await ledger.settle(both)
    await ledger.settle(both)
    found = [await status(database, record) for record in records]
    assert found == [RecordStatus.READY, RecordStatus.ABANDONED, RecordStatus.SAMPLING]
    with pytest.raises(TransitionRefused, match=f"{records[2].id} is sampling"):
        await ledger.settle({records[2].id: Settlement(RecordStatus.READY, 0.0, None)})
