"""What a Record held is freed when it ends: conversations are large, and looks for garbage rare."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from sampler_at_work import add, asks_once_and_answers, at_work
from scripted_run import completed, until
from stage import Stage

from agentrl.rollout.agents import register_agent
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.chat import Conversation
from agentrl.rollout.scheduling.attempt import Attempt


@pytest.fixture
def without_collector() -> Iterator[None]:
    """No garbage collection, and no garbage at its start."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def function(task: Any, llm: Any, tools: Any) -> str:
    """A user's agent that makes the calls that the model asks for."""
    messages = llm.task_messages()
    while True:
        reply = await llm.chat(messages, tools.schemas)
        if not reply.tool_calls:
            return str(reply.content)
        messages += [reply.message, *await tools.answer(reply)]


@pytest.mark.parametrize("agent", ["mcp", "function"])
@pytest.mark.usefixtures("without_collector")
async def test_a_record_that_ended_leaves_nothing_to_the_garbage_collector(
    stage: Stage, agent: str
) -> None:
    register_agent("function", function)
    stage.service.answer = asks_once_and_answers
    await add(stage.database, 3)
    async with at_work(stage, agent):
        await until(completed(stage.database, 3))
    kinds = (Attempt, AsyncSampler, Conversation)
    left = [type(each).__name__ for each in gc.get_objects() if isinstance(each, kinds)]
    assert left == []
