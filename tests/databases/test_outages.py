"""What samplers say that they wait for, and what is not claimed meanwhile, on a real mongod."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

from replica_set import ReplicaSet

from agentrl.databases import outages
from agentrl.databases.connection import RunDatabase, connect
from agentrl.databases.documents import Split
from agentrl.databases.feeder import make_tasks
from agentrl.databases.outages import OpenBreaker
from agentrl.databases.task_choice import ALL_TASKS, TaskChoice
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import TaskLedger


async def test_what_several_samplers_wait_for_is_said_once_since_the_first_of_them(
    database: RunDatabase,
) -> None:
    judge = OpenBreaker("the judge", 5, "$status 500")
    tools = OpenBreaker("the tool server sql", 60, "refused")
    await outages.report(database, "first", [judge])
    await outages.report(database, "second", [tools, OpenBreaker("the judge", 2, "status 503")])
    now = datetime.now(UTC)
    found = await outages.current(database)
    assert [(o.dependency, o.samplers, o.error) for o in found] == [
        ("the tool server sql", 1, "refused"), ("the judge", 2, "$status 500"),
    ]  # fmt: skip
    for outage, seconds in zip(found, (60, 5), strict=True):
        assert timedelta(seconds=seconds - 2) < now - outage.since < timedelta(seconds=seconds + 5)
    assert (
        found[0]
        .sentence(found[0].since + timedelta(seconds=61))
        .endswith("(61 s), last error: refused")
    )
    await outages.report(database, "second", [])
    assert [outage.dependency for outage in await outages.current(database)] == ["the judge"]


async def test_an_error_of_any_length_and_with_half_characters_is_reported(
    database: RunDatabase,
) -> None:
    error = "500 \udc80 " + 17_000_000 * "x"
    await outages.report(database, "sampler", [OpenBreaker("the judge \ud83d", 5, error)])
    [found] = await outages.current(database)
    assert found.dependency == "the judge \ufffd"
    assert found.error.startswith("500 \ufffd xxx") and len(found.error.encode()) <= 2000


async def test_what_a_sampler_waited_for_that_is_gone_is_not_waited_for(
    database: RunDatabase,
) -> None:
    await outages.report(database, "dead", [OpenBreaker("the judge", 5, "status 500")])
    ago = datetime.now(UTC) - timedelta(minutes=1)
    await database.outages.update_one({"_id": "dead"}, {"$set": {"heartbeat": ago}})
    assert await outages.current(database) == []


async def test_the_server_removes_what_samplers_left_that_were_killed(tmp_path: Path) -> None:
    members = ReplicaSet(tmp_path, members=1)
    members.members[0].options = ["--setParameter", "ttlMonitorSleepSecs=1"]  # not a minute
    with members:
        database = await connect(members.url, "run")
        for sampler in ("dead", "alive"):
            await outages.report(database, sampler, [OpenBreaker("the judge", 5, "status 500")])
        ago = datetime.now(UTC) - timedelta(hours=1)
        await database.outages.update_one({"_id": "dead"}, {"$set": {"heartbeat": ago}})
        async with asyncio.timeout(60):
            while await database.outages.count_documents({}) == 2:
                await asyncio.sleep(0.1)
        assert [document["_id"] async for document in database.outages.find()] == ["alive"]
        await database.close()


async def test_tasks_that_need_what_is_out_of_reach_are_passed_over(database: RunDatabase) -> None:
    kinds = [
        ("mcp", "math"), (None, "math"), ("math", "0.5*agentcpm + 0.5*f1"), ("math", "f1"),
    ]  # fmt: skip
    lines = [
        TaskLine(id=str(i), query="?", agent_name=agent, scorer=scorer)
        for i, (agent, scorer) in enumerate(kinds)
    ]
    ledger = TaskLedger(database, "sampler", lease_seconds=30, max_failures=2)
    await ledger.add(make_tasks(lines, Split.TRAIN, 0, 1, range(4)))
    needing = TaskChoice(frozenset({"mcp", None}), frozenset({"agentcpm"}))
    assert await ledger.claim(Split.TRAIN, without=needing | ALL_TASKS) == []
    [claim] = await ledger.claim(Split.TRAIN, without=needing)
    assert claim.task.task_id == "3"
    assert await ledger.claim(Split.TRAIN, without=needing) == []
    [claim] = await ledger.claim(Split.TRAIN, without=TaskChoice(frozenset({"mcp"})))
    assert claim.task.task_id == "1"
    await ledger.release(claim, outage=True)
    [again] = await ledger.claim(Split.TRAIN, without=TaskChoice(frozenset({"mcp"})))
    assert (again.task.task_id, again.outages, again.failures) == ("1", 1, 0)
