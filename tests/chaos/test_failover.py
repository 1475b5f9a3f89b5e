"""A replica set of three real members whose primary fails again and again under a run's load."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from replica_set import ReplicaSet
from scripted_run import ScriptedAgent, begin_run, config, scheduler
from verify import RunState, violations

from agentrl.databases import policies, runs, services
from agentrl.databases.connection import RunDatabase, connect, retry_through_outages
from agentrl.databases.documents import Record
from agentrl.databases.feeder import TaskFeeder
from agentrl.databases.hopeless import HopelessWatch
from agentrl.databases.row_ledger import RowLedger, fetch_rows
from agentrl.databases.runs import RunLease
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import Claim
from agentrl.training.data.stream import LedgerSource

GROUPS, ROLLOUTS, ROWS_PER_STEP, MAX_STALENESS = 160, 2, 8, 2
STEPS = GROUPS * ROLLOUTS // ROWS_PER_STEP
SERVICE = "http://127.0.0.1:1"


class Versioned(ScriptedAgent):
    """Says its turn with the weights of now."""

    pause_s = 0.05

    async def run(self) -> Record:
        self.record.n_turns = 1
        return await super().run()

    @staticmethod
    def script(claim: Claim) -> float:
        return float(claim.rollout)


class Trainer:
    """What rank 0 does in the database, without a model."""

    def __init__(self, database: RunDatabase, feeder: TaskFeeder) -> None:
        self.database, self.feeder = database, feeder
        self.step = 0

    async def run(self) -> None:
        database = self.database
        lease = await begin_run(database, ROWS_PER_STEP, SERVICE)
        await policies.publish(database, 0, 0, "weights")
        ledger = RowLedger(database, "trainer", lease.fence)
        await self.feeder.start()
        source = LedgerSource(
            database, ledger, self.feeder, rows_per_step=ROWS_PER_STEP,
            max_staleness=MAX_STALENESS, stop=threading.Event(), watch=HopelessWatch(database, 0),
        )  # fmt: skip
        while headers := await source.lease(self.step + 1):
            await self.train(lease, ledger, self.step + 1, [header.id for header in headers])
        await self.patiently(lambda: self.report(lease, runs.FINISHED))

    async def train(self, lease: RunLease, ledger: RowLedger, step: int, ids: list[str]) -> None:
        """In the order in which the trainer does it: publish, commit, report."""
        database = self.database
        await self.patiently(lambda: fetch_rows(database, ids))
        await self.patiently(lambda: policies.publish(database, step, step, "weights"))
        await self.patiently(lambda: services.acknowledge(database, SERVICE, step))
        await self.patiently(lambda: policies.serve(database, step))
        Versioned.version = step
        await self.patiently(lease.heartbeat)
        assert await self.patiently(lambda: ledger.commit(step, ids)) == len(ids)
        self.step = step
        await self.patiently(lambda: self.report(lease, runs.TRAINING))

    async def report(self, lease: RunLease, status: str) -> None:
        await lease.progress(step=self.step, max_steps=STEPS, version=self.step, status=status)

    async def patiently(self, operation: Callable[[], Any]) -> Any:
        return await retry_through_outages(operation, "a step of the test")


async def read_state(database: RunDatabase) -> RunState:
    run = await database.runs.find_one({})
    assert run is not None
    return RunState(
        run,
        *[
            await collection.find().to_list()
            for collection in (
                database.tasks, database.records, database.turns, database.rows,
                database.policy_versions,
            )
        ],
    )  # fmt: skip


def kill(members: ReplicaSet) -> None:
    """The primary, which comes back after a while."""
    primary = members.primary()
    primary.kill()
    members.primary()
    time.sleep(1.0)
    primary.start()


def step_down(members: ReplicaSet) -> None:
    members.step_down()
    members.primary()


@pytest.mark.slow
async def test_a_run_outlives_five_failed_primaries_and_nothing_is_lost_doubled_or_stale(
    tmp_path: Path,
) -> None:
    faults = [kill, step_down, kill, step_down, kill]
    with ReplicaSet(tmp_path) as members:
        databases = [await connect(members.url, "run") for _ in range(3)]
        lines = [TaskLine(id=f"t{n}", query=f"q{n}", scorer="exact_match") for n in range(GROUPS)]
        feeder = TaskFeeder(
            databases[0], lines, [], num_generations=ROLLOUTS, eval_rollouts=1, epochs=1,
            low_water=32, seed=1,
        )  # fmt: skip
        trainer = Trainer(databases[0], feeder)
        flags = config(
            "--max_staleness", str(MAX_STALENESS), "--max_concurrent_samples_per_process", "8"
        )

        async def sample(database: RunDatabase, owner: str) -> None:
            async with scheduler(database, Versioned, flags, owner=owner) as sampler:
                await sampler.run()

        async def disturb() -> None:
            for number, fault in enumerate(faults, start=1):
                while trainer.step < number * STEPS // (len(faults) + 1):
                    await asyncio.sleep(0.02)
                await asyncio.to_thread(fault, members)

        Versioned.version = 0
        work = [
            trainer.run(), disturb(),
            *(sample(database, f"s{n}") for n, database in enumerate(databases[1:])),
        ]  # fmt: skip
        async with asyncio.timeout(240), asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
        state = await read_state(databases[0])
        for database in databases:
            await database.close()
    assert violations(state, MAX_STALENESS, ROWS_PER_STEP) == []
    assert len(state.tasks) == GROUPS and trainer.step >= STEPS - 1
