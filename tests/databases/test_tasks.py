"""The ledger of sampling on a real mongod."""

import asyncio
import time
from collections import Counter

import pytest

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import (
    Record,
    RecordStatus,
    SlotStatus,
    Split,
    Task,
    TaskStatus,
    group_order,
)
from agentrl.databases.feeder import make_tasks
from agentrl.databases.reaping import FREE_LOSSES, Reaped, _End, _end_leases
from agentrl.databases.records import RecordLedger
from agentrl.databases.scorings import ScoringLedger
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import Claim, LeaseLost, TaskLedger, open_groups

LINES = [TaskLine(id=f"line{i}", query=f"question {i}?") for i in range(3)]


def ledger(database: RunDatabase, owner: str, lease_seconds: float = 30.0) -> TaskLedger:
    return TaskLedger(database, owner, lease_seconds, max_failures=2)


async def stored(database: RunDatabase, task: str) -> Task:
    document = await database.tasks.find_one({"_id": task})
    assert document is not None
    return Task.from_mongo(document)


def record_of(claim: Claim, owner: str) -> Record:
    task = claim.task
    return Record(
        id=claim.record_id, task=task.id, task_id=task.task_id, rollout=claim.rollout,
        attempt=claim.attempt, split=task.split, epoch=task.epoch, owner=owner, query=task.query,
    )  # fmt: skip


async def fill(database: RunDatabase, rollouts: int = 2, epoch: int = 0) -> None:
    tasks = make_tasks(LINES, Split.TRAIN, epoch, rollouts, range(len(LINES)))
    await ledger(database, "feeder").add(tasks)


async def claim(ledger: TaskLedger) -> Claim:
    [claim] = await ledger.claim(Split.TRAIN)
    return claim


async def begin(database: RunDatabase, ledger: TaskLedger, owner: str) -> Claim:
    """Claim a slot and store its Record, as a sampler does before it works on it."""
    begun = await claim(ledger)
    records = RecordLedger(database, lease_seconds=60)
    await records.start([record_of(begun, owner)], time.monotonic())
    return begun


async def test_tasks_added_twice_are_there_once_and_keep_their_state(database: RunDatabase) -> None:
    await fill(database)
    await claim(ledger(database, "a"))
    await fill(database)
    assert await database.tasks.count_documents({}) == 3
    assert (await stored(database, "train-0-line0")).slots[0].owner == "a"


async def test_old_groups_are_claimed_first_and_each_slot_once(database: RunDatabase) -> None:
    await fill(database, epoch=1)
    await fill(database, epoch=0)
    samplers = [ledger(database, f"s{i}") for i in range(8)]
    claims = await asyncio.gather(*(samplers[i % 8].claim(Split.TRAIN) for i in range(12)))
    held = [claim for claims in claims for claim in claims]
    assert len({claim.record_id for claim in held}) == 12
    assert await samplers[0].claim(Split.TRAIN) == []
    first = await asyncio.gather(*(database.tasks.find_one({"_id": c.task.id}) for c in held[:1]))
    assert first[0] is not None and first[0]["epoch"] == 0


async def test_one_sampler_alone_claims_in_order(database: RunDatabase) -> None:
    await fill(database)
    one = ledger(database, "a")
    claims = [await claim(one) for _ in range(6)]
    assert [(c.task.task_id, c.rollout) for c in claims] == [
        ("line0", 0), ("line0", 1), ("line1", 0), ("line1", 1), ("line2", 0), ("line2", 1),
    ]  # fmt: skip
    assert (await stored(database, "train-0-line0")).pending == 0


async def test_a_claim_takes_as_many_slots_of_one_group_as_are_wanted_and_free(
    database: RunDatabase,
) -> None:
    await fill(database, rollouts=4)
    one, two = ledger(database, "a"), ledger(database, "b")
    assert [(c.task.task_id, c.rollout) for c in await one.claim(Split.TRAIN, count=3)] == [
        ("line0", 0), ("line0", 1), ("line0", 2),
    ]  # fmt: skip
    assert (await stored(database, "train-0-line0")).pending == 1
    assert [(c.task.task_id, c.rollout) for c in await two.claim(Split.TRAIN, count=3)] == [
        ("line0", 3)
    ]
    assert (await stored(database, "train-0-line0")).pending == 0
    assert len(await two.claim(Split.TRAIN, count=9)) == 4


async def test_groups_are_begun_up_to_the_admission_limit_and_no_further(
    database: RunDatabase,
) -> None:
    await fill(database, epoch=1)
    one = ledger(database, "a")
    assert await one.claim(Split.TRAIN, admission_limit=None) == []
    assert await one.claim(Split.TRAIN, admission_limit=group_order(0, 2)) == []
    [first] = await one.claim(Split.TRAIN, admission_limit=group_order(1, 1))
    assert first.task.group_order == group_order(1, 0)
    assert await open_groups(database, Split.TRAIN) == 1
    assert len(await one.claim(Split.TRAIN, count=9, admission_limit=group_order(1, 1))) == 1
    assert len(await one.claim(Split.TRAIN, count=9, admission_limit=group_order(1, 1))) == 2
    assert await one.claim(Split.TRAIN, admission_limit=group_order(1, 1)) == []


async def test_a_group_once_begun_is_claimed_wherever_the_admission_limit_is(
    database: RunDatabase,
) -> None:
    await fill(database)
    one = ledger(database, "a")
    begun = await claim(one)
    for admission_limit in (None, -1):
        [again] = await one.claim(Split.TRAIN, admission_limit=admission_limit)
        assert again.task.id == begun.task.id
        await one.release(again)
    assert await one.claim(Split.TRAIN, admission_limit=None, epoch=1) == []


async def test_a_claim_can_be_for_one_epoch_only(database: RunDatabase) -> None:
    for epoch in (-1, 0, 1):
        await fill(database, epoch=epoch)
    one = ledger(database, "a")
    assert {claim.task.epoch for claim in await one.claim(Split.TRAIN, epoch=0)} == {0}
    assert {claim.task.epoch for claim in await one.claim(Split.TRAIN, epoch=-1)} == {-1}
    assert await one.claim(Split.TRAIN, epoch=2) == []


async def test_the_last_slot_to_end_brings_the_finalisation(database: RunDatabase) -> None:
    await fill(database)
    one = ledger(database, "a")
    first, second = await claim(one), await claim(one)
    assert await one.complete(first, 1.0) is None
    task = await one.complete(second, 0.0)
    assert task is not None and task.status == TaskStatus.FINALISING
    assert [slot.score for slot in task.slots] == [1.0, 0.0]
    assert [slot.record for slot in task.slots] == [first.record_id, second.record_id]
    await one.finalised(task)
    assert (await stored(database, task.id)).status == TaskStatus.COMPLETED
    await one.finalised(task)  # once more, its answer was lost


async def test_of_two_that_end_the_last_slots_at_once_one_finalises(database: RunDatabase) -> None:
    await fill(database, rollouts=8)
    one = ledger(database, "a")
    claims = [await claim(one) for _ in range(8)]
    finished = await asyncio.gather(*(one.complete(claim, 1.0) for claim in claims))
    assert Counter(task is not None for task in finished) == {True: 1, False: 7}


async def test_slots_that_end_at_the_same_time_are_told_apart(database: RunDatabase) -> None:
    await fill(database, rollouts=3)
    one = ledger(database, "a")
    claims = [await claim(one) for _ in range(9)]
    lost = claims[3]  # the first of the second group
    await one.release(lost)
    results = await asyncio.gather(
        *(one.complete(claim, float(number)) for number, claim in enumerate(claims[:6])),
        *(one.fail(claim, "broken", retry=False) for claim in claims[6:]),
        return_exceptions=True,
    )
    assert [number for number, result in enumerate(results) if isinstance(result, Task)] == [0, 6]
    assert [number for number, result in enumerate(results) if result is not None] == [0, 3, 6]
    assert isinstance(results[3], LeaseLost)
    statuses = [
        [slot.status for slot in (await stored(database, claim.task.id)).slots]
        for claim in claims[::3]
    ]
    assert statuses == [
        3 * [SlotStatus.COMPLETED],
        [SlotStatus.PENDING, SlotStatus.COMPLETED, SlotStatus.COMPLETED],
        3 * [SlotStatus.FAILED],
    ]
    scores = [slot.score for slot in (await stored(database, claims[0].task.id)).slots]
    assert scores == [0.0, 1.0, 2.0]


async def test_an_end_that_cannot_be_stored_refuses_no_other_group(database: RunDatabase) -> None:
    await fill(database, rollouts=2)
    one = ledger(database, "a")
    claims = [await claim(one) for _ in range(4)]
    scores: list[float] = [1.0, 2.0, 2**70, 4.0]  # no BSON integer
    results = await asyncio.gather(
        *(one.complete(claim, score) for claim, score in zip(claims, scores, strict=True)),
        return_exceptions=True,
    )
    assert [isinstance(result, OverflowError) for result in results] == [False, False, True, True]
    assert isinstance(results[0], Task)
    assert await one.complete(claims[3], 4.0) is None


async def test_more_slots_of_a_group_change_at_once_than_an_update_takes(
    database: RunDatabase,
) -> None:
    await fill(database, rollouts=1001)
    dead, alive = ledger(database, "dead", lease_seconds=0.0), ledger(database, "alive")
    assert len(await dead.claim(Split.TRAIN, count=1001)) == 1001
    await asyncio.sleep(0.01)
    assert sum([(await alive.reap()).returned for _ in range(3)]) == 1001
    claims = await alive.claim(Split.TRAIN, count=1001)
    assert len(claims) == 1001
    finished = await asyncio.gather(*(alive.complete(claim, 1.0) for claim in claims))
    assert sum(task is not None for task in finished) == 1


async def test_a_failed_attempt_is_tried_again_and_then_given_up(database: RunDatabase) -> None:
    await fill(database, rollouts=1)
    one = ledger(database, "a")
    first = await claim(one)
    assert await one.fail(first, "$tool broke") is None
    second = await claim(one)
    assert (second.task.id, second.attempt) == (first.task.id, 1)
    assert second.record_id != first.record_id
    task = await one.fail(second, "again")
    assert task is not None
    assert (task.slots[0].status, task.slots[0].error) == (SlotStatus.FAILED, "again")


async def test_a_failure_that_must_not_be_retried_is_final(database: RunDatabase) -> None:
    await fill(database, rollouts=1)
    one = ledger(database, "a")
    task = await one.fail(await claim(one), "no", retry=False)
    assert task is not None and task.slots[0].status == SlotStatus.FAILED


async def test_a_slot_handed_back_costs_no_failure_and_gets_a_new_record(
    database: RunDatabase,
) -> None:
    await fill(database, rollouts=1)
    one, two = ledger(database, "a"), ledger(database, "b")
    first = await claim(one)
    await one.release(first)
    second = await claim(two)
    assert (second.task.id, second.failures) == (first.task.id, 0)
    assert second.record_id != first.record_id
    with pytest.raises(LeaseLost):
        await one.complete(first, 1.0)


async def test_an_expired_lease_goes_to_another_and_its_owner_is_told(
    database: RunDatabase,
) -> None:
    await fill(database, rollouts=1)
    dead, alive = ledger(database, "dead", lease_seconds=0.0), ledger(database, "alive")
    lost = await begin(database, dead, "dead")
    kept = await claim(alive)
    await asyncio.sleep(0.01)
    reaped = await alive.reap()
    assert (reaped.returned, reaped.failed) == (1, 0)
    assert await dead.heartbeat([lost.record_id]) == set()
    assert await alive.heartbeat([lost.record_id, kept.record_id]) == {kept.record_id}
    with pytest.raises(LeaseLost):
        await dead.complete(lost, 1.0)
    again = await claim(alive)
    assert (again.task.id, again.attempt) == (lost.task.id, 1)
    record = await database.records.find_one({"_id": lost.record_id})
    assert record is not None and record["error"] == "its sampler went silent"
    slot = (await stored(database, lost.task.id)).slots[0]
    assert slot.error == "lease expired: sampler dead went silent"


async def test_a_slot_whose_record_was_left_without_a_score_is_completed_by_the_reaper(
    database: RunDatabase,
) -> None:
    await fill(database, rollouts=1)
    dead, alive = ledger(database, "dead", lease_seconds=0.0), ledger(database, "alive")
    lost = await begin(database, dead, "dead")
    scored = {"status": RecordStatus.SCORED, "score": None}
    await database.records.update_one({"_id": lost.record_id}, {"$set": scored})
    await asyncio.sleep(0.01)
    assert (await alive.reap()).completed == 1
    slot = (await stored(database, lost.task.id)).slots[0]
    assert (slot.status, slot.score, slot.error) == (SlotStatus.COMPLETED, None, None)


async def test_a_slot_whose_samplers_all_die_is_failed_and_its_group_finalised(
    database: RunDatabase,
) -> None:
    await fill(database, rollouts=1)
    dead, alive = ledger(database, "dead", lease_seconds=0.0), ledger(database, "alive")
    for expected in [(1, 0)] * (FREE_LOSSES + 1) + [(0, 1)]:
        await begin(database, dead, "dead")
        await asyncio.sleep(0.01)
        reaped = await alive.reap()
        assert (reaped.returned, reaped.failed) == expected
    task = await alive.claim_finalisation()
    assert task is not None and task.slots[0].status == SlotStatus.FAILED
    assert await alive.claim_finalisation() is None


async def test_a_finalisation_whose_owner_died_is_taken_over_once(database: RunDatabase) -> None:
    await fill(database, rollouts=1)
    dead = ledger(database, "dead", lease_seconds=0.2)
    task = await dead.complete(await claim(dead), 1.0)
    assert task is not None
    alive = ledger(database, "alive")
    assert await alive.claim_finalisation() is None
    await asyncio.sleep(0.3)
    taken = await alive.claim_finalisation()
    assert taken is not None and taken.id == task.id
    with pytest.raises(LeaseLost):
        await dead.finalised(task)
    await alive.finalised(taken)


async def test_a_heartbeat_keeps_the_lease(database: RunDatabase) -> None:
    await fill(database, rollouts=1)
    one, other = ledger(database, "a", lease_seconds=0.5), ledger(database, "b")
    held = await claim(one)
    for _ in range(4):
        await asyncio.sleep(0.2)
        assert await one.heartbeat([held.record_id]) == {held.record_id}
        assert (await other.reap()).returned == 0
    assert await one.complete(held, 1.0) is not None


async def test_a_lease_that_its_owner_no_longer_names_runs_out(database: RunDatabase) -> None:
    await fill(database, rollouts=2)
    one = ledger(database, "a", lease_seconds=0.2)
    kept, forgotten = await claim(one), await claim(one)
    await asyncio.sleep(0.15)
    assert await one.heartbeat([kept.record_id]) == {kept.record_id}
    await asyncio.sleep(0.1)
    assert (await one.reap()).returned == 1
    with pytest.raises(LeaseLost):
        await one.complete(forgotten, 1.0)


async def test_an_attempt_that_never_began_costs_its_slot_nothing(database: RunDatabase) -> None:
    await fill(database, rollouts=1)
    dead, alive = ledger(database, "dead", lease_seconds=0.0), ledger(database, "alive")
    for attempt in range(3):
        lost = await claim(dead)
        assert (lost.attempt, lost.failures) == (attempt, 0)
        await asyncio.sleep(0.01)
        assert (await alive.reap()).returned == 1


async def test_an_end_whose_answer_was_lost_can_be_told_again(database: RunDatabase) -> None:
    await fill(database, rollouts=2)
    one = ledger(database, "a")
    first, last = await one.claim(Split.TRAIN, count=2)
    for _ in range(2):
        assert await one.complete(first, 1.0) is None
    for _ in range(2):
        task = await one.fail(last, "broken", retry=False)
        assert task is not None and task.status == TaskStatus.FINALISING
    with pytest.raises(LeaseLost):
        await one.complete(last, 1.0)


async def test_a_lost_lease_says_what_was_found_and_what_was_wanted(database: RunDatabase) -> None:
    await fill(database, rollouts=1)
    one, two = ledger(database, "one", lease_seconds=0.0), ledger(database, "two")
    lost = await claim(one)
    await asyncio.sleep(0.01)
    await two.reap()
    await claim(two)
    with pytest.raises(LeaseLost) as refused:
        await one.complete(lost, 1.0)
    assert str(refused.value) == (
        "slot 0 of train-0-line0, attempt 1 is leased by two, "
        "so it cannot become completed by attempt 0 of one"
    )


@pytest.mark.parametrize("left", ["sampling", "scored"])
async def test_records_that_no_reaper_closed_are_closed_with_their_group(
    database: RunDatabase, left: str
) -> None:
    await fill(database, rollouts=1)
    one, two = ledger(database, "one"), ledger(database, "two")
    lost = await begin(database, one, "one")
    await one.release(lost)  # as a reaper that died before it closed the Record would leave it
    await database.records.update_one({"_id": lost.record_id}, {"$set": {"status": left}})
    kept = await begin(database, two, "two")
    await database.records.update_one({"_id": kept.record_id}, {"$set": {"status": "scored"}})
    task = await two.complete(kept, 1.0)
    assert task is not None
    await two.finalised(task)
    statuses = {record["_id"]: record["status"] async for record in database.records.find()}
    assert statuses == {lost.record_id: "failed", kept.record_id: "scored"}


async def test_a_sampler_that_died_after_scoring_has_its_slot_completed(
    database: RunDatabase,
) -> None:
    await fill(database, rollouts=1)
    dead, alive = ledger(database, "dead", lease_seconds=0.0), ledger(database, "alive")
    lost = await begin(database, dead, "dead")
    await database.records.update_one(
        {"_id": lost.record_id}, {"$set": {"status": "scored", "score": 0.5}}
    )
    await asyncio.sleep(0.01)
    assert await alive.reap() == Reaped(completed=1)
    task = await alive.claim_finalisation()
    assert task is not None
    slot = task.slots[0]
    assert (slot.status, slot.score, slot.record) == ("completed", 0.5, lost.record_id)
    record = await database.records.find_one({"_id": lost.record_id})
    assert record is not None and record["status"] == "scored"


async def test_one_that_lost_the_finalisation_closes_no_record(database: RunDatabase) -> None:
    await fill(database, rollouts=1)
    one, two = ledger(database, "one", lease_seconds=0.05), ledger(database, "two")
    await one.release(await begin(database, one, "one"))
    task = await one.complete(await begin(database, one, "one"), 1.0)
    assert task is not None
    await asyncio.sleep(0.1)
    assert await two.claim_finalisation() is not None
    lost = {"_id": "train-0-line0-t0-a0"}
    await database.records.update_one(lost, {"$set": {"status": RecordStatus.SAMPLED}})
    with pytest.raises(LeaseLost):
        await one.finalised(task)
    found = await database.records.find_one(lost)
    assert found is not None and found["status"] == RecordStatus.SAMPLED


async def test_a_trajectory_released_between_its_record_and_its_slot_is_not_closed(
    database: RunDatabase,
) -> None:
    await fill(database, rollouts=1)
    one = ledger(database, "one")
    await one.release(await begin(database, one, "one"))
    last = await begin(database, one, "one")
    task = await one.leave(last, SlotStatus.QUARANTINED, {"error": "no score"})
    assert task is not None
    own = {"_id": last.record_id}
    await database.records.update_one(own, {"$set": {"status": RecordStatus.SAMPLED}})
    await one.finalised(task)
    found = await database.records.find_one(own)
    assert found is not None and found["status"] == RecordStatus.SAMPLED


@pytest.mark.parametrize("way", ["failed", "handed back", "reaped"])
async def test_a_slot_that_was_scored_in_vain_and_is_sampled_again_can_be_completed(
    database: RunDatabase, way: str
) -> None:
    await fill(database, rollouts=1)
    one = ledger(database, "one", lease_seconds=0.05 if way == "reaped" else 30.0)
    sampled = await begin(database, one, "one")
    scorings = ScoringLedger(database, one, max_failures=2)
    again = {"scorings": 2, "scoring_failures": 2, "not_before": "$$NOW"}
    await one.leave(sampled, SlotStatus.SAMPLED, again)
    scoring = await scorings.claim()
    assert scoring is not None and scoring.scorings == 2
    if way == "failed":
        await one.fail(scoring, "its Record is lost")
    elif way == "handed back":
        await one.release(scoring)
    else:
        await asyncio.sleep(0.1)
        assert (await one.reap()).returned == 1
    two = ledger(database, "two")
    new = await begin(database, two, "two")
    assert (new.attempt, new.scorings, new.scoring_failures) == (1, 0, 0)
    assert await two.complete(new, 1.0) is not None


async def test_a_reaper_that_read_an_earlier_lease_of_the_same_record_ends_no_later_one(
    database: RunDatabase,
) -> None:
    await fill(database, rollouts=1)
    one = ledger(database, "one", lease_seconds=0.05)
    sampled = await begin(database, one, "one")
    read = (await stored(database, sampled.task.id)).slots[0]
    scorings = ScoringLedger(database, one, max_failures=2)
    await scorings.hand_back(sampled)
    assert await scorings.claim() is not None
    await asyncio.sleep(0.1)
    late = _End(read, SlotStatus.SAMPLED, {"scorings": 1, "not_before": "$$NOW"})
    assert await _end_leases(database, sampled.task.id, [late]) == []
    (slot,) = (await stored(database, sampled.task.id)).slots
    assert (slot.status, slot.scorings) == (SlotStatus.LEASED, 1)


async def test_a_finalisation_is_found_by_its_index_and_the_longest_due_comes_first(
    database: RunDatabase,
) -> None:
    await fill(database, rollouts=1)
    dead = [ledger(database, "dead", lease_seconds=seconds) for seconds in (0.2, 0.01)]
    assert all([await one.complete(await claim(one), 1.0) for one in dead])
    lives = ledger(database, "lives", lease_seconds=60)
    assert await lives.complete(await claim(lives), 1.0) is not None
    await asyncio.sleep(0.3)
    due = {
        "status": TaskStatus.FINALISING,
        "$expr": {"$lte": ["$finalisation.lease_expires", "$$NOW"]},
    }
    found = database.tasks.find(due).sort("finalisation.lease_expires").hint("to_finalise")
    assert (await found.explain())["executionStats"]["totalDocsExamined"] == 2
    alive = ledger(database, "alive")
    first = await alive.claim_finalisation()
    assert first is not None and first.id == "train-0-line1"
    assert await alive.claim_finalisation(["train-0-line0"]) is None
    second = await alive.claim_finalisation()
    assert second is not None and second.id == "train-0-line0"
