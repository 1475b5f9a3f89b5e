"""Scoring is a step of its own: whatever its scorer does, a trajectory is sampled once."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from forked import Forked
from scripted_run import (
    ScriptedAgent,
    add,
    all_tasks,
    begin_run,
    completed,
    config,
    scheduler,
    until,
)

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Record, RecordStatus, SlotStatus, Split
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.retries import pause_after
from agentrl.failures import InfrastructureFailure
from agentrl.policy_version import VersionSpan
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.scheduling import breaker
from agentrl.rollout.scorers import register_scorer

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that a test can wait for."""
    monkeypatch.setattr("agentrl.databases.retries.FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr("agentrl.databases.retries.LONGEST_PAUSE_S", 0.2)
    monkeypatch.setattr("agentrl.rollout.scheduling.scheduler.SCORINGS_S", 0.05)


class ScoredByItsTask(ScriptedAgent):
    """Says its turn, and is scored as its task asks. Counts its conversations."""

    evaluate_record = AsyncSampler.evaluate_record
    runs: Counter[str]

    async def run(self) -> Record:
        type(self).runs[self.record.id] += 1
        self.record.final_answer = "said"
        return await super().run()


def counting() -> type[ScoredByItsTask]:
    return type("Counting", (ScoredByItsTask,), {"runs": Counter()})


async def sample_until_completed(
    database: RunDatabase, agent: type[AsyncSampler], groups: int, *flags: str
) -> None:
    async with scheduler(database, agent, config(*flags)) as sampler:
        running = asyncio.create_task(sampler.run())
        await until(completed(database, groups))
        sampler.stop()
        await running


async def sampled_once(database: RunDatabase, agent: type[ScoredByItsTask], rollouts: int) -> None:
    """No trajectory was made twice, and every Record has its one turn."""
    assert sorted(agent.runs.values()) == [1] * rollouts
    assert await database.records.count_documents({}) == rollouts
    assert await database.turns.count_documents({}) == rollouts
    slots = [slot for task in await all_tasks(database) for slot in task.slots]
    assert {(slot.attempt, slot.failures) for slot in slots} == {(0, 0)}


async def test_a_scorer_that_fails_is_asked_again_and_nothing_is_sampled_again(
    database: RunDatabase,
) -> None:
    asked: Counter[str] = Counter()

    async def moody(record: Record) -> float:
        asked[record.id] += 1
        if asked[record.id] <= 3:
            raise LookupError("not in the mood")
        return float(record.rollout)

    register_scorer("moody", moody)
    await add(database, 2, scorer="moody")
    await begin_run(database)
    agent = counting()
    await sample_until_completed(database, agent, 2)
    await sampled_once(database, agent, 4)
    assert set(asked.values()) == {4}
    for task in await all_tasks(database):
        assert [(slot.status, slot.score) for slot in task.slots] == [
            (SlotStatus.COMPLETED, 0.0), (SlotStatus.COMPLETED, 1.0),
        ]  # fmt: skip
        assert [(slot.scorings, slot.scoring_failures, slot.error) for slot in task.slots] == [
            (3, 3, None)
        ] * 2
    assert await database.rows.count_documents({}) == 4


async def test_a_scorer_out_of_reach_costs_nothing_however_long_it_is(
    database: RunDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "LONGEST_PAUSE_S", 0.01)  # between two that try it
    asked: Counter[str] = Counter()

    async def away(record: Record) -> float:
        asked[record.id] += 1
        if asked[record.id] <= 6:
            raise InfrastructureFailure("nobody is at home", dependency="the judge")
        return 1.0

    register_scorer("away", away)
    await add(database, 1, scorer="away")
    await begin_run(database)
    agent = counting()
    await sample_until_completed(database, agent, 1, "--max_scoring_failures", "1")
    await sampled_once(database, agent, 2)
    (task,) = await all_tasks(database)
    assert [(slot.scorings, slot.scoring_failures) for slot in task.slots] == [(6, 0)] * 2


async def test_a_record_that_can_never_be_scored_is_quarantined_and_the_others_are_trained(
    database: RunDatabase,
) -> None:
    async def picky(record: Record) -> float:
        if record.rollout == 1:
            raise ZeroDivisionError("of this one I say nothing")
        return float(record.rollout)

    register_scorer("picky", picky)
    await add(database, 1, rollouts=3, scorer="picky")
    await begin_run(database)
    agent = counting()
    await sample_until_completed(database, agent, 1, "--max_scoring_failures", "2")
    await sampled_once(database, agent, 3)
    (task,) = await all_tasks(database)
    assert [slot.status for slot in task.slots] == [
        SlotStatus.COMPLETED, SlotStatus.QUARANTINED, SlotStatus.COMPLETED,
    ]  # fmt: skip
    record = Record.from_mongo(await database.records.find_one({"rollout": 1}) or {})
    assert (record.status, record.score, len(record.turns)) == (RecordStatus.QUARANTINED, None, 1)
    assert record.error is not None and record.error == task.slots[1].error
    assert record.error.startswith("ZeroDivisionError: of this one I say nothing (at picky, ")
    assert sorted([row["_id"] async for row in database.rows.find()]) == [
        f"{task.id}-t0-a0", f"{task.id}-t2-a0",
    ]  # fmt: skip


class FromStored(ScriptedAgent):
    """Scores by what another's `run()` kept, and by the length of what it said."""

    async def run(self) -> Record:
        raise AssertionError("there is nothing to sample")

    async def evaluate_record(self, record: Record) -> Record:
        turns = (await self.resources.records.turns([record.id]))[record.id]
        assert self.record.turns == [turn.id for turn in turns]
        score = record.scores["script"] + len(turns[0].output_text) + self.claim.rollout
        return record.model_copy(update={"score": score})


async def test_a_trajectory_whose_sampler_is_killed_while_it_is_scored_is_scored_by_another(
    database: RunDatabase, mongod: EmbeddedMongod
) -> None:
    await add(database, 1)
    await begin_run(database)
    flags = ("--lease_seconds", "2")
    process = Forked(
        [str(HERE / "scoring_process.py"), mongod.url, database.name, *flags], piped=True
    )
    assert process.stdout is not None
    try:
        told = [await asyncio.to_thread(process.stdout.readline) for _ in range(2)]
        records = {record["_id"]: record async for record in database.records.find()}
        assert {line.strip() for line in told} == records.keys()
        for record in records.values():
            assert record["status"] == RecordStatus.SAMPLED
            assert record["sampled_at"] is not None and record["finished_at"] is None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    await sample_until_completed(database, FromStored, 1, *flags)
    (task,) = await all_tasks(database)
    assert [(slot.attempt, slot.failures, slot.scorings) for slot in task.slots] == [(0, 0, 1)] * 2
    assert [slot.score for slot in task.slots] == [4.25, 5.25]
    assert await database.turns.count_documents({}) == 2


class LosesTurns(ScriptedAgent):
    """Generates two turns, and stores the second only."""

    async def run(self) -> Record:
        if self.claim.attempt == 0:
            await self.begin_conversation([{"role": "user", "content": "first"}], None)
            self.context.add_turn([5, 6], [-1.0, -1.0], [VersionSpan(0, 0, 2)])
        return await super().run()


async def test_an_agent_that_loses_a_turn_fails_its_attempt_and_not_its_group(
    database: RunDatabase,
) -> None:
    await add(database, 1)
    await begin_run(database)
    await sample_until_completed(database, LosesTurns, 1)
    failed = [r async for r in database.records.find({"status": RecordStatus.FAILED})]
    assert len(failed) == 2
    for record in failed:
        assert "the agent generated 2 turns and stored 1" in record["error"]
        assert f"{record['_id']}-0 is missing" in record["error"]
    (task,) = await all_tasks(database)
    assert [(slot.status, slot.attempt) for slot in task.slots] == [(SlotStatus.COMPLETED, 1)] * 2


@pytest.mark.parametrize("score", [float("nan"), float("inf"), "much"])
async def test_a_score_of_its_agents_that_is_no_finite_number_is_a_failed_scoring(
    database: RunDatabase, score: object
) -> None:
    class Odd(ScriptedAgent):
        async def evaluate_record(self, record: Record) -> Record:
            own = score if self.claim.rollout == 0 else float(self.claim.rollout)
            return record.model_copy(update={"score": own})

    await add(database, 1, rollouts=3)
    await begin_run(database)
    await sample_until_completed(database, Odd, 1, "--max_scoring_failures", "1")
    (task,) = await all_tasks(database)
    assert [slot.score for slot in task.slots] == [None, 1.0, 2.0]
    assert task.slots[0].error is not None and "not a finite number" in task.slots[0].error
    advantages = [r["advantage"] async for r in database.records.find().sort("rollout", 1)]
    assert advantages == pytest.approx([None, -0.707, 0.707], abs=1e-3)


async def test_a_stop_while_a_trajectory_is_scored_leaves_only_the_scoring_to_others(
    database: RunDatabase,
) -> None:
    begun: asyncio.Queue[str] = asyncio.Queue()
    answered = asyncio.Event()

    async def slow(record: Record) -> float:
        begun.put_nowait(record.id)
        await answered.wait()
        return float(record.rollout)

    register_scorer("slow", slow)
    await add(database, 1, scorer="slow")
    await begin_run(database)
    agent = counting()
    async with scheduler(database, agent, config("--drain_seconds", "0"), owner="first") as first:
        running = asyncio.create_task(first.run())
        for _ in range(2):
            await asyncio.wait_for(begun.get(), 20)
        first.stop()
        await asyncio.wait_for(running, 20)
    (task,) = await all_tasks(database)
    assert [(slot.status, slot.owner) for slot in task.slots] == [(SlotStatus.SAMPLED, None)] * 2
    answered.set()
    await sample_until_completed(database, agent, 1)
    await sampled_once(database, agent, 2)
    (task,) = await all_tasks(database)
    assert [(slot.scoring_failures, slot.score) for slot in task.slots] == [(0, 0.0), (0, 1.0)]


async def test_an_evaluation_alone_is_scored_again_too(database: RunDatabase) -> None:
    asked: Counter[str] = Counter()

    async def once_wrong(record: Record) -> float:
        asked[record.id] += 1
        if asked[record.id] == 1:
            raise LookupError("not yet")
        return 1.0

    register_scorer("once_wrong", once_wrong)
    await add(database, 1, Split.EVAL, epoch=-1, scorer="once_wrong")
    await add(database, 1, scorer="once_wrong")
    await begin_run(database)
    agent = counting()
    async with scheduler(database, agent, config(), -1) as sampler:
        await asyncio.wait_for(sampler.run(), 20)
    scored = [record async for record in database.records.find()]
    assert [(record["split"], record["score"]) for record in scored] == [(Split.EVAL, 1.0)] * 2


async def test_a_scorer_that_takes_too_long_costs_a_scoring(database: RunDatabase) -> None:
    async def endless(record: Record) -> float:
        await asyncio.sleep(600)
        return 0.0

    register_scorer("endless", endless)
    await add(database, 1, rollouts=1, scorer="endless")
    await begin_run(database)
    flags = ("--record_timeout", "0.3", "--max_scoring_failures", "1")
    agent = counting()
    await sample_until_completed(database, agent, 1, *flags)
    (task,) = await all_tasks(database)
    assert task.slots[0].status == SlotStatus.QUARANTINED
    assert task.slots[0].error == "TimeoutError: not finished within --record_timeout 0.3 s"


def test_pauses_between_scorings_grow_up_to_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert [pause_after(n) for n in (1, 2, 3, 4)] == [1.0, 2.0, 4.0, 8.0]
    assert pause_after(10**6) == 60.0
