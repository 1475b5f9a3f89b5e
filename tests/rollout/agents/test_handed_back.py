"""An attempt that meets an outage is handed back, whatever its agent makes of the exception."""

import asyncio
from typing import Any

import pytest
from sampler_at_work import (
    ECHO,
    add,
    asks_once_and_answers,
    assert_all_is_well,
    at_work,
    records_of,
)
from scripted_run import all_tasks, completed, until
from stage import END, Stage

from agentrl import InfrastructureFailure
from agentrl.databases.documents import HANDED_BACK
from agentrl.rollout.agents import register_agent


async def stubborn(task: Any, llm: Any, tools: Any) -> str:
    """Takes every exception for an answer, and never gives up."""
    messages = llm.task_messages()
    while True:
        try:
            reply = await llm.chat(messages, tools.schemas)
            if not reply.tool_calls:
                return reply.content
            messages += [reply.message, *await tools.answer(reply)]
        except Exception as error:
            messages.append({"role": "user", "content": f"B7, for want of {error}"})


@pytest.mark.parametrize("agent", ["mcp", "stubborn"])
async def test_an_attempt_whose_tools_are_away_is_handed_back_whatever_its_agent_makes_of_that(
    stage: Stage, own_server: Any, agent: str
) -> None:
    register_agent("stubborn", stubborn)
    own_server.start()
    stage.mcp_url, stage.service.answer = own_server.url, asks_once_and_answers
    await add(stage.database, 3)
    async with at_work(stage, agent):
        await until(completed(stage.database, 3))
        own_server.stop()
        await add(stage.database, 3, agent)

        async def some_handed_back() -> bool:
            return await stage.database.records.count_documents({"status": "failed"}) >= 3

        await until(some_handed_back)
        assert await completed(stage.database, 3)()
        await asyncio.to_thread(own_server.start)
        await until(completed(stage.database, 6))
    errors = {record.error for record in await records_of(stage.database) if record.error}
    assert all(
        error.startswith(f"{HANDED_BACK}the tool server {own_server.url}") for error in errors
    )
    await assert_all_is_well(stage.database)


async def test_a_model_may_be_told_of_an_outage_instead(stage: Stage, own_server: Any) -> None:
    own_server.start()
    stage.mcp_url = own_server.url

    async def asks_once(prompt: str) -> str:
        own_server.stop()
        return f"<answer>42</answer>{END}" if "attempts failed" in prompt else ECHO + END

    stage.service.answer = asks_once
    await add(stage.database, 1)
    async with at_work(stage, "mcp", "--on_tool_outage", "text"):
        await until(completed(stage.database, 1))
    assert [record.score for record in await records_of(stage.database)] == [1.0, 1.0]


async def test_what_an_agents_own_code_calls_an_outage_is_handed_back_too(stage: Stage) -> None:
    away = True

    async def needs_an_index(task: Any, llm: Any, tools: Any) -> str:
        if away:
            raise InfrastructureFailure("the index is being built", dependency="the index")
        return str((await llm.chat(llm.task_messages())).text)

    register_agent("indexed", needs_an_index)
    stage.service.answer = asks_once_and_answers
    await add(stage.database, 1)
    async with at_work(stage, "indexed"):

        async def handed_back() -> bool:
            return await stage.database.records.count_documents({"status": "failed"}) > 0

        await until(handed_back)
        away = False
        await until(completed(stage.database, 1))
    [task] = await all_tasks(stage.database)
    assert [slot.failures for slot in task.slots] == [0, 0]
