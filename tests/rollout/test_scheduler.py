"""The sampler process's scheduling, with an agent of the test's own, on a real mongod."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentrl.configs import Config, parse_config
from agentrl.databases import runs, services
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import (
    Record,
    RecordStatus,
    RowStatus,
    SlotStatus,
    Split,
    StopReason,
    Task,
    TaskStatus,
    VersionSpan,
)
from agentrl.databases.feeder import make_tasks
from agentrl.databases.policies import Lineage
from agentrl.databases.records import RecordLedger
from agentrl.databases.rows import RowLedger, count_rows, count_waiting
from agentrl.databases.runs import RunLease
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import Claim, TaskLedger, open_groups
from agentrl.inference.pool import ServicePool
from agentrl.rollout.sampler import (
    AsyncSampler,
    GeneratedTurn,
    SamplerResources,
    load_renderer,
)
from agentrl.rollout.scheduler import SamplingScheduler

DEMO_MODEL = Path(__file__).resolve().parents[2] / "assets" / "demo" / "model"
Script = Callable[[Claim], float]  # the score of an attempt; may raise


class ScriptedAgent(AsyncSampler):
    """An agent that says one fixed turn and gets the score of its script."""

    script: Script
    pause_s = 0.0

    async def run(self) -> Record:
        """One turn of three tokens."""
        self.begin_conversation([{"role": "user", "content": self.record.query}], None)
        ids, logprobs = (5, 6, self.resources.renderer.turn_end_id), (-1.0, -2.0, -0.5)
        spans = [VersionSpan(version=0, start=0, end=3)]
        tokens = self.context.add_turn(ids, logprobs, spans)
        await asyncio.sleep(self.pause_s)
        turn = GeneratedTurn(
            tokens=tokens, output_ids=ids, output_logprobs=logprobs, versions=spans, text="said",
            finish_reason="stop", stop_reason=None, service="none", cached_tokens=0, latency_s=0.0,
        )  # fmt: skip
        await self.write_turn(turn, [])
        self.record.stop_reason = StopReason.ANSWERED
        self.record.versions = self.context.versions
        return self.record

    async def evaluate_record(self, record: Record) -> Record:
        """The script's score."""
        return record.model_copy(update={"score": type(self).script(self.claim)})


def agent(script: Script, pause_s: float = 0.0) -> type[ScriptedAgent]:
    return type("Agent", (ScriptedAgent,), {"script": staticmethod(script), "pause_s": pause_s})


def config(*flags: str) -> Config:
    return parse_config(
        ["--model_name_or_path", str(DEMO_MODEL), "--num_generations", "2", "--max_attempts", "2",
         "--lease_seconds", "5", *flags]
    )  # fmt: skip


@asynccontextmanager
async def scheduler(
    database: RunDatabase, agent: type[ScriptedAgent], config: Config, evaluation: int | None = None
) -> AsyncIterator[SamplingScheduler]:
    async with ServicePool() as pool:
        records = RecordLedger(database, config.sampling.lease_seconds)
        resources = SamplerResources(config, pool, load_renderer(config), records)
        yield SamplingScheduler(database, config, resources, agent, "sampler", evaluation)


async def add(
    database: RunDatabase, n: int, split: Split = Split.TRAIN, epoch: int = 0, attempts: int = 2
) -> None:
    lines = [TaskLine(id=f"{split}{i}", query=f"q{i}", scorer="exact_match") for i in range(n)]
    ledger = TaskLedger(database, "feeder", lease_seconds=9, max_attempts=1)
    await ledger.add(make_tasks(lines, split, epoch, attempts, range(n)))


async def begin_run(database: RunDatabase, rows_per_step: int = 1000) -> RunLease:
    """What a trainer does first: the run is its own, and a service has its weights."""
    lease = RunLease(database, "trainer", "here", lease_seconds=60)
    await lease.acquire(rows_per_step)
    await lease.progress(step=0, max_steps=9, version=0, status=runs.TRAINING)
    await services.register_urls(database, ["http://127.0.0.1:1"])
    await services.acknowledge(database, "http://127.0.0.1:1", 0)
    return lease


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Wait until an async condition holds."""
    async with asyncio.timeout(timeout_s):
        while not await condition():  # type: ignore[misc]
            await asyncio.sleep(0.02)


async def all_tasks(database: RunDatabase) -> list[Task]:
    return [Task.from_mongo(task) async for task in database.tasks.find().sort("seq", 1)]


def completed(database: RunDatabase, n: int) -> Callable[[], object]:
    async def condition() -> bool:
        return await database.tasks.count_documents({"status": TaskStatus.COMPLETED}) == n

    return condition


async def test_every_slot_ends_once_and_right_against_wrong_becomes_rows(
    database: RunDatabase,
) -> None:
    await add(database, 3)
    lease = await begin_run(database)
    # group 0: one right, one wrong; groups 1 and 2: no contrast
    scores = agent(lambda claim: float(claim.traj == 0 and claim.task.seq == 0))
    async with scheduler(database, scores, config()) as sampler:
        running = asyncio.create_task(sampler.run())
        await until(completed(database, 3))
        await lease.progress(step=9, max_steps=9, version=9, status=runs.FINISHED)
        await asyncio.wait_for(running, 10)
    tasks = await all_tasks(database)
    assert [slot.status for task in tasks for slot in task.slots] == [SlotStatus.COMPLETED] * 6
    assert await database.records.count_documents({}) == 6
    rows = {row["_id"]: row async for row in database.rows.find()}
    assert {row: document["reward"] for row, document in rows.items()} == {
        "train-0-train0-t0-a0": 1.0, "train-0-train0-t1-a0": 0.0,
    }  # fmt: skip
    assert await database.records.count_documents({"status": RecordStatus.READY}) == 2
    assert await database.records.count_documents({"status": RecordStatus.ABANDONED}) == 4


async def test_an_agent_or_scorer_that_raises_fails_its_record_and_the_slot_is_tried_again(
    database: RunDatabase,
) -> None:
    await add(database, 1)
    await begin_run(database)

    def script(claim: Claim) -> float:
        if claim.traj == 0 or claim.attempt == 0:
            raise ZeroDivisionError("judge broke")
        return 1.0

    async with scheduler(database, agent(script), config()) as sampler:
        running = asyncio.create_task(sampler.run())
        await until(completed(database, 1))
        sampler.stop()
        await running
    (task,) = await all_tasks(database)
    assert [(slot.status, slot.failures) for slot in task.slots] == [
        (SlotStatus.FAILED, 2), (SlotStatus.COMPLETED, 1),
    ]  # fmt: skip
    failed = [r async for r in database.records.find({"status": RecordStatus.FAILED})]
    assert len(failed) == 3 and all(record["score"] is None for record in failed)
    assert all(record["error"].startswith("ZeroDivisionError: judge broke") for record in failed)
    # what the failed attempts said is kept
    assert await database.turns.count_documents({}) == 4


async def test_without_resampling_an_error_is_final(database: RunDatabase) -> None:
    await add(database, 1)
    await begin_run(database)
    flags = config("--resample_error_records", "false")

    def script(claim: Claim) -> float:
        raise OSError("no")

    async with scheduler(database, agent(script), flags) as sampler:
        running = asyncio.create_task(sampler.run())
        await until(completed(database, 1))
        sampler.stop()
        await running
    assert await database.records.count_documents({}) == 2


async def test_a_record_that_takes_too_long_is_failed(database: RunDatabase) -> None:
    await add(database, 1, attempts=1)
    await begin_run(database)
    flags = config("--record_timeout", "0.2", "--resample_error_records", "false")
    async with scheduler(database, agent(lambda claim: 1.0, pause_s=30), flags) as sampler:
        running = asyncio.create_task(sampler.run())
        await until(completed(database, 1))
        sampler.stop()
        await running
    record = await database.records.find_one()
    assert record is not None and "--record_timeout 0.2" in record["error"]


async def test_a_stop_hands_slots_back_and_another_sampler_ends_them(
    database: RunDatabase,
) -> None:
    await add(database, 2)
    await begin_run(database)
    async with scheduler(database, agent(lambda c: 1.0, pause_s=60), config()) as slow:
        running = asyncio.create_task(slow.run())

        async def all_leased() -> bool:
            return await database.tasks.count_documents({"pending": 0}) == 2

        await until(all_leased)
        slow.stop()
        await asyncio.wait_for(running, 10)
    slots = [slot for task in await all_tasks(database) for slot in task.slots]
    assert [(s.status, s.failures, s.owner) for s in slots] == [(SlotStatus.PENDING, 0, None)] * 4
    async for record in database.records.find():
        assert record["status"] == RecordStatus.FAILED and "handed back" in record["error"]
    async with scheduler(database, agent(lambda c: float(c.traj)), config()) as quick:
        running = asyncio.create_task(quick.run())
        await until(completed(database, 2))
        quick.stop()
        await running
    assert await database.rows.count_documents({}) == 4


async def test_nothing_begins_without_published_weights(database: RunDatabase) -> None:
    await add(database, 1)
    await begin_run(database)
    await services.acknowledge(database, "http://127.0.0.1:1", -1)
    async with scheduler(database, agent(lambda c: 1.0), config()) as sampler:
        running = asyncio.create_task(sampler.run())
        await asyncio.sleep(0.6)
        assert await open_groups(database, Split.TRAIN) == 0
        await services.acknowledge(database, "http://127.0.0.1:1", 0)
        await until(completed(database, 1))
        sampler.stop()
        await running


@pytest.mark.parametrize(
    ("flags", "bound"), [(("--sync_sampling", "true"), 4), (("--max_staleness", "1"), 8)]
)
async def test_samplers_run_ahead_as_far_as_the_bound_and_go_on_when_rows_are_trained(
    database: RunDatabase, flags: tuple[str, ...], bound: int
) -> None:
    await add(database, 12)
    await begin_run(database, rows_per_step=4)
    contrast = agent(lambda claim: float(claim.traj == 0))
    async with scheduler(database, contrast, config(*flags)) as sampler:
        running = asyncio.create_task(sampler.run())

        async def full() -> bool:
            return await count_waiting(database) == bound

        await until(full)
        await asyncio.sleep(0.6)
        assert await count_waiting(database) == bound
        ledger = RowLedger(database, "trainer", fence=1)
        lineage = Lineage({0: 0})
        leased = await ledger.lease(1, 4, lineage, max_staleness=0)
        await asyncio.sleep(0.5)
        assert await count_waiting(database) == bound  # leased rows are not trained yet
        await ledger.commit(1, [row.id for row in leased])
        await until(full)
        sampler.stop()
        await running
    assert (await count_rows(database))[RowStatus.TRAINED] == 4


async def test_evaluations_come_first_make_no_rows_and_may_be_all_that_is_done(
    database: RunDatabase,
) -> None:
    await add(database, 2)
    await add(database, 2, Split.EVAL, epoch=-1)
    await begin_run(database)
    async with scheduler(database, agent(lambda c: float(c.traj)), config(), -1) as sampler:
        await asyncio.wait_for(sampler.run(), 20)
    assert await database.records.count_documents({"split": Split.EVAL}) == 4
    assert await database.records.count_documents({"status": RecordStatus.SCORED}) == 4
    assert await database.records.count_documents({"split": Split.TRAIN}) == 0
    assert await database.rows.count_documents({}) == 0


async def test_what_a_dead_sampler_left_is_taken_over(database: RunDatabase) -> None:
    await add(database, 1)
    await begin_run(database)
    dead = TaskLedger(database, "dead", lease_seconds=0.0, max_attempts=2)
    assert len(await dead.claim(Split.TRAIN)) == 1
    flags = config("--lease_seconds", "1")
    async with scheduler(database, agent(lambda c: float(c.traj)), flags) as sampler:
        running = asyncio.create_task(sampler.run())
        await until(completed(database, 1))
        sampler.stop()
        await running
    (task,) = await all_tasks(database)
    assert [slot.attempt for slot in task.slots] == [1, 0]


@pytest.mark.parametrize("split", list(Split))
@pytest.mark.parametrize("status", [RecordStatus.SAMPLING, RecordStatus.SCORED])
@pytest.mark.parametrize("reaper_died", [False, True])
async def test_a_lost_slots_record_is_never_left_beside_its_result(
    database: RunDatabase, split: Split, status: RecordStatus, reaper_died: bool
) -> None:
    """Also where its sampler died after the score, or the reaper before it said so."""
    await add(database, 1, split)
    await begin_run(database)
    dead = TaskLedger(database, "dead", lease_seconds=0.0, max_attempts=2)
    (lost,) = await dead.claim(split)
    record = {"_id": lost.record_id, "task": lost.task.id, "traj": 0, "status": status, "score": 1}
    await database.records.insert_one(record)
    if reaper_died:
        await dead.release(lost)  # the slot is free again, and the Record untouched
    flags = config("--lease_seconds", "1")
    async with scheduler(database, agent(lambda c: float(c.traj)), flags) as sampler:
        running = asyncio.create_task(sampler.run())
        await until(completed(database, 1))
        sampler.stop()
        await running
    left = await database.records.find_one({"_id": lost.record_id})
    assert left is not None and left["status"] == RecordStatus.FAILED and left["error"]
    ended = database.records.find({"status": {"$ne": RecordStatus.FAILED}}, {"traj": 1})
    assert sorted([record["traj"] async for record in ended]) == [0, 1]
