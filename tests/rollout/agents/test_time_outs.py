"""An agent that takes too long, or says so: no outage, but a failure of the agent's own."""

import asyncio
import contextlib
from typing import Any

import pytest
from sampler_at_work import add, at_work
from scripted_run import all_tasks, completed, until
from stage import Stage

from agentrl.rollout.agents import register_agent
from agentrl.rollout.scheduling import attempt


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ((), "TimeoutError: the shop was closed (at slow, "),
        (("--record_timeout", "0.2"), "TimeoutError: not finished within --record_timeout 0.2 s"),
    ],
)
async def test_an_agents_own_time_out_keeps_its_words(
    stage: Stage, flags: tuple[str, ...], error: str
) -> None:
    async def slow(task: Any, llm: Any, tools: Any) -> str:
        if flags:
            await asyncio.sleep(60)
        raise TimeoutError("the shop was closed")

    register_agent("slow", slow)
    await add(stage.database, 1)
    async with at_work(stage, "slow", "--resample_error_records", "false", *flags):
        await until(completed(stage.database, 1))
    [task] = await all_tasks(stage.database)
    assert all(slot.error is not None and slot.error.startswith(error) for slot in task.slots)


async def test_an_agent_that_will_not_be_cancelled_is_left_behind(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stubborn(task: Any, llm: Any, tools: Any) -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)  # until the test's loop ends
        return "late"

    monkeypatch.setattr(attempt, "LET_GO_S", 0.2)
    register_agent("stubborn", stubborn)
    await add(stage.database, 1)
    flags = ("--resample_error_records", "false", "--record_timeout", "0.2")
    async with at_work(stage, "stubborn", *flags):
        await until(completed(stage.database, 1))
    [task] = await all_tasks(stage.database)
    limit = "TimeoutError: not finished within --record_timeout 0.2 s"
    assert {slot.error for slot in task.slots} == {limit}
