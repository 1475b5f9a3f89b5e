"""A group is finalised once in effect, however often and by whomever it is begun."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest
from stored_turn import make_turn

from agentrl.configs import RewardConfig
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import (
    DBRecordData,
    GroupScore,
    Record,
    RecordStatus,
    Slot,
    SlotStatus,
    Split,
    Task,
    TaskStatus,
    group_order,
)
from agentrl.databases.group_scores import GroupScores
from agentrl.databases.records import RecordLedger
from agentrl.databases.tasks import LeaseLost, TaskLedger
from agentrl.rollout.groups.finalise import Finaliser
from agentrl.rollout.llm.models import AgentModels
from agentrl.rollout.scorers import Score, Scorers, register_scorer

SCORES = (1.0, 0.0, 0.0)


async def scored_group(
    database: RunDatabase,
    split: Split = Split.TRAIN,
    scores: Sequence[float | None] = SCORES,
    scorer: str = "exact_match",
) -> Task:
    """A group whose slots are all completed, with the Records and turns that belong to it; its
    finalisation is held by sampler "a"."""
    ids = [f"group-t{rollout}-a0" for rollout in range(len(scores))]
    slots = [
        Slot(rollout=rollout, status=SlotStatus.COMPLETED, record=ids[rollout], score=score)
        for rollout, score in enumerate(scores)
    ]
    task = Task(
        _id="group", split=split, epoch=1, seq=2, group_order=group_order(1, 2), task_id="line",
        query="q",
        scorer=scorer, pending=0, slots=slots, status=TaskStatus.FINALISING,
        finalisation={"owner": "a", "lease_expires": "2100-01-01"},
    )  # fmt: skip
    await database.tasks.insert_one(task.to_mongo())
    records = RecordLedger(database, lease_seconds=60)
    for rollout, score in enumerate(scores):
        record = Record(
            _id=ids[rollout], task=task.id, task_id="line", rollout=rollout, attempt=0, split=split,
            epoch=1, owner="a", query="q", turns=[f"{ids[rollout]}-0"],
        )  # fmt: skip
        await records.start([record], time.monotonic())
        await records.add_turn(make_turn(record.id))
        scored = {"status": RecordStatus.SCORED, "score": score}
        await records.finish(record.model_copy(update=scored))
    return task


def finaliser(
    database: RunDatabase, owner: str, lease_seconds: float = 60, **reward: bool
) -> Finaliser:
    records = RecordLedger(database, lease_seconds=60)
    return Finaliser(
        TaskLedger(database, owner, lease_seconds, max_failures=1),
        GroupScores(database, owner, lease_seconds),
        records,
        Scorers(AgentModels(), records),
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
    assert [(row.reward, row.group_order) for row in rows] == [
        (score, task.group_order) for score in SCORES
    ]


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


async def test_a_record_without_turns_is_abandoned_and_the_others_are_rows(
    database: RunDatabase,
) -> None:
    task = await scored_group(database)
    await database.records.update_one({"_id": "group-t0-a0"}, {"$set": {"turns": []}})
    assert await finaliser(database, "a").finalise(task) == 2
    records, _, status = await outcome(database)
    assert isinstance(records, list)
    assert [record[1] for record in records] == ["abandoned", "ready", "ready"]
    assert status == TaskStatus.COMPLETED


async def test_an_evaluation_makes_no_rows_and_leaves_its_records_scored(
    database: RunDatabase,
) -> None:
    task = await scored_group(database, Split.EVAL)
    assert await finaliser(database, "a").finalise(task) == 0
    records, rows, status = await outcome(database)
    assert (rows, status) == ([], TaskStatus.COMPLETED)
    assert isinstance(records, list)
    assert {record[1] for record in records} == {RecordStatus.SCORED}


async def test_a_record_that_was_not_scored_takes_no_part_in_its_group(
    database: RunDatabase,
) -> None:
    task = await scored_group(database, scores=(1.0, 0.0, None))
    assert await finaliser(database, "a").finalise(task) == 2
    records = [record async for record in database.records.find().sort("rollout")]
    # of the two others alone: their mean is 1/2, and their deviation the square root of 1/2
    assert [record["advantage"] for record in records[:2]] == pytest.approx([0.707, -0.707], 1e-3)
    assert (records[2]["status"], records[2]["advantage"], records[2]["left_out"]) == (
        RecordStatus.ABANDONED, None, "not_scored",
    )  # fmt: skip


async def test_a_group_whose_agent_scored_it_by_a_name_of_its_own_is_finalised(
    database: RunDatabase,
) -> None:
    task = await scored_group(database, scorer="known_to_its_agent_only")
    assert await finaliser(database, "a").finalise(task) == 3


@dataclass
class Ranking:
    """A scorer of whole groups: the later attempt is better. It waits until it is `released`, and
    counts how often it was asked."""

    name: str
    asked: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        register_scorer(self.name, self.rank)

    async def rank(self, records: list[Record]) -> list[Score]:
        self.asked += 1
        self.begun.set()
        await self.released.wait()
        return [Score(record.rollout / 2, f"said {self.asked} times") for record in records]


UNSCORED = (None, None, None)


async def expiry(database: RunDatabase) -> datetime:
    task = await database.tasks.find_one({"_id": "group"})
    assert task is not None
    expires: datetime = task["finalisation"]["lease_expires"]
    return expires


async def test_a_group_that_is_compared_as_a_whole_is_scored_before_its_rewards(
    database: RunDatabase,
) -> None:
    ranking = Ranking("ranking")
    ranking.released.set()
    task = await scored_group(database, scores=UNSCORED, scorer="ranking")
    assert await finaliser(database, "a").finalise(task) == 2  # the middle one has no advantage
    records, rows, _ = await outcome(database)
    assert isinstance(records, list) and isinstance(rows, list)
    assert [record[1] for record in records] == ["ready", "abandoned", "ready"]
    assert [row.reward for row in rows] == [0.0, 1.0]
    stored = await database.records.find_one({"_id": "group-t2-a0"})
    assert stored is not None
    assert (stored["scores"], stored["explanations"]) == (
        {"ranking": 1.0}, {"ranking": "said 1 times"},
    )  # fmt: skip
    found = await database.tasks.find_one({"_id": "group"})
    assert found is not None and [slot["score"] for slot in found["slots"]] == [0.0, 0.5, 1.0]


async def test_an_evaluations_group_is_compared_as_a_whole_too(database: RunDatabase) -> None:
    Ranking("ranking").released.set()
    task = await scored_group(database, Split.EVAL, scores=UNSCORED, scorer="ranking")
    assert await finaliser(database, "a").finalise(task) == 0
    records = [record async for record in database.records.find().sort("rollout")]
    assert [record["score"] for record in records] == [0.0, 0.5, 1.0]
    assert {record["status"] for record in records} == {RecordStatus.SCORED}


async def test_the_finalisation_stays_ours_while_a_scorer_takes_longer_than_the_lease(
    database: RunDatabase,
) -> None:
    ranking = Ranking("ranking")
    task = await scored_group(database, scores=UNSCORED, scorer="ranking")
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    await database.tasks.update_one({}, {"$set": {"finalisation.lease_expires": long_ago}})
    finalising = asyncio.create_task(finaliser(database, "a", lease_seconds=0.3).finalise(task))
    await ranking.begun.wait()
    async with asyncio.timeout(20):
        seen = {long_ago}
        while len(seen) < 4:  # extended three times
            await asyncio.sleep(0.02)
            seen.add(await expiry(database))
    ranking.released.set()
    assert await finalising == 2


async def test_one_that_lost_the_finalisation_stops_waiting_for_its_scorer(
    database: RunDatabase,
) -> None:
    ranking = Ranking("ranking")
    task = await scored_group(database, scores=UNSCORED, scorer="ranking")
    finalising = asyncio.create_task(finaliser(database, "a", lease_seconds=0.3).finalise(task))
    await ranking.begun.wait()
    await database.tasks.update_one({}, {"$set": {"finalisation.owner": "b"}})
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(finalising, 20)
    assert (await outcome(database))[2] == TaskStatus.FINALISING


async def test_what_a_scorer_said_of_a_group_is_not_asked_again_by_who_takes_over(
    database: RunDatabase,
) -> None:
    ranking = Ranking("ranking")
    ranking.released.set()
    task = await scored_group(database, scores=UNSCORED, scorer="ranking")
    await finaliser(database, "a").finalise(task)
    whole = await outcome(database)
    # As if the first had died when the scores were kept, and nothing else was.
    await database.rows.delete_many({})
    undone = {
        "status": RecordStatus.SCORED, "advantage": None, "score": None, "scores": {},
        "explanations": {},
    }  # fmt: skip
    await database.records.update_many({}, {"$set": undone})
    await database.tasks.update_one(
        {"_id": "group"},
        {"$set": {
            "status": TaskStatus.FINALISING,
            "finalisation": {"owner": "b", "lease_expires": datetime(2020, 1, 1, tzinfo=UTC)},
        }},
    )  # fmt: skip
    taken = await TaskLedger(database, "b", 60, max_failures=1).claim_finalisation()
    assert taken is not None
    await finaliser(database, "b").finalise(taken)
    assert await outcome(database) == whole
    assert ranking.asked == 1


async def test_of_two_that_score_a_group_at_once_both_go_by_the_first(
    database: RunDatabase,
) -> None:
    task = await scored_group(database, scores=UNSCORED, scorer="exact_match")
    first, second = (
        [GroupScore(record=f"group-t{rollout}-a0", scorer="r", score=score) for rollout in range(3)]
        for score in (0.25, 0.75)
    )
    scores = GroupScores(database, "a", lease_seconds=60)
    assert await scores.keep(task, first) == first
    assert await scores.keep(task, second) == first
    late = GroupScores(database, "late", lease_seconds=60)
    assert await late.keep(task, second) == first


async def test_a_scorer_that_fails_leaves_the_group_without_scores_and_untrained(
    database: RunDatabase,
) -> None:
    def broken(records: list[Record]) -> list[float]:
        raise LookupError("the ranking model is gone")

    register_scorer("broken_ranking", broken)
    task = await scored_group(database, scores=UNSCORED, scorer="broken_ranking")
    assert await finaliser(database, "a").finalise(task) == 0
    stored = await database.records.find_one({"_id": "group-t1-a0"})
    assert stored is not None
    assert (stored["status"], stored["score"], stored["left_out"]) == (
        RecordStatus.ABANDONED, None, "not_scored",
    )  # fmt: skip
    failure = "failed: LookupError: the ranking model is gone"
    assert stored["explanations"] == {"broken_ranking": failure}


async def test_one_that_is_told_to_stop_leaves_the_group_to_the_next_at_once(
    database: RunDatabase,
) -> None:
    ranking = Ranking("ranking")
    task = await scored_group(database, scores=UNSCORED, scorer="ranking")
    stopping = finaliser(database, "a")
    finalising = asyncio.create_task(stopping.finalise(task))
    await ranking.begun.wait()
    stopping.stop()
    with pytest.raises(LeaseLost, match="left to another sampler"):
        await finalising
    assert await TaskLedger(database, "b", 60, max_failures=1).claim_finalisation() is not None
