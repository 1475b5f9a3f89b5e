"""Programs from outside: they ask a gateway for tasks, and the gateway may be killed."""

import asyncio
import json
import signal
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from answering_service import AnsweringService
from exposed_samples import Samples
from outside_run import CLIENTS, OutsideRun, outside_run
from scripted_run import until

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import TaskStatus
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.rollout.chat import ChatRenderer

pytestmark = pytest.mark.timeout(300)
END = "<|im_end|>"


@pytest.fixture
async def run(
    database: RunDatabase, mongod: EmbeddedMongod, demo_renderer: ChatRenderer, tmp_path: Path
) -> AsyncIterator[OutsideRun]:
    said = iter(range(10_000))

    async def answer(prompt: str) -> str:
        return f"answer {next(said)}{END}"

    async with AnsweringService(demo_renderer, answer).running() as service:
        flags = (
            "--session_idle", "60", "--lease_seconds", "20", "--max_staleness", "9",
            "--metrics_port", "0", "--output_dir", str(tmp_path / "run"),
        )  # fmt: skip
        log = tmp_path / "gateway.log"
        async with outside_run(database, mongod.url, service, log, *flags) as run:
            yield run


async def _has_figures_of(run: OutsideRun) -> None:
    """One session is open, the other was finished after a turn and a reward."""
    [target] = json.loads((run.log.parent / "run.metrics_targets.json").read_text())
    assert target["labels"]["process"] == "gateway"
    url = f"http://{target['targets'][0]}/metrics"

    async def figures_now() -> Samples:
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            return Samples(await response.text())

    async def one_is_open() -> bool:
        figures = await figures_now()
        n_attempts = figures("agentrl_attempts", step="sample")
        return figures("agentrl_gateway_sessions") == n_attempts == 1

    await until(one_is_open)  # the finished one is scored, and then leaves
    figures = await figures_now()
    assert figures("agentrl_gateway_waiting_clients") == 0
    for route in ("/v1/chat/completions", "/reward", "/finish"):
        assert figures("agentrl_gateway_requests_total", route=route, status="200") == 1
    assert figures.total("agentrl_turns_total") == 1


def client(run: OutsideRun, claimed: dict[str, Any], retries: int = 0) -> openai.AsyncOpenAI:
    base_url = f"{run.url}{claimed['path']}/v1"
    return openai.AsyncOpenAI(base_url=base_url, api_key=claimed["key"], max_retries=retries)


async def ask(run: OutsideRun, claimed: dict[str, Any], messages: list[Any], **more: Any) -> str:
    """One turn, which is added to the messages."""
    chat = client(run, claimed, more.pop("retries", 0)).chat.completions
    message = (await chat.create(model="m", messages=messages, **more)).choices[0].message
    messages.append({"role": "assistant", "content": message.content})
    return str(message.content)


async def test_tasks_are_claimed_by_demand_worked_on_and_scored(run: OutsideRun) -> None:
    await run.start()
    held = await run.database.tasks.count_documents({"slots.status": "leased"})
    assert held == 0  # nobody has asked
    status, first = await run.claim()
    assert status == 200 and first["split"] == "train"
    assert first["base_url"] == f"{run.url}{first['path']}/v1"
    question = first["task"]["query"]
    messages: list[Any] = [{"role": "user", "content": question}]
    assert await ask(run, first, messages) == "answer 0"
    told = {"reward": 0.25, "rewards": {"planner": 1.0, "turn 0": 0.5}, "explanation": "a quarter"}
    assert (await run.post(f"{first['path']}/reward", told, first["key"]))[0] == 200
    [stored] = await run.records()  # before the attempt is over
    assert stored.scores == {"reward": 0.25, "planner": 1.0, "turn 0": 0.5}
    assert (await run.post(f"{first['path']}/finish", {}, first["key"]))[0] == 200
    # The other rollout of the group, without a reward of its own: its task's scorer decides.
    status, second = await run.claim(task_id=first["task"]["id"])
    assert (status, second["task"]) == (200, first["task"]) and second["key"] != first["key"]
    await _has_figures_of(run)
    await ask(run, second, [{"role": "user", "content": question}])
    done = {"answer": first["task"]["answer"]}
    assert (await run.post(f"{second['path']}/finish", done, second["key"]))[0] == 200

    async def finalised() -> bool:
        done = await run.database.tasks.count_documents({"status": TaskStatus.COMPLETED})
        return done == 1 and await run.database.rows.count_documents({}) == 2

    await until(finalised, 60)
    one, two = await run.records()
    assert {one.score, two.score} == {0.25, 1.0} and one.agent_name == "outside"
    [task] = [task for task in await run.tasks() if task.status == TaskStatus.COMPLETED]
    assert [slot.status for slot in task.slots] == ["completed"] * 2
    status, refused = await run.post(f"{first['path']}/reward", {"reward": 1}, first["key"])
    assert status == 410 and "has ended" in refused["error"]["message"]
    status, _ = await run.post(f"{first['path']}/reward", {"reward": 1}, "sk-x.y")
    assert status == 401
    assert (await run.claim(timeout=0.5, task_id="no such line"))[0] == 204
    waiting = asyncio.create_task(run.claim(task_id="no such line"))
    await asyncio.sleep(0.5)
    await run.finish()
    status, over = await waiting
    assert status == 410 and over["error"]["code"] == "run_finished"
    assert (await run.claim())[0] == 410  # it says so for a while
    assert await run.until_ended() == 0


async def test_a_killed_gateway_comes_back_with_its_sessions(run: OutsideRun) -> None:
    await run.start()
    _, claimed = await run.claim()
    messages: list[Any] = [{"role": "user", "content": claimed["task"]["query"]}]
    first = await ask(run, claimed, messages)
    told = {"reward": 0.5}
    await run.post(f"{claimed['path']}/reward", told, claimed["key"])
    await run.end(signal.SIGKILL)
    messages.append({"role": "user", "content": "Go on."})
    going_on = asyncio.create_task(ask(run, claimed, messages, retries=40))  # while it is away
    await asyncio.sleep(0.5)
    await run.start()
    assert await going_on == "answer 1"
    # The answer from before the crash, to who did not get it: no new tokens.
    retry = {"x-stainless-retry-count": "1"}
    assert await ask(run, claimed, messages[:1], extra_headers=retry) == first
    assert len(run.service.outputs) == 2
    await run.end(signal.SIGTERM)  # which leaves the sessions as they are, too
    await run.start()
    messages.append({"role": "user", "content": "And then?"})
    assert await ask(run, claimed, messages, retries=5) == "answer 2"
    assert (await run.post(f"{claimed['path']}/finish", {}, claimed["key"]))[0] == 200

    async def scored() -> bool:
        return [record.status for record in await run.records()] == ["scored"]

    await until(scored, 60)
    [record] = await run.records()
    assert (record.attempt, record.n_turns, record.score) == (0, 3, 0.5)
    assert record.n_segments == 1 and record.tokens.generated == sum(map(len, run.service.outputs))
    turns = [turn async for turn in run.database.turns.find().sort("turn", 1)]
    assert [turn["output_text"] for turn in turns] == ["answer 0", "answer 1", "answer 2"]


@pytest.mark.slow
async def test_a_silent_client_loses_its_session_and_the_slot_goes_back(run: OutsideRun) -> None:
    run.flags += ("--session_idle", "4")
    await run.start()
    _, claimed = await run.claim(task_id="bin 1")
    await ask(run, claimed, [{"role": "user", "content": "?"}])

    async def lost() -> bool:
        return await run.database.tasks.count_documents({"slots.losses": 1}) == 1

    await until(lost, 60)
    [record] = await run.records()
    assert "--session_idle" in str(record.error)
    [task] = [task for task in await run.tasks() if task.task_id == "bin 1"]
    slot = next(slot for slot in task.slots if slot.losses)
    assert (slot.status, slot.attempt, slot.failures, slot.losses) == ("pending", 1, 0, 1)
    status, refused = await run.post(f"{claimed['path']}/finish", {}, claimed["key"])
    assert status == 410 and "others have it by now" in refused["error"]["message"]
    _, again = await run.claim(task_id="bin 1")
    assert again["session"] != claimed["session"]
    # One that has its reward is finished, not lost.
    await ask(run, again, [{"role": "user", "content": "?"}])
    await run.post(f"{again['path']}/reward", {"reward": 1.0}, again["key"])

    async def scored() -> bool:
        return await run.database.records.count_documents({"status": "scored"}) == 1

    await until(scored, 60)


@pytest.mark.slow
async def test_harnesses_for_areal_and_uni_agent_work_as_they_are(run: OutsideRun) -> None:
    run.environment, run.flags = {"GATEWAY": "admin-key"}, (
        *run.flags, "--gateway_key_env", "GATEWAY",
    )  # fmt: skip
    await run.start()
    start: dict[str, Any] = {"task_id": "bin 2", "group_size": 2}
    too_many = {**start, "group_size": 300_000}
    status, refused = await run.post("/rl/start_session", too_many, "admin-key")
    assert status == 400 and "group_size" in refused["error"]["message"]
    assert (await run.post("/rl/start_session", start, "wrong"))[0] == 401
    assert (await run.claim())[0] == 401
    status, begun = await run.post("/rl/start_session", start, "admin-key")
    assert status == 201 and begun["group_id"] == "bin 2"
    keys = [session["session_api_key"] for session in begun["sessions"]]
    assert len({session["session_id"] for session in begun["sessions"]}) == 2
    for number, key in enumerate(keys):
        # AReaL's harnesses have the gateway itself as their base URL; the key tells the session.
        chat = openai.AsyncOpenAI(base_url=run.url, api_key=key, max_retries=0).chat.completions
        status, refused = await run.post("/rl/set_reward", {"reward": 1.0}, key)
        assert status == 400 and "No interactions" in refused["error"]["message"]
        first = await chat.create(model="m", messages=[{"role": "user", "content": "a"}])
        await chat.create(model="m", messages=[{"role": "user", "content": "b"}])
        told: dict[str, Any] = {"interaction_id": first.id, "reward": 0.5}
        assert (await run.post("/rl/set_reward", told, key))[1] == {"message": "success"}
        for told in (
            {"interaction_id": "chatcmpl-9", "reward": 0.5},
            {"interaction_id": 5, "reward": 1},
            {"rewards": "abc"},
            {"rewards": [1]},
        ):
            assert (await run.post("/rl/set_reward", told, key))[0] == 400
        assert (await run.post("/rl/set_reward", {"reward": float(number)}, key))[0] == 200
        status, ended = await run.post("/rl/end_session", {}, key)
        assert (status, ended) == (200, {"message": "success", "interaction_count": 2})

    async def scored() -> bool:
        return await run.database.rows.count_documents({}) == 2

    await until(scored, 60)
    records = await run.records()
    assert sorted(float(record.score or 0) for record in records) == [0.0, 1.0]
    assert all(record.scores["turn 0"] == 0.5 for record in records)
    # uni-agent's runners show no key: a session's URL is all that they have.
    _, claimed = await run.post("/tasks/claim", {}, "admin-key")
    base = f"/sessions/{claimed['key']}"
    asked = {"model": "m", "messages": [{"role": "user", "content": "c"}]}
    status, answer = await run.post(f"{base}/v1/chat/completions", asked)
    assert status == 200 and answer["choices"][0]["message"]["content"].startswith("answer")
    told = {"reward_info": {"reward": 1.0, "finished": True}}
    assert (await run.post(f"{base}/reward_info", told))[0] == 200
    assert (await run.post(f"/sessions/{claimed['session']}/reward_info", told))[0] == 401


LAPTOP = """
import agentrl_client as agentrl
from openai import OpenAI

for number, task in enumerate(agentrl.tasks()):
    try:
        with agentrl.session(task) as s:
            model = OpenAI(base_url=s.base_url, api_key=s.api_key, max_retries=s.max_retries)
            messages = [{"role": "user", "content": task.query}]
            said = model.chat.completions.create(model="m", messages=messages)
            assert number != 1, "the second one fails"
            s.reward(float("answer" in said.choices[0].message.content))
    except AssertionError as error:
        print(error)
print("the run is finished")
"""


@pytest.mark.slow
async def test_a_loop_on_another_machine_works_until_the_run_is_finished(
    run: OutsideRun, tmp_path: Path
) -> None:
    await run.start()
    script = tmp_path / "laptop.py"
    script.write_text(LAPTOP)
    environment = {"AGENTRL_GATEWAY_URL": run.url, "PYTHONPATH": str(CLIENTS), "PATH": "/usr/bin"}
    laptop = await asyncio.create_subprocess_exec(
        sys.executable, str(script), env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip

    async def all_done() -> bool:
        done = {"status": TaskStatus.COMPLETED}
        return await run.database.tasks.count_documents(done) == 4

    await until(all_done, 120)
    await run.finish()
    out, err = await asyncio.wait_for(laptop.communicate(), 60)
    assert laptop.returncode == 0, err.decode()
    assert out.decode() == "the second one fails\nthe run is finished\n"
    failed = [record for record in await run.records() if record.status == "failed"]
    assert [record.error for record in failed] and "the second one fails" in str(failed[0].error)


def test_the_client_needs_no_more_than_two_packages() -> None:
    project = tomllib.loads((CLIENTS / "pyproject.toml").read_text())["project"]
    assert [need.split(">")[0] for need in project["dependencies"]] == ["httpx2", "pydantic"]
    heavy = {"torch", "transformers", "pymongo", "agentrl", "aiohttp", "numpy"}
    code = f"import sys, agentrl_client; print(sorted({heavy!r} & set(sys.modules)))"
    environment = {"PYTHONPATH": str(CLIENTS)}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert shown.stdout.decode() == "[]\n", shown.stderr.decode()
