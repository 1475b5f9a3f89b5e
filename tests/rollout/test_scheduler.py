"""The sampler process's scheduling, with an agent of the tests' own, on a real mongod."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from scripted_run import (
    ScriptedAgent,
    add,
    agent,
    all_tasks,
    begin_run,
    completed,
    config,
    scheduler,
    until,
)

from agentrl.configs import ConfigError
from agentrl.databases import runs, services
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import (
    Record,
    RecordStatus,
    RowStatus,
    SlotStatus,
    Split,
    TaskStatus,
)
from agentrl.databases.policies import Lineage
from agentrl.databases.row_ledger import RowLedger, count_rows, count_waiting
from agentrl.databases.tasks import Claim, TaskLedger, open_groups
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.scorers import register_scorer


async def test_every_slot_ends_once_and_right_against_wrong_becomes_rows(
    database: RunDatabase,
) -> None:
    await add(database, 3)
    lease = await begin_run(database)
    # group 0: one right, one wrong; groups 1 and 2: no contrast
    scores = agent(lambda claim: float(claim.rollout == 0 and claim.task.seq == 0))
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
        if claim.rollout == 0 or claim.attempt == 0:
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


class ScoredByItsTask(ScriptedAgent):
    """Says its turn, and is scored as its task asks."""

    evaluate_record = AsyncSampler.evaluate_record


async def test_a_group_that_is_compared_for_longer_than_a_lease_is_left_to_another_by_a_stop(
    database: RunDatabase,
) -> None:
    begun: asyncio.Queue[int] = asyncio.Queue()
    answered = asyncio.Event()

    async def compare(records: list[Record]) -> list[float]:
        begun.put_nowait(len(records))
        await answered.wait()
        return [float(record.rollout) for record in records]

    register_scorer("compare", compare)
    await add(database, 1, scorer="compare")
    await begin_run(database)
    flags = config("--lease_seconds", "1")
    async with scheduler(database, ScoredByItsTask, flags, owner="first") as first:
        running = asyncio.create_task(first.run())
        assert await asyncio.wait_for(begun.get(), 20) == 2
        held = await database.tasks.find_one()
        assert held is not None

        async def extended() -> bool:
            task = await database.tasks.find_one()
            assert task is not None and task["finalisation"]["owner"] == "first"
            later = task["finalisation"]["lease_expires"] - held["finalisation"]["lease_expires"]
            return bool(later.total_seconds() > 1)

        await until(extended)
        first.stop()
        first.stop()  # at once
        await asyncio.wait_for(running, 20)
    assert not await completed(database, 1)()
    async with scheduler(database, ScoredByItsTask, flags, owner="second") as second:
        running = asyncio.create_task(second.run())
        await asyncio.wait_for(begun.get(), 20)
        answered.set()
        await until(completed(database, 1))
        second.stop()
        await running
    (task,) = await all_tasks(database)
    assert [(slot.score, slot.attempt) for slot in task.slots] == [(0.0, 0), (1.0, 0)]
    assert (await count_rows(database))[RowStatus.READY] == 2


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
    await add(database, 1, rollouts=1)
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
    flags = config("--drain_seconds", "0")
    async with scheduler(database, agent(lambda c: 1.0, pause_s=60), flags) as slow:
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
    async with scheduler(database, agent(lambda c: float(c.rollout)), config()) as quick:
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
    contrast = agent(lambda claim: float(claim.rollout == 0))
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


async def test_several_samplers_together_begin_no_more_than_the_bound_admits(
    database: RunDatabase,
) -> None:
    await add(database, 40)
    run = await begin_run(database, rows_per_step=4)
    flags = config("--max_staleness", "1")  # 8 rows: 4 groups of 2
    contrast = agent(lambda claim: float(claim.rollout == 0))
    steps = 3
    async with AsyncExitStack() as stack:
        samplers = [
            await stack.enter_async_context(scheduler(database, contrast, flags, owner=f"s{n}"))
            for n in range(4)
        ]
        running = [asyncio.create_task(sampler.run()) for sampler in samplers]

        async def full() -> bool:
            waiting = await count_waiting(database)
            assert waiting <= 8
            return waiting == 8

        await until(full)
        ledger = RowLedger(database, "trainer", fence=1)
        for step in range(1, steps + 1):
            leased = await ledger.lease(step, 4, Lineage({0: 0}), max_staleness=9)
            await ledger.commit(step, [row.id for row in leased])
            await run.progress(step=step, max_steps=9, version=0, status=runs.TRAINING)
            await until(full)
        for sampler in samplers:
            sampler.stop()
        await asyncio.gather(*running)
    begun = await database.tasks.count_documents({"status": {"$ne": TaskStatus.CREATED}})
    assert begun == 4 + 2 * steps


def loaded(waiting: Callable[[], int]) -> web.Application:
    """A service that tells its load."""

    async def loads(_: web.Request) -> web.Response:
        rank = {
            "num_running_reqs": 8, "num_waiting_reqs": waiting(), "num_used_tokens": 10,
            "max_total_num_tokens": 1000, "gen_throughput": 1.0, "queues": {"retracted": 0},
        }  # fmt: skip
        return web.json_response({"loads": [rank]})

    app = web.Application()
    app.router.add_get("/v1/loads", loads)
    return app


async def test_a_sampler_stores_the_load_that_it_sees_and_its_own(
    database: RunDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.rollout.scheduling.scheduler.LOADS_S", 0.02)
    monkeypatch.setattr("agentrl.rollout.scheduling.load_report.STORE_S", 0.05)
    await add(database, 2)
    async with TestServer(loaded(lambda: 3), host="127.0.0.1") as server:
        url = str(server.make_url("")).rstrip("/")
        await begin_run(database, service=url)
        waits = agent(lambda claim: 0.0, pause_s=600)
        flags = config("--max_concurrent_samples_per_process", "7", "--lease_seconds", "600")
        async with scheduler(database, waits, flags) as sampler:
            running = asyncio.create_task(sampler.run())

            async def told() -> bool:
                seen = await database.services.count_documents({"load": {"$ne": None}})
                full = {"_id": sampler.owner, "sampling": 4, "limit": {"$lte": 7}}
                return seen == 1 and await database.samplers.count_documents(full) == 1

            await until(told, 60)
            sampler.stop()
            sampler.stop()  # at once
            await running
    service, own = await database.services.find_one(), await database.samplers.find_one()
    assert service is not None and own is not None
    numbers = {name: value for name, value in service["load"].items() if name != "at"}
    assert numbers == {
        "running": 8, "waiting": 3, "used_tokens": 10, "total_tokens": 1000, "retractions": 0,
    }  # fmt: skip
    assert own["cpu"] > 0 and own["late_s"] >= 0


async def test_a_sampler_does_less_at_once_while_requests_queue_at_a_service(
    database: RunDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.rollout.scheduling.scheduler.LOADS_S", 0.02)
    waiting = 0
    app = loaded(lambda: waiting)
    await add(database, 500)
    await begin_run(database)
    in_progress: list[int] = []

    def script(claim: Claim) -> float:
        in_progress.append(len(sampler._attempts))
        return 0.0

    async with TestServer(app, host="127.0.0.1") as server:
        await services.unregister(database, "http://127.0.0.1:1")
        url = str(server.make_url("")).rstrip("/")
        await services.register_urls(database, [url])
        await services.acknowledge(database, url, 0)
        flags = config("--max_concurrent_samples_per_process", "16")
        async with scheduler(database, agent(script, pause_s=0.05), flags) as sampler:
            running = asyncio.create_task(sampler.run())

            async def many() -> bool:
                return max(in_progress, default=0) >= 12

            await until(many)
            waiting = 30  # not before: the limit may fall faster than a busy machine claims

            async def fewer() -> bool:
                return in_progress[-1] <= 4

            await until(fewer)
            waiting = 0

            async def more() -> bool:
                return in_progress[-1] >= 10

            await until(more)
            sampler.stop()
            await running


async def test_evaluations_come_first_make_no_rows_and_may_be_all_that_is_done(
    database: RunDatabase,
) -> None:
    await add(database, 2)
    await add(database, 2, Split.EVAL, epoch=-1)
    await begin_run(database)
    async with scheduler(database, agent(lambda c: float(c.rollout)), config(), -1) as sampler:
        await asyncio.wait_for(sampler.run(), 20)
    assert await database.records.count_documents({"split": Split.EVAL}) == 4
    assert await database.records.count_documents({"status": RecordStatus.SCORED}) == 4
    assert await database.records.count_documents({"split": Split.TRAIN}) == 0
    assert await database.rows.count_documents({}) == 0


async def test_what_a_dead_sampler_left_is_taken_over(database: RunDatabase) -> None:
    await add(database, 1)
    await begin_run(database)
    dead = TaskLedger(database, "dead", lease_seconds=0.0, max_failures=2)
    assert len(await dead.claim(Split.TRAIN)) == 1
    flags = config("--lease_seconds", "1")
    async with scheduler(database, agent(lambda c: float(c.rollout)), flags) as sampler:
        running = asyncio.create_task(sampler.run())
        await until(completed(database, 1))
        sampler.stop()
        await running
    (task,) = await all_tasks(database)
    assert [slot.attempt for slot in task.slots] == [1, 0]


async def test_a_users_advantage_that_fails_ends_the_sampler_with_its_sentence(
    database: RunDatabase, tmp_path: Path
) -> None:
    await add(database, 1)
    await begin_run(database)
    (tmp_path / "mine.py").write_text("def mine(records):\n    return [records[0].scoer]\n")
    flags = config("--advantage", f"{tmp_path}/mine.py:mine")
    async with scheduler(database, agent(lambda claim: 1.0), flags) as sampler:
        with pytest.raises(ConfigError, match=r"--advantage .*mine.* fails: AttributeError"):
            await asyncio.wait_for(sampler.run(), 20)
