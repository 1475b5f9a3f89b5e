"""A rollout that causes its outages itself: it is given up, and harms no other."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from sampler_at_work import ECHO, add, answers_at_once, at_work
from scripted_run import all_tasks, completed, until
from stage import END, Stage, tool_call

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import SlotStatus
from agentrl.rollout.scheduling import attempt


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


async def test_a_task_that_takes_its_server_down_every_time_is_failed_and_harms_no_other(
    stage: Stage, own_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "FREE_OUTAGES", 1)
    own_server.start()
    stage.mcp_url = own_server.url

    async def answer(prompt: str) -> str:
        if "poison" in prompt:
            await asyncio.sleep(0.5)  # the others come to their end meanwhile
            return tool_call("die", "{}") + END
        return (f"<answer>42</answer>{END}") if "B7" in prompt else ECHO + END

    async def restart_for_ever() -> None:
        while True:
            await asyncio.to_thread(own_server.wait_for_its_end, 60)
            await asyncio.to_thread(own_server.start)

    stage.service.answer = answer
    await add(stage.database, 1, query="poison")
    await add(stage.database, 30)
    keeper = asyncio.create_task(restart_for_ever())
    flags = ("--max_failures", "1", "--max_concurrent_samples_per_process", "4")
    async with at_work(stage, "mcp", *flags):
        await until(completed(stage.database, 31), 60)
    keeper.cancel()
    poison, *others = await all_tasks(stage.database)
    assert {slot.status for slot in poison.slots} == {SlotStatus.FAILED}
    assert all(slot.outages >= 1 and slot.failures == 1 for slot in poison.slots)
    slots = [slot for task in others for slot in task.slots]
    assert {(slot.status, slot.failures) for slot in slots} == {(SlotStatus.COMPLETED, 0)}
