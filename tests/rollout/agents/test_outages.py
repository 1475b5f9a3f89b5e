"""What becomes of attempts whose tools, services or models are out of reach, in a real sampler."""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from chat_endpoint import chat_endpoint
from scripted_run import all_tasks, begin_run, completed, until
from stage import END, Stage, tool_call

from agentrl import InfrastructureFailure
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import HANDED_BACK, Record, SlotStatus, Split
from agentrl.databases.feeder import make_tasks
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.outages import current
from agentrl.databases.records import RecordLedger
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import TaskLedger
from agentrl.inference.pool import ServicePool
from agentrl.rollout.agents import find_agent, register_agent
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.agents.process import Agents
from agentrl.rollout.llm import client as llm_client
from agentrl.rollout.scheduling import attempt
from agentrl.rollout.scheduling.scheduler import SamplingScheduler

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
    ):
        scheduler = SamplingScheduler(stage.database, stage.config, agents, "sampler")
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


async def waited_for(database: RunDatabase) -> list[str]:
    return [outage.dependency for outage in await current(database)]


def waiting_for(database: RunDatabase, *dependencies: str) -> Callable[[], Awaitable[bool]]:
    async def condition() -> bool:
        return await waited_for(database) == list(dependencies)

    return condition


async def test_a_server_that_is_killed_and_comes_back_costs_nothing_but_time(
    stage: Stage, own_server: Any
) -> None:
    own_server.start()
    stage.mcp_url = own_server.url
    asked = 0

    async def answer(prompt: str) -> str:
        nonlocal asked
        asked += 1
        if asked == 12:
            os.kill(own_server.pid, signal.SIGKILL)
        if "Tools: " in prompt and "B7" not in prompt:
            return ECHO + END
        return f"<answer>42</answer>{END}"

    stage.service.answer = answer
    await add(stage.database, 12)
    async with at_work(stage, "mcp", "--max_concurrent_samples_per_process", "8"):
        await until(waiting_for(stage.database, f"the tool server {own_server.url}"))
        [outage] = await current(stage.database)
        assert re.fullmatch(
            rf"waiting for the tool server {own_server.url} since \d\d:\d\d:\d\d \(\d+ s\), "
            "last error: .+",
            outage.sentence(datetime.now(UTC)),
        )
        begun = await stage.database.records.count_documents({})
        done = await stage.database.tasks.count_documents({"status": "completed"})
        await add(stage.database, 3, "single_turn")  # they need no tools
        await until(completed(stage.database, done + 3))
        await asyncio.sleep(1.5)
        assert await stage.database.records.count_documents({}) == begun + 6
        await asyncio.to_thread(own_server.start)
        await until(completed(stage.database, 15))
        await until(waiting_for(stage.database))
    await assert_all_is_well(stage.database)


async def test_a_judge_that_answers_500_costs_no_trajectory_and_keeps_no_other_task_waiting(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm_client, "_RETRY_PAUSE_S", 0.01)
    stage.service.answer = answers_at_once
    async with chat_endpoint() as endpoint:
        replies = endpoint.replies["a"] = [500] * 10_000
        models = {"scorer_agent": [{"model": "a", "base_url": endpoint.url, "retries": 1}]}
        (tmp_path / "agents.yml").write_text(yaml.safe_dump(models))
        await add(stage.database, 8, scorer="agentcpm")
        flags = ("--agent_config_path", str(tmp_path / "agents.yml"),
                 "--max_concurrent_samples_per_process", "4")  # fmt: skip
        async with at_work(stage, "single_turn", *flags):
            await until(waiting_for(stage.database, "the judge"))
            sampled = await stage.database.records.count_documents({})
            await add(stage.database, 3)
            await until(completed(stage.database, 3))
            assert await stage.database.records.count_documents({}) == sampled + 6 < 22
            replies[:] = ["JUDGEMENT: right"] * 1000
            await until(completed(stage.database, 11), 40)
            await until(waiting_for(stage.database))
    records = await records_of(stage.database)
    assert len(records) == 22  # none was sampled twice
    assert {record.score for record in records} == {1.0}


async def test_a_reward_service_that_is_away_is_waited_for_and_its_trajectories_are_kept(
    stage: Stage, tmp_path: Path
) -> None:
    async def score(request: web.Request) -> web.Response:
        return web.json_response({"score": 1.0})

    async def serve(port: int = 0) -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/reward", score)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        return runner

    service = await serve()
    port = service.addresses[0][1]
    url = f"http://127.0.0.1:{port}/reward"
    models = {"http_scorer": {"url": url, "retries": 0}}
    (tmp_path / "agents.yml").write_text(yaml.safe_dump(models))
    stage.service.answer = answers_at_once
    await add(stage.database, 2, scorer="http")
    async with at_work(stage, "single_turn", "--agent_config_path", str(tmp_path / "agents.yml")):
        await until(completed(stage.database, 2))
        await service.cleanup()
        await add(stage.database, 2, scorer="http")
        await until(waiting_for(stage.database, f"the reward service {url}"))
        await add(stage.database, 2)
        await until(completed(stage.database, 4))
        service = await serve(port)
        await until(completed(stage.database, 6), 40)
        await until(waiting_for(stage.database))
    await service.cleanup()
    records = await records_of(stage.database)
    assert [record.score for record in records] == [1.0] * 12


async def test_a_record_that_its_reward_service_cannot_answer_is_quarantined_and_harms_no_other(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "FREE_OUTAGES", 2)
    monkeypatch.setattr(attempt, "MOST_OUTAGES", 6)  # the others may be done before
    monkeypatch.setattr("agentrl.databases.retries.LONGEST_PAUSE_S", 1.0)

    async def score(request: web.Request) -> web.Response:
        body = await request.json()
        if body["question"] == "poison0":
            return web.Response(status=500, text="KeyError")
        return web.json_response({"score": 1.0})

    app = web.Application()
    app.router.add_post("/reward", score)
    service = web.AppRunner(app, shutdown_timeout=0.1)
    await service.setup()
    await web.TCPSite(service, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{service.addresses[0][1]}/reward"
    models = {"http_scorer": {"url": url, "retries": 0}}
    (tmp_path / "agents.yml").write_text(yaml.safe_dump(models))
    stage.service.answer = answers_at_once
    await add(stage.database, 1, scorer="http", query="poison")
    flags = ("--agent_config_path", str(tmp_path / "agents.yml"), "--max_scoring_failures", "1")
    async with at_work(stage, "single_turn", *flags):
        await until(n_outages(stage.database, 2))
        await add(stage.database, 5, scorer="http")
        await until(completed(stage.database, 6), 40)
    await service.cleanup()
    poison, *others = await all_tasks(stage.database)
    assert {slot.status for slot in poison.slots} == {SlotStatus.QUARANTINED}
    slots = [slot for task in others for slot in task.slots]
    assert {(slot.status, slot.scorings) for slot in slots} == {(SlotStatus.COMPLETED, 0)}


def n_outages(database: RunDatabase, n: int) -> Callable[[], Awaitable[bool]]:
    """So many scorings of the first task have come to nothing."""

    async def condition() -> bool:
        task = (await all_tasks(database))[0]
        return sum(slot.scorings for slot in task.slots) >= n

    return condition


async def test_a_database_that_stands_still_is_waited_for(
    stage: Stage, mongod: EmbeddedMongod
) -> None:
    assert mongod.pid is not None
    stopped = asyncio.Event()

    async def answer(prompt: str) -> str:
        if len(stage.service.outputs) == 5 and not stopped.is_set():
            stopped.set()
            os.kill(mongod.pid or 0, signal.SIGSTOP)
        return await answers_at_once(prompt)

    stage.service.answer = answer
    await add(stage.database, 10)
    async with at_work(stage, "single_turn", "--max_concurrent_samples_per_process", "3"):
        await stopped.wait()
        await asyncio.sleep(4)
        os.kill(mongod.pid, signal.SIGCONT)
        await until(completed(stage.database, 10))
    slots = [slot for task in await all_tasks(stage.database) for slot in task.slots]
    assert {(slot.status, slot.attempt, slot.failures) for slot in slots} == {
        (SlotStatus.COMPLETED, 0, 0)
    }


async def test_services_that_are_down_are_waited_for_and_nothing_is_claimed_meanwhile(
    stage: Stage,
) -> None:
    stage.service.answer = answers_at_once
    await add(stage.database, 2)
    async with at_work(stage, "single_turn"):
        await until(completed(stage.database, 2))
        await stage.service.stop()
        await add(stage.database, 1)
        await until(waiting_for(stage.database, "inference"))
        begun = await stage.database.records.count_documents({})
        await add(stage.database, 9)
        await asyncio.sleep(1.5)
        assert await stage.database.records.count_documents({}) == begun
        await stage.service.start()
        await until(completed(stage.database, 12))
        await until(waiting_for(stage.database))


async def test_a_task_that_takes_its_server_down_every_time_is_failed_and_harms_no_other(
    stage: Stage, own_server: Any
) -> None:
    own_server.start()
    stage.mcp_url = own_server.url
    n_deaths = 0

    async def answer(prompt: str) -> str:
        if "poison" in prompt:
            return tool_call("die", "{}") + END  # at once: no other comes to its end meanwhile
        if "slept" in prompt:
            return f"<answer>42</answer>{END}"
        return tool_call("hang", '{"seconds": 0.5}') + END

    async def restart_for_ever() -> None:
        nonlocal n_deaths
        while True:
            await asyncio.to_thread(own_server.wait_for_its_end, 60)
            n_deaths += 1
            await asyncio.to_thread(own_server.start)

    stage.service.answer = answer
    await add(stage.database, 1, query="poison")
    await add(stage.database, 8)
    keeper = asyncio.create_task(restart_for_ever())
    async with at_work(stage, "mcp", "--max_concurrent_samples_per_process", "32"):
        await until(completed(stage.database, 9), 60)
    keeper.cancel()
    poison, *others = await all_tasks(stage.database)
    assert {slot.status for slot in poison.slots} == {SlotStatus.FAILED}
    assert all("takes the tool server" in str(slot.error) for slot in poison.slots)
    slots = [slot for task in others for slot in task.slots]
    assert {(slot.status, slot.failures) for slot in slots} == {(SlotStatus.COMPLETED, 0)}
    assert n_deaths <= 8


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
