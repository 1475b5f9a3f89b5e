"""A sampler's process ends when it is told to, and only then, whatever its agents do."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from scripted_run import add, all_tasks, begin_run, completed, until

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import SlotStatus
from agentrl.databases.mongod import EmbeddedMongod

PROGRAM = Path(__file__).with_name("stubborn_process.py")


@asynccontextmanager
async def sampling(
    database: RunDatabase, mongod: EmbeddedMongod, agent: str
) -> AsyncIterator["subprocess.Popen[str]"]:
    """A sampler process whose agent has begun."""
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), mongod.url, database.name, agent],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "begun\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("agent", "where"),
    [("Swallows", "go_on"), ("Blocks", "go_on"), ("LeavesThread", "wait")],
)
async def test_an_agent_that_does_not_stop_is_named_when_its_process_ends(
    database: RunDatabase, mongod: EmbeddedMongod, agent: str, where: str
) -> None:
    await add(database, 1)
    await begin_run(database)
    async with sampling(database, mongod, agent) as process:
        process.send_signal(signal.SIGTERM)
        _, said = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 0
    (line,) = [line for line in said.splitlines() if "had not stopped" in line]
    assert f"({where}, {PROGRAM}:" in line
    if agent != "Blocks":  # whose slot is taken from the dead
        (task,) = await all_tasks(database)
        assert (task.slots[0].status, task.slots[0].failures) == (SlotStatus.PENDING, 0)


async def test_a_task_of_an_agents_that_exits_is_its_agents_error(
    database: RunDatabase, mongod: EmbeddedMongod
) -> None:
    await add(database, 1)
    await begin_run(database)
    async with sampling(database, mongod, "ExitsInTask") as process:
        await until(completed(database, 1), 60)
        process.send_signal(signal.SIGTERM)
        _, said = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 0 and "had not stopped" not in said
    (task,) = await all_tasks(database)
    assert [slot.status for slot in task.slots] == [SlotStatus.FAILED, SlotStatus.COMPLETED]
    error = task.slots[0].error
    assert error is not None
    assert error.startswith("RuntimeError: agent 'ExitsInTask' called sys.exit(3)")
