"""A group is finalised once in effect, however often and by whomever it is begun."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from stored_turn import make_turn

from agentrl.configs import RewardConfig
from agentrl.databases.arrays import pack_floats
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import (
    DBRecordData,
    Finalisation,
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
from agentrl.databases.failed_tasks import failed_tasks
from agentrl.databases.finalisations import Finalisations
from agentrl.databases.quarantine import (
    Quarantined,
    count_quarantined,
    list_quarantined,
    release,
)
from agentrl.databases.records import RecordLedger
from agentrl.databases.tasks import LeaseLost, TaskLedger, open_groups
from agentrl.failures import InfrastructureFailure
from agentrl.rollout.groups import row_building
from agentrl.rollout.groups.finalise import MAKING_ROWS, Finaliser
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
        await records.sampled(record.model_copy(update={"status": RecordStatus.SAMPLED}))
        scored = {"status": RecordStatus.SCORED, "score": score}
        await records.finish(record.model_copy(update=scored))
    return task


def finaliser(
    database: RunDatabase, owner: str, lease_seconds: float = 60, **reward: Any
) -> Finaliser:
    records = RecordLedger(database, lease_seconds=60)
    return Finaliser(
        TaskLedger(database, owner, lease_seconds, max_failures=1),
        Finalisations(database, owner, lease_seconds, max_failures=2),
        records,
        Scorers(AgentModels(), records),
        RewardConfig(**reward),
        temperature=1.0,
        scoring_s=60.0,
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


async def test_a_process_that_is_told_twice_finalises_once(database: RunDatabase) -> None:
    task = await scored_group(database)
    a = finaliser(database, "a")
    assert await asyncio.gather(a.finalise(task), a.finalise(task)) == [3, None]
    assert a.in_progress == frozenset()


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


async def test_rewards_of_agents_make_the_advantages_of_their_turns_and_some_train_nothing(
    database: RunDatabase,
) -> None:
    task = await scored_group(database)
    for rollout, reward in enumerate((4.0, 0.0)):
        found = {"_id": f"group-t{rollout}-a0"}
        await database.records.update_one(found, {"$set": {"agent_rewards.coder": reward}})
    await database.turns.update_many({}, {"$set": {"agent": "coder"}})
    await database.turns.update_one({"record_id": "group-t2-a0"}, {"$set": {"trained": False}})
    assert await finaliser(database, "a", advantage="mean").finalise(task) == 2
    settled = [document async for document in database.records.find().sort("_id")]
    assert [record["agent_advantages"] for record in settled] == [{"coder": 2}, {"coder": -2}, {}]
    assert (settled[2]["status"], settled[2]["left_out"]) == ("abandoned", "not_trained")
    for row, advantage in zip(await rows_of(database), (2.0, -2.0), strict=True):
        assert set(row.tree["advantages"][row.tree["mask"] == 1]) == {advantage}


async def test_records_whose_only_trained_agent_has_equal_rewards_are_left_out(
    database: RunDatabase,
) -> None:
    task = await scored_group(database)
    await database.records.update_many({}, {"$set": {"agent_rewards.coder": 1.0}})
    await database.turns.update_many({}, {"$set": {"agent": "coder"}})
    a = finaliser(database, "a", advantage="mean", drop_zero_advantage=True)
    assert await a.finalise(task) == 0
    settled = [document async for document in database.records.find()]
    assert {record["left_out"] for record in settled} == {"drop_zero_advantage"}
    assert any(record["advantage"] != 0.0 for record in settled)


@pytest.mark.parametrize(
    ("flags", "rows"),
    [({"advantage": "score"}, 3), ({"minimal_advantage": -9.0}, 3), ({}, 0)],
)
async def test_rows_of_zeros_are_kept_where_another_rule_decides(
    database: RunDatabase, flags: dict[str, Any], rows: int
) -> None:
    task = await scored_group(database, scores=(0.0, 0.0, 0.0))
    a = finaliser(database, "a", **{"advantage": "mean", "drop_zero_advantage": True, **flags})
    assert await a.finalise(task) == rows


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
            "finalisation": Finalisation(
                owner=None, lease_expires=datetime(2020, 1, 1, tzinfo=UTC)
            ).model_dump(),
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
    scores = Finalisations(database, "a", 60, max_failures=2)
    assert await scores.keep(task, first) == first
    assert await scores.keep(task, second) == first
    late = Finalisations(database, "late", 60, max_failures=2)
    assert await late.keep(task, second) == first


def broken_ranking(error: Exception) -> str:
    def broken(records: list[Record]) -> list[float]:
        raise error

    register_scorer("broken_ranking", broken)
    return "broken_ranking"


async def taken_over(database: RunDatabase, owner: str) -> Task:
    """The finalisation, when the pause before it is over."""
    soon = {"$set": {"finalisation.lease_expires": datetime(2020, 1, 1, tzinfo=UTC)}}
    await database.tasks.update_one({}, soon)
    taken = await TaskLedger(database, owner, 60, max_failures=1).claim_finalisation()
    assert taken is not None
    return taken


async def test_a_group_that_fails_again_and_again_is_quarantined_with_its_error(
    database: RunDatabase,
) -> None:
    scorer = broken_ranking(LookupError("the ranking model is gone"))
    task = await scored_group(database, scores=UNSCORED, scorer=scorer)
    assert await finaliser(database, "a").finalise(task) is None
    put_off = Task.from_mongo(await database.tasks.find_one() or {})
    assert put_off.status == TaskStatus.FINALISING and put_off.finalisation is not None
    assert (put_off.finalisation.owner, put_off.finalisation.failures) == (None, 1)
    # nobody takes it over before its pause is over
    assert await TaskLedger(database, "b", 60, max_failures=1).claim_finalisation() is None
    again = await taken_over(database, "b")
    assert await open_groups(database, Split.TRAIN) == 1
    assert await finaliser(database, "b").finalise(again) is None
    ended = Task.from_mongo(await database.tasks.find_one() or {})
    assert (ended.status, ended.finalisation) == (TaskStatus.QUARANTINED, None)
    assert ended.error == "LookupError: the ranking model is gone"
    assert await open_groups(database, Split.TRAIN) == 0  # it leaves the staleness bound
    assert await database.records.count_documents({"status": RecordStatus.SCORED}) == 3
    assert await count_quarantined(database) == Quarantined(groups=1)
    (listed,) = await failed_tasks(database)
    assert (listed.group, listed.error) == (True, ended.error)

    register_scorer("broken_ranking", lambda records: [0.0, 0.5, 1.0])
    assert await release(database) == Quarantined(groups=1)
    assert await finaliser(database, "c").finalise(await taken_over(database, "c")) == 2
    assert (await outcome(database))[2] == TaskStatus.COMPLETED
    assert await count_quarantined(database) == Quarantined()
    assert await failed_tasks(database) == []


async def test_a_group_whose_scorer_is_out_of_reach_is_put_off_at_no_cost(
    database: RunDatabase,
) -> None:
    outage = InfrastructureFailure("nobody is at home", dependency="the judge")
    task = await scored_group(database, scores=UNSCORED, scorer=broken_ranking(outage))
    assert await finaliser(database, "a").finalise(task) is None
    for owner in ("b", "c", "d"):
        task = await taken_over(database, owner)
        assert task.finalisation is not None and task.finalisation.failures == 0
        assert await finaliser(database, owner).finalise(task) is None


async def test_a_group_of_which_its_samplers_die_is_quarantined(database: RunDatabase) -> None:
    task = await scored_group(database)
    for owner in ("b", "c"):
        task = await taken_over(database, owner)  # who had it before has died
    assert await finaliser(database, "c").finalise(task) is None
    ended = Task.from_mongo(await database.tasks.find_one() or {})
    assert (ended.status, ended.error) == (
        TaskStatus.QUARANTINED, "every sampler that finalised it went silent",
    )  # fmt: skip


@pytest.mark.parametrize("damage", ["lost turn", "nan logprob"])
async def test_a_record_of_which_no_row_can_be_made_is_quarantined_and_its_group_goes_on(
    database: RunDatabase, damage: str
) -> None:
    task = await scored_group(database)
    if damage == "lost turn":
        await database.turns.delete_one({"_id": "group-t1-a0-0"})
        said = "the turns of record group-t1-a0 do not fit together: there are no turns"
    else:
        wrong = {"$set": {"output_logprobs": pack_floats([-0.5, float("nan")])}}
        await database.turns.update_one({"_id": "group-t1-a0-0"}, wrong)
        said = "`logprobs` of token 4 is nan"
    assert await finaliser(database, "a").finalise(task) == 2
    records, rows, status = await outcome(database)
    assert status == TaskStatus.COMPLETED
    assert isinstance(records, list) and isinstance(rows, list)
    assert [record[1] for record in records] == ["ready", "quarantined", "ready"]
    assert [row.id for row in rows] == ["group-t0-a0", "group-t2-a0"]
    broken = Record.from_mongo(await database.records.find_one({"rollout": 1}) or {})
    assert broken.error is not None and said in broken.error
    group = Task.from_mongo(await database.tasks.find_one() or {})
    assert group.outcome is not None and group.outcome.left_out == {"quarantined": 1}
    (item,) = await list_quarantined(database)
    assert (item.kind, item.id, item.error) == ("record", "group-t1-a0", broken.error)

    # mended and released, it joins its group, and nothing of the others is done again
    await database.turns.delete_one({"_id": "group-t1-a0-0"})
    await database.turns.insert_one(make_turn("group-t1-a0").to_mongo())
    await database.rows.update_one({"_id": "group-t0-a0"}, {"$set": {"status": "trained"}})
    assert await release(database, ["group-t1-a0"]) == Quarantined(records=1)
    assert await finaliser(database, "b").finalise(await taken_over(database, "b")) == 3
    records, rows, status = await outcome(database)
    assert isinstance(records, list) and isinstance(rows, list)
    assert [record[1] for record in records] == ["ready"] * 3 and status == TaskStatus.COMPLETED
    assert [row.status for row in rows] == ["trained", "ready", "ready"]


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


# Longer than a busy machine stands still, and shorter than what is done under it.
LEASE_S = 2.0


async def test_the_finalisation_stays_ours_while_its_rows_take_longer_than_the_lease(
    database: RunDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await scored_group(database)
    build = row_building.build_row

    def slowly(*given: Any) -> DBRecordData:
        time.sleep(1)
        return build(*given)

    monkeypatch.setattr("agentrl.rollout.groups.finalise.build_row", slowly)
    soon = datetime.now(UTC) + timedelta(seconds=LEASE_S)
    await database.tasks.update_one({}, {"$set": {"finalisation.lease_expires": soon}})
    a = finaliser(database, "a", lease_seconds=LEASE_S)
    finalising = asyncio.create_task(a.finalise(task))
    other = TaskLedger(database, "b", 60, max_failures=1)
    while not finalising.done():
        assert await other.claim_finalisation() is None
        await asyncio.sleep(0.05)
    assert await finalising == 3
    assert a.in_progress == frozenset()


async def test_a_process_makes_the_rows_of_a_few_groups_at_once_and_keeps_the_others(
    database: RunDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await scored_group(database)
    await database.tasks.delete_many({})
    tasks = [task.model_copy(update={"id": f"g{i}", "group_order": 10 + i}) for i in range(12)]
    await database.tasks.insert_many([each.to_mongo() for each in tasks])
    now, most = 0, 0

    async def slowly(*given: Any) -> tuple[list[DBRecordData], dict[str, str]]:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(1)
        now -= 1
        return [], {}

    monkeypatch.setattr("agentrl.rollout.groups.finalise.make_rows", slowly)
    a = finaliser(database, "a", lease_seconds=LEASE_S)
    soon = datetime.now(UTC) + timedelta(seconds=LEASE_S)
    await database.tasks.update_many({}, {"$set": {"finalisation.lease_expires": soon}})
    all_of_them = asyncio.gather(*(a.finalise(each) for each in tasks))
    other = TaskLedger(database, "b", 60, max_failures=1)
    while not all_of_them.done():
        assert await other.claim_finalisation() is None
        await asyncio.sleep(0.05)
    await all_of_them
    assert most == MAKING_ROWS
    assert await database.tasks.count_documents({"status": TaskStatus.COMPLETED}) == 12


async def test_several_records_of_a_group_are_released_at_once(database: RunDatabase) -> None:
    task = await scored_group(database)
    await database.turns.delete_many({"_id": {"$in": ["group-t1-a0-0", "group-t2-a0-0"]}})
    assert await finaliser(database, "a").finalise(task) == 1
    for rollout in (1, 2):
        await database.turns.insert_one(make_turn(f"group-t{rollout}-a0").to_mongo())
    assert await release(database) == Quarantined(records=2)
    assert await finaliser(database, "b").finalise(await taken_over(database, "b")) == 3
    assert (await outcome(database))[2] == TaskStatus.COMPLETED
    assert await count_quarantined(database) == Quarantined()


async def test_a_record_of_a_group_in_progress_stays_in_quarantine(database: RunDatabase) -> None:
    task = await scored_group(database)
    await database.turns.delete_many({"_id": {"$in": ["group-t1-a0-0", "group-t2-a0-0"]}})
    assert await finaliser(database, "a").finalise(task) == 1
    assert await release(database, ["group-t1-a0"]) == Quarantined(records=1)
    await taken_over(database, "b")
    assert await release(database) == Quarantined()
    assert await count_quarantined(database) == Quarantined(records=1)
