"""Samplers that are stopped, stand still, or lose what they need: nothing is lost or doubled."""

import asyncio
import signal
import time
from pathlib import Path

from forked import Forked
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

from agentrl.databases.connection import RunDatabase, connect
from agentrl.databases.documents import Record, RecordStatus, SlotStatus
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.inference.protocol import ServiceUnreachable

HERE = Path(__file__).parent


class Waiting(ScriptedAgent):
    """Trajectory 0 ends when `go` is set, all others never."""

    go: asyncio.Event
    begun: set[str]

    async def run(self) -> Record:
        self.begun.add(self.record.id)
        await (self.go if self.claim.rollout == 0 else asyncio.Event()).wait()
        return await super().run()

    @staticmethod
    def script(claim: object) -> float:
        return 1.0


def waiting() -> type[Waiting]:
    return type("Waits", (Waiting,), {"go": asyncio.Event(), "begun": set()})


async def test_a_stopped_sampler_finishes_what_it_can_and_hands_back_the_rest(
    database: RunDatabase,
) -> None:
    await add(database, 2)
    await begin_run(database)
    agents = waiting()
    async with scheduler(database, agents, config("--drain_seconds", "1.5")) as sampler:
        running = asyncio.create_task(sampler.run())

        async def all_begun() -> bool:
            return len(agents.begun) == 4

        await until(all_begun)
        sampler.stop()
        await add(database, 1, epoch=1)
        agents.go.set()
        await asyncio.wait_for(running, 20)
    tasks = await all_tasks(database)
    slots = {(task.epoch, slot.rollout): slot for task in tasks for slot in task.slots}
    assert slots[0, 0].status == SlotStatus.COMPLETED
    assert (slots[0, 1].status, slots[0, 1].failures) == (SlotStatus.PENDING, 0)
    assert slots[1, 0].attempt == 0  # nothing new was begun
    kept = [record async for record in database.records.find({"rollout": 1})]
    assert len(kept) == 2
    assert all(record["status"] == RecordStatus.FAILED for record in kept)
    assert all(record["error"] == "handed back: the sampler stopped" for record in kept)


async def test_a_second_stop_ends_the_patience(database: RunDatabase) -> None:
    await add(database, 1)
    await begin_run(database)
    agents = waiting()
    async with scheduler(database, agents, config("--drain_seconds", "600")) as sampler:
        running = asyncio.create_task(sampler.run())

        async def all_begun() -> bool:
            return len(agents.begun) == 2

        await until(all_begun)
        sampler.stop()
        sampler.stop()
        await asyncio.wait_for(running, 20)
    (task,) = await all_tasks(database)
    assert [(slot.status, slot.failures) for slot in task.slots] == [(SlotStatus.PENDING, 0)] * 2


async def test_services_out_of_reach_cost_a_slot_none_of_its_attempts(
    database: RunDatabase,
) -> None:
    await add(database, 1)
    await begin_run(database)

    def script(claim: object) -> float:
        if claim.attempt < 2:  # type: ignore[attr-defined]
            raise ServiceUnreachable("no inference service answered for 300 s")
        return 1.0

    async with scheduler(database, agent(script), config()) as sampler:
        running = asyncio.create_task(sampler.run())
        await until(completed(database, 1))
        sampler.stop()
        await running
    (task,) = await all_tasks(database)
    assert [(slot.status, slot.attempt, slot.failures) for slot in task.slots] == [
        (SlotStatus.COMPLETED, 2, 0)
    ] * 2


async def test_a_sampler_that_stood_still_for_two_leases_writes_nothing_more(
    database: RunDatabase, mongod: EmbeddedMongod
) -> None:
    await add(database, 2)
    await begin_run(database)
    # Longer than a busy machine itself stands still: that would end a lease before the signal.
    lease_s = 4
    flags = ("--lease_seconds", str(lease_s), "--drain_seconds", "0")
    process = Forked(
        [str(HERE / "sampler_process.py"), mongod.url, database.name, *flags], piped=True
    )
    assert process.stdout is not None
    try:
        waiting = [await asyncio.to_thread(process.stdout.readline) for _ in range(4)]
        assert waiting == ["waits\n"] * 4
        process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        async with scheduler(
            database, agent(lambda claim: float(claim.rollout)), config(*flags), owner="awake"
        ) as awake:
            running = asyncio.create_task(awake.run())
            await until(completed(database, 2))
            awake.stop()
            await running
        lost = {"owner": "stopped"}
        before = [record async for record in database.records.find(lost).sort("_id", 1)]
        # A lease runs from its last heartbeat: the others may be done before one has passed.
        await asyncio.sleep(max(0.0, stopped + 2 * lease_s - time.monotonic()))
        process.send_signal(signal.SIGCONT)
        # Its attempts go on, and try to write: one after the other says that it woke.
        woke = [await asyncio.to_thread(process.stdout.readline) for _ in range(4)]
        assert woke == ["woke\n"] * 4
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    after = [record async for record in database.records.find(lost).sort("_id", 1)]
    assert after == before and len(after) == 4
    assert {record["status"] for record in after} == {RecordStatus.FAILED}
    ids = [record["_id"] for record in after]
    assert await database.turns.count_documents({"record_id": {"$in": ids}}) == 0
    for task in await all_tasks(database):
        assert [(slot.status, slot.attempt, slot.losses, slot.failures) for slot in task.slots] == [
            (SlotStatus.COMPLETED, 1, 1, 0)
        ] * 2


async def test_a_sampler_outlives_its_databases_crash_and_restart(tmp_path: Path) -> None:
    with EmbeddedMongod(tmp_path / "data", tmp_path / "mongod.log") as server:
        database = await connect(server.url, "outage")
        await add(database, 6)
        await begin_run(database)
        agents = waiting()
        flags = config("--lease_seconds", "1", "--max_concurrent_samples_per_process", "4")
        async with scheduler(database, agents, flags) as sampler:
            running = asyncio.create_task(sampler.run())

            async def some_begun() -> bool:
                return len(agents.begun) == 4

            await until(some_begun)
            server.kill()
            agents.go.set()  # what they have to store, they store when the database is back
            await asyncio.to_thread(server.start)

            async def two_scored() -> bool:
                return (
                    await database.records.count_documents(
                        {"status": RecordStatus.SCORED, "rollout": 0}
                    )
                    >= 2
                )

            await until(two_scored, 60)
            assert not running.done()
            sampler.stop()
            sampler.stop()
            await asyncio.wait_for(running, 30)
        slots = [slot for task in await all_tasks(database) for slot in task.slots]
        assert not [slot for slot in slots if slot.status == SlotStatus.LEASED]
        done = [slot for slot in slots if slot.status == SlotStatus.COMPLETED]
        scored = await database.records.count_documents({"status": RecordStatus.SCORED})
        assert len(done) == scored >= 2
        await database.close()
