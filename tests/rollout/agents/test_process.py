"""The agents of one process: several kinds side by side, with what each shares opened once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest
from scripted_run import all_tasks, begin_run, completed, until
from stage import END, Stage, tool_call

from agentrl.configs import ConfigError
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Record, SlotStatus, Split
from agentrl.databases.feeder import make_tasks
from agentrl.databases.records import RecordLedger
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import TaskLedger
from agentrl.inference.pool import ServicePool
from agentrl.rollout.agents import find_agent, register_agent
from agentrl.rollout.agents.base import AsyncSampler, SamplerResources
from agentrl.rollout.agents.process import Agents
from agentrl.rollout.agents.single_turn import SingleTurnSampler
from agentrl.rollout.scheduling.scheduler import SamplingScheduler
from agentrl.rollout.tools.calls import ToolServerUnreachable


class Opening(SingleTurnSampler):
    """Says when its resources are opened and closed."""

    log: ClassVar[list[str]]

    @classmethod
    @asynccontextmanager
    async def extend_resources(cls, shared: SamplerResources) -> AsyncIterator[SamplerResources]:
        """Slow enough for several attempts to wait for it."""
        opened_in = asyncio.current_task()
        cls.log.append("open")
        await asyncio.sleep(0.05)
        yield shared
        assert asyncio.current_task() is opened_in  # which cancel scopes insist on
        cls.log.append("close")


@asynccontextmanager
async def process(stage: Stage, agent: str = "mcp") -> AsyncIterator[SamplingScheduler]:
    """A sampler process with `agent` for tasks that name none."""
    records = RecordLedger(stage.database, 60.0)
    async with (
        ServicePool() as pool,
        AsyncSampler.open_resources(stage.config, pool, records) as shared,
        Agents(shared, find_agent(agent)) as agents,
    ):
        yield SamplingScheduler(stage.database, stage.config, agents, "sampler")


async def add(database: RunDatabase, agents: list[str | None], attempts: int = 2) -> None:
    lines = [
        TaskLine(
            id=str(number), query=f"q{number}", answer="42", scorer="exact_match",
            answer_schema="answer", agent_name=agent,
        )
        for number, agent in enumerate(agents)
    ]  # fmt: skip
    ledger = TaskLedger(database, "feeder", lease_seconds=9, max_failures=1)
    await ledger.add(make_tasks(lines, Split.TRAIN, 0, attempts, range(len(lines))))


async def test_several_kinds_of_agents_work_in_one_run(stage: Stage) -> None:
    async def twice(task: Any, llm: Any, tools: Any) -> str:
        first = await llm.chat(llm.task_messages())
        messages = [*llm.task_messages(), first.message, {"role": "user", "content": "Sure?"}]
        return (await llm.chat(messages)).text

    class Loop:
        def __init__(self, server_manager: Any, tokenizer: Any) -> None:
            self.server_manager, self.tokenizer = server_manager, tokenizer

        async def run(self, sampling_params: dict[str, Any], raw_prompt: Any) -> Any:
            prompt = self.tokenizer.apply_chat_template(
                raw_prompt, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            output = await self.server_manager.generate(
                "one", prompt_ids=prompt, sampling_params=sampling_params
            )
            ids = output.token_ids
            return {"prompt_ids": prompt, "response_ids": ids, "response_mask": [1] * len(ids)}

    async def say(prompt: str) -> str:
        if "Tools: " in prompt and "B7" not in prompt:
            return tool_call("echo", '{"text": "B7"}') + END
        return f"<answer>42</answer>{END}"

    stage.service.answer = say
    stage.flags = ("--num_generations", "2", "--drop_zero_advantage", "false")
    Opening.log = []
    register_agent("twice", twice)
    register_agent("opening", Opening)
    register_agent("loop", Loop)
    kinds = [None, "single_turn", "twice", "opening", "loop", "math", "opening"]
    await add(stage.database, list(kinds))
    await begin_run(stage.database, service=stage.service.url)
    async with process(stage) as scheduler:
        running = asyncio.create_task(scheduler.run())
        await until(completed(stage.database, len(kinds)))
        scheduler.stop()
        await running
    assert Opening.log == ["open", "close"]
    turns = {"mcp": 2, "single_turn": 1, "twice": 2, "opening": 1, "loop": 1, "math": 1}
    found = [Record.from_mongo(record) async for record in stage.database.records.find()]
    assert len(found) == 2 * len(kinds)
    for record in found:
        assert record.agent_name == (kinds[int(record.task_id)] or "mcp")
        assert (record.n_turns, record.score) == (turns[record.agent_name], 1.0), record
    # All of them make rows of the same kind.
    rows = [row async for row in stage.database.rows.find()]
    assert {row["_id"] for row in rows} == {record.id for record in found}


async def test_tools_that_are_away_when_their_agent_is_first_asked_for_are_asked_for_again(
    stage: Stage, own_server: Any
) -> None:
    own_server.start()
    own_server.stop()
    stage.mcp_url, stage.lines = own_server.url, ["<answer>42</answer>"] * 2
    stage.flags = ("--num_generations", "2", "--startup_timeout", "0.2")
    await add(stage.database, ["mcp"])
    await begin_run(stage.database, service=stage.service.url)
    async with process(stage, "single_turn") as scheduler:
        running = asyncio.create_task(scheduler.run())

        async def handed_back() -> bool:
            return await stage.database.records.count_documents({"status": "failed"}) > 0

        await until(handed_back)
        await asyncio.to_thread(own_server.start)
        await until(completed(stage.database, 1))
        scheduler.stop()
        await running
    [task] = await all_tasks(stage.database)
    assert {(slot.status, slot.failures) for slot in task.slots} == {(SlotStatus.COMPLETED, 0)}


async def test_an_agent_that_this_process_does_not_know_ends_it(stage: Stage) -> None:
    stage.flags = ("--num_generations", "2")
    await add(stage.database, ["elsewhere"])
    await begin_run(stage.database, service=stage.service.url)
    async with process(stage, "single_turn") as scheduler:
        with pytest.raises(ConfigError, match="there is no agent 'elsewhere'"):
            await scheduler.run()
    [task] = await all_tasks(stage.database)
    assert (task.pending, [slot.failures for slot in task.slots]) == (2, [0, 0])


async def test_what_the_default_agent_shares_is_opened_before_anything_is_claimed(
    stage: Stage,
) -> None:
    stage.mcp_url = "http://127.0.0.1:1/mcp"
    stage.flags = ("--startup_timeout", "0.2")
    with pytest.raises(ToolServerUnreachable):
        async with process(stage):
            raise AssertionError("nothing can be claimed")


async def test_a_process_that_ends_does_not_wait_for_what_is_still_opening(stage: Stage) -> None:
    begun = asyncio.Event()

    class Endless(SingleTurnSampler):
        @classmethod
        @asynccontextmanager
        async def extend_resources(
            cls, shared: SamplerResources
        ) -> AsyncIterator[SamplerResources]:
            begun.set()
            await asyncio.Event().wait()
            yield shared

    register_agent("endless", Endless)
    stage.flags = ("--num_generations", "2", "--drain_seconds", "0")
    await add(stage.database, ["endless"])
    await begin_run(stage.database, service=stage.service.url)
    async with process(stage, "single_turn") as scheduler:
        running = asyncio.create_task(scheduler.run())
        await begun.wait()
        scheduler.stop()
        await running
    [task] = await all_tasks(stage.database)
    assert (task.pending, [slot.failures for slot in task.slots]) == (2, [0, 0])
