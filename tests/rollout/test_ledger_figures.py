"""The figures of the ledger, against what the collections of a sampled run hold."""

import asyncio
import time
from collections import Counter
from typing import Any

import pytest
from exposed_samples import Samples
from pymongo.errors import AutoReconnect
from scripted_run import ScriptedAgent, add, begin_run, config, scheduler, until

from agentrl.databases import outages
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Record, RowStatus, Split, TaskStatus
from agentrl.databases.ledger_counts import ENDED
from agentrl.databases.outages import OpenBreaker
from agentrl.databases.step_metrics import keep_metrics
from agentrl.databases.tasks import TaskLedger
from agentrl.launcher.ledger_figures import LedgerFigures


class Mixed(ScriptedAgent):
    """Fails at rollout 0; rollout 1 is right, and others are wrong."""

    script = staticmethod(lambda claim: float(claim.rollout == 1))

    async def run(self) -> Record:
        if self.claim.rollout == 0:
            raise LookupError("the agent has a bug")
        return await super().run()


async def look(figures: LedgerFigures) -> Samples:
    await figures.refresh()
    return Samples.of(figures)


async def statuses(collection: Any) -> Counter[str]:
    return Counter([document["status"] async for document in collection.find({}, {"status": 1})])


async def test_tasks_records_rows_and_failures_are_those_of_the_collections(
    database: RunDatabase,
) -> None:
    figures = LedgerFigures(database)
    await add(database, 3, rollouts=3)
    await add(database, 2, split=Split.EVAL)
    lease = await begin_run(database)
    async with scheduler(database, Mixed, config("--num_generations", "3")) as sampler:
        running = asyncio.create_task(sampler.run())

        async def ended() -> bool:
            done = {"status": TaskStatus.COMPLETED}
            return await database.tasks.count_documents(done) == 5

        await until(ended)
        sampler.stop()
        await asyncio.wait_for(running, 20)
    await add(database, 1, epoch=1)
    await TaskLedger(database, "gone", lease_seconds=-1, max_failures=1).claim(
        Split.TRAIN, count=1, admission_limit=2**40
    )
    now = await look(figures)

    assert now("agentrl_ledger_up") == 1 and now("agentrl_ledger_read_seconds") > 0
    tasks = {
        split: Counter([task["status"] async for task in database.tasks.find({"split": split})])
        for split in Split
    }
    assert tasks[Split.TRAIN] == {"completed": 3, "running": 1}
    for split in Split:
        for status in TaskStatus:
            found = now("agentrl_ledger_tasks", split=split, status=status)
            assert found == tasks[split][status]
    assert now.by("agentrl_ledger_slots", "status") == {"leased": 1, "pending": 1}
    assert now("agentrl_ledger_expired_leases") == 1
    assert now.by("agentrl_ledger_rows", "status") == await statuses(database.rows) != {}

    records = await statuses(database.records)
    ended_ones = sum(records.pop(status, 0) for status in ("scored", "ready", "abandoned"))
    assert now.by("agentrl_ledger_records", "status") == {**records, ENDED: ended_ones}
    assert now("agentrl_ledger_ended_attempts") == records.total() + ended_ones
    failed = now.by("agentrl_ledger_failed_attempts", "raised")
    assert failed == {"LookupError": records["failed"]}

    assert now("agentrl_ledger_run_status", status="training") == 1
    assert now("agentrl_ledger_max_steps") == 9
    assert now("agentrl_ledger_service_weight_version", service="http://127.0.0.1:1") == 0
    assert abs(now("agentrl_ledger_last_step_timestamp_seconds") - time.time()) < 60
    later = time.time() + 1000
    await keep_metrics(database, lease.fence, 1, {"time": later})
    await keep_metrics(database, lease.fence - 1, 7, {"time": later + 9})  # of a trainer before
    figures = LedgerFigures(database)
    assert (await look(figures))("agentrl_ledger_last_step_timestamp_seconds") == later


async def test_quarantine_and_outages_are_shown_by_kind_and_dependency(
    database: RunDatabase,
) -> None:
    await database.rows.insert_one({"_id": "r", "status": RowStatus.QUARANTINED})
    waits = [OpenBreaker("the judge at http://user:secret@judge/", 30.0, "no route")]
    await outages.report(database, "sampler", waits)
    now = await look(LedgerFigures(database))
    assert now.by("agentrl_ledger_quarantined", "kind") == {"row": 1}
    waited = now("agentrl_ledger_outage_seconds", dependency="the judge at http://***@judge/")
    assert 30 <= waited < 60


async def test_without_a_database_the_figures_say_so_and_come_back(
    database: RunDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*arguments: object) -> None:
        raise AutoReconnect("gone")

    figures = LedgerFigures(database)
    with monkeypatch.context() as away:
        away.setattr("agentrl.launcher.ledger_figures.load_run", fails)
        gone = await look(figures)
    assert gone("agentrl_ledger_up") == 0 and gone.names == {"agentrl_ledger_up"}

    async def is_back() -> bool:
        return (await look(figures))("agentrl_ledger_up") == 1

    await until(is_back)


async def test_the_ledger_is_read_for_a_small_share_of_the_time(database: RunDatabase) -> None:
    figures = LedgerFigures(database)
    await figures.refresh()
    before = Samples.of(figures)("agentrl_ledger_read_seconds")
    await figures.refresh()  # at once: the last look is shown
    assert Samples.of(figures)("agentrl_ledger_read_seconds") == before
    await asyncio.sleep(25 * before)
    await figures.refresh()
    assert Samples.of(figures)("agentrl_ledger_read_seconds") != before
