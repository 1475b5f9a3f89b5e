"""A sampler process at work on a stage, and what its outages leave behind."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from scripted_run import all_tasks, begin_run
from stage import END, Stage, tool_call

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Record, SlotStatus, Split
from agentrl.databases.feeder import make_tasks
from agentrl.databases.outages import current
from agentrl.databases.records import RecordLedger
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import TaskLedger
from agentrl.inference.pool import ServicePool
from agentrl.rollout.agents import find_agent
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.agents.process import Agents
from agentrl.rollout.scheduling.scheduler import SamplingScheduler
from agentrl.rollout.traces.tracing import open_tracing

ECHO = tool_call("echo", '{"text": "B7"}')


async def add(
    database: RunDatabase,
    n: int,
    agent: str | None = None,
    *,
    scorer: str = "exact_match",
    query: str = "q",
) -> None:
    """Tasks with two rollouts each, as an epoch of their own."""
    epoch = await database.tasks.count_documents({})
    lines = [
        TaskLine(
            id=f"{agent}-{scorer}-{number}", query=f"{query}{number}", answer="42", scorer=scorer,
            answer_schema="answer", agent_name=agent,
        )
        for number in range(n)
    ]  # fmt: skip
    ledger = TaskLedger(database, "feeder", lease_seconds=9, max_failures=1)
    await ledger.add(make_tasks(lines, Split.TRAIN, epoch, 2, range(n)))


@asynccontextmanager
async def at_work(stage: Stage, agent: str, *flags: str) -> AsyncIterator["asyncio.Task[None]"]:
    """A sampler process with `agent` for tasks that name none, at work."""
    stage.flags = ("--num_generations", "2", "--drop_zero_advantage", "false", *flags)
    await begin_run(stage.database, service=stage.service.url)
    records = RecordLedger(stage.database, 60.0)
    async with (
        ServicePool() as pool,
        AsyncSampler.open_resources(stage.config, pool, records) as shared,
        Agents(shared, find_agent(agent)) as agents,
        open_tracing(stage.config, stage.config.run.run_name) as tracing,
    ):
        scheduler = SamplingScheduler(
            stage.database, stage.config, agents, "sampler", tracing=tracing
        )
        running = asyncio.create_task(scheduler.run())
        try:
            yield running
        finally:
            scheduler.stop()
            scheduler.stop()  # a test that failed waits for nothing
            await running


async def records_of(database: RunDatabase) -> list[Record]:
    return [Record.from_mongo(record) async for record in database.records.find()]


async def asks_once_and_answers(prompt: str) -> str:
    return (f"<answer>42</answer>{END}") if "B7" in prompt else ECHO + END


async def answers_at_once(prompt: str) -> str:
    return f"<answer>42</answer>{END}"


async def assert_all_is_well(database: RunDatabase) -> None:
    """Nothing failed, and no row holds a call that was not answered."""
    slots = [slot for task in await all_tasks(database) for slot in task.slots]
    assert {(slot.status, slot.failures) for slot in slots} == {(SlotStatus.COMPLETED, 0)}
    trained = [row["_id"] async for row in database.rows.find({}, {"_id": 1})]
    assert len(trained) == len(slots)
    async for turn in database.turns.find({"record_id": {"$in": trained}}):
        for call in turn["tool_calls"]:
            assert (call["result"], call["is_error"]) == ("B7", False)


async def waited_for(database: RunDatabase) -> list[str]:
    return [outage.dependency for outage in await current(database)]


def waiting_for(database: RunDatabase, *dependencies: str) -> Callable[[], Awaitable[bool]]:
    async def condition() -> bool:
        return await waited_for(database) == list(dependencies)

    return condition
