"""What becomes of a sampler's work while tools, scorers, services or the database are away."""

import asyncio
import os
import re
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from chat_endpoint import chat_endpoint
from sampler_at_work import (
    ECHO,
    add,
    answers_at_once,
    assert_all_is_well,
    at_work,
    records_of,
    waiting_for,
)
from scripted_run import all_tasks, completed, until
from stage import END, Stage

from agentrl.databases.documents import SlotStatus
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.outages import current
from agentrl.rollout.llm import client as llm_client


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
