"""A model behind an OpenAI-compatible API: the demo's real tools, a scripted API over real HTTP.

`tests/launcher/test_evaluate.py` asks a server that others wrote.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest
from aiohttp import web
from openai import APIStatusError

from agentrl.configs import ConfigError, parse_config
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Record, RecordStatus
from agentrl.databases.evaluations import begin_evaluation
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.records import RecordLedger
from agentrl.databases.task_file import TaskLine
from agentrl.launcher.deployment import REPOSITORY
from agentrl.launcher.endpoint import await_endpoint, look_at_endpoint
from agentrl.launcher.evaluation import HeldOutFile
from agentrl.launcher.evaluations import TaskFileOf, tasks_done
from agentrl.rollout.llm import endpoint as endpoint_module
from agentrl.rollout.llm.endpoint import (
    ChatEndpoint,
    ContextFull,
    EndpointRefused,
    EndpointUnreachable,
)
from agentrl.rollout.llm.models import AgentModel
from agentrl.rollout.scheduling.breakers import WaitedLongEnough
from agentrl.rollout.scheduling.worker import sample
from agentrl.stop_signals import stop_signals

TOOLS = f"{REPOSITORY / 'assets' / 'demo' / 'warehouse_tools.py'}:server"


def says(content: str, *calls: tuple[str, str], finish: str | None = None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(calls)
        ]
    reason = finish or ("tool_calls" if calls else "stop")
    return {
        "id": "1", "object": "chat.completion", "created": 0, "model": "big",
        "choices": [{"index": 0, "finish_reason": reason, "message": message}],
        "usage": {"prompt_tokens": 50, "completion_tokens": 7, "total_tokens": 57},
    }  # fmt: skip


@dataclass
class Api:
    """Answers with what `reply` makes of a request; a number is the status of an error, and None
    hangs until `released`."""

    reply: Callable[[dict[str, Any]], dict[str, Any] | int | None]
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    error: str = "overloaded"
    down: bool = False
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.Response:
        if self.down:
            raise web.HTTPBadGateway
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        reply = self.reply(body)
        if reply is None:
            await self.released.wait()
        if isinstance(reply, int):
            told = {"error": {"message": self.error}}
            return web.json_response(told, status=reply, headers={"Retry-After": "0"})
        return web.json_response(reply)

    async def models(self, request: web.Request) -> web.Response:
        if self.down:
            raise web.HTTPBadGateway
        return web.json_response({"object": "list", "data": []})


@asynccontextmanager
async def api(reply: Callable[[dict[str, Any]], dict[str, Any] | int | None]) -> AsyncIterator[Api]:
    served = Api(reply)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", served.answer)
    app.router.add_get("/v1/models", served.models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield served
    await runner.cleanup()


def model_of(served: Api) -> AgentModel:
    return AgentModel(model="big", base_url=served.url, api_key="sesame", timeout=10)


async def evaluated(
    database: RunDatabase, mongod: EmbeddedMongod, served: Api, lines: list[TaskLine], *flags: str
) -> list[Record]:
    """Evaluate the API on tasks; returns the Records that ended well, in the tasks' order."""
    config = parse_config(
        ["--run_name", database.name, "--db_connection_string", mongod.url, "--max_turns", "4",
         "--mcp_manager_url", TOOLS, "--lease_seconds", "5", "--startup_timeout", "1", *flags]
    )  # fmt: skip
    epoch = await begin_evaluation(
        database, lines, model="big", model_digest="b", task_digest="t", rollouts=1, flags={},
        digests={}, again=False,
    )  # fmt: skip
    try:
        await asyncio.wait_for(sample(config, evaluation=epoch, endpoint=model_of(served)), 60)
    finally:
        for number in stop_signals():
            asyncio.get_running_loop().remove_signal_handler(number)
    found = database.records.find({"status": RecordStatus.SCORED}).sort("_id", 1)
    return [Record.from_mongo(document) async for document in found]


def line(name: str, **fields: Any) -> TaskLine:
    usual = {"query": "?", "answer": "46", "scorer": "exact_match", "answer_schema": "answer"}
    return TaskLine(id=name, **{**usual, **fields})


async def test_the_api_is_asked_with_openais_tools_and_its_turns_are_stored_without_tokens(
    database: RunDatabase, mongod: EmbeddedMongod
) -> None:
    failures = [503, 429]

    def reply(body: dict[str, Any]) -> dict[str, Any] | int:
        if failures:
            return failures.pop()
        if body["messages"][-1]["role"] == "user":
            return says("Look.", ("find", '{"item": "chain"}'), ("stock", '{"bin": '))
        found = body["messages"][-2]["content"]
        return says(f"<answer>{found}</answer>")

    async with api(reply) as served:
        [record] = await evaluated(
            database, mongod, served, [line("train-0000", answer="X5")], "--max_new_tokens", "99",
            "--preferred_sampling_params", '{"temperature": 0.5, "top_k": 20}',
            "--startup_timeout", "30",
        )  # fmt: skip
    first, second = served.requests[-2:]
    assert set(served.keys) == {"Bearer sesame"} and len(served.requests) == 4
    assert (first["model"], first["max_tokens"]) == ("big", 99)
    assert (first["temperature"], first["top_k"]) == (0.5, 20)
    offered = {tool["function"]["name"]: tool for tool in first["tools"]}
    assert set(offered) == {"find", "stock", "add", "sub"}
    assert offered["stock"]["function"]["parameters"]["properties"]["bin"]["type"] == "string"
    called, good, bad = second["messages"][1:]
    assert [call["id"] for call in called["tool_calls"]] == ["c0", "c1"]
    assert (good["tool_call_id"], bad["tool_call_id"]) == ("c0", "c1")
    assert good["content"] == "X5" and bad["content"].startswith("Error: the arguments")
    assert (record.final_answer, record.score) == ("X5", 1.0)
    assert (record.n_turns, record.n_tool_calls, record.n_tool_errors) == (2, 2, 1)
    assert record.tokens.generated == 14 and record.tokens.prompt == 50
    assert record.versions is None and record.turn_statuses == {"formaterror": 1, "completed": 1}
    turns = (await RecordLedger(database, 60).turns([record.id]))[record.id]
    assert all(not turn.output_ids and turn.service == served.url for turn in turns)
    assert (turns[0].output_text, turns[0].tool_calls[0].result) == ("Look.", "X5")


async def test_an_outage_of_the_api_costs_no_attempt(
    database: RunDatabase, mongod: EmbeddedMongod
) -> None:
    tasks = [line("a"), line("b")]
    file, told = TaskFileOf(HeldOutFile(Path("held.jsonl"), "t"), tasks), list[str]()
    async with api(lambda body: says("<answer>46</answer>")) as served:
        served.down = True

        async def come_back() -> None:
            while await database.records.find_one({"error": {"$regex": "^handed back"}}) is None:
                await asyncio.sleep(0.1)
            told.append(await tasks_done(database, file, -1))
            while await database.outages.find_one() is None:
                await asyncio.sleep(0.1)
            told.append(await tasks_done(database, file, -1))
            served.down = False

        back = asyncio.create_task(come_back())
        records = await evaluated(database, mongod, served, tasks, "--startup_timeout", "5")
        await back
        told.append(await tasks_done(database, file, -1))
    api_name = f"the endpoint {served.url}"
    assert re.match(r"0 of 2 tasks \| [12] begun again after an outage: handed back: ", told[0])
    assert f"{api_name} gives no answer of model big" in told[0]
    assert told[1].startswith(f"0 of 2 tasks | waiting for {api_name} since ")
    assert told[2] == "2 of 2 tasks"
    assert [record.score for record in records] == [1.0, 1.0]
    slots = [slot for task in await database.tasks.find().to_list() for slot in task["slots"]]
    assert all(slot["failures"] == 0 for slot in slots)
    assert sum(slot["outages"] for slot in slots) >= 1


async def test_agents_of_one_turn_and_limits_are_as_with_services(
    database: RunDatabase, mongod: EmbeddedMongod
) -> None:
    def reply(body: dict[str, Any]) -> dict[str, Any] | int:
        asked = body["messages"][0]["content"]
        if "boxed" in asked:
            return says(r"\boxed{46}")
        if "long" in asked:
            return says("so, first", finish="length")
        if "full" in asked:
            return 400
        return says("", ("find", '{"item": "chain"}'))

    tasks = [
        line("1", query="box", agent_name="math", answer_schema=None),
        line("2", query="long", agent_name="single_turn"),
        line("3", query="for ever"),
        line("4", query="full"),
    ]
    async with api(reply) as served:
        served.error = "This model's maximum context length is 10 tokens"
        records = await evaluated(database, mongod, served, tasks)
    ended = {record.task_id: (record.stop_reason, record.score) for record in records}
    assert ended == {
        "1": ("answered", 1.0), "2": ("max_new_tokens", 0.0), "3": ("max_turns", 0.0),
        "4": ("max_prompt_tokens", 0.0),
    }  # fmt: skip
    with_tools = {r["messages"][0]["content"] for r in served.requests if "tools" in r}
    assert with_tools == {"for ever", "full"}


async def test_what_an_api_answers_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    replies: list[dict[str, Any] | int] = []
    async with api(lambda body: replies.pop(0)) as served:

        async def ask(*given: dict[str, Any] | int, error: str = "no") -> Any:
            replies[:], served.error = given, error
            async with ChatEndpoint(model_of(served), {}, patience_s=0.7) as endpoint:
                return await endpoint.complete([{"role": "user", "content": "?"}], (), 5)

        assert (await ask(500, says("yes"))).content == "yes"
        with pytest.raises(EndpointUnreachable, match="gives no answer of model big") as slow:
            await ask(429, 429, 429)
        assert slow.value.for_now
        for status in (401, 402, 403, 404):
            with pytest.raises(EndpointUnreachable) as refused:
                await ask(status, status)  # the second request is another one
            assert refused.value.denied and not refused.value.for_now
            with pytest.raises(EndpointRefused, match="refuses the request"):
                await ask(status, says("yes"))
            with pytest.raises(EndpointRefused, match="refuses the request"):
                await ask(status, 503, status, says("yes"))  # whether all are denied shows later
        with pytest.raises(ContextFull):
            await ask(400, error="context_length_exceeded")
        with pytest.raises(EndpointRefused, match="refuses the request"):
            await ask(400, error="no such parameter")
        served.requests.clear()
        other = "Unsupported parameter: use 'max_completion_tokens' instead"
        assert (await ask(400, says("so"), error=other)).content == "so"
        assert [sorted(r)[0] for r in served.requests] == ["max_tokens", "max_completion_tokens"]
        with pytest.raises(EndpointUnreachable):
            await ask(*[{"object": "error"}] * 5)
        # A router's way to hand on an overload; any other answer would be one of eight.
        handed_on = {"error": {"code": 503, "message": "no provider has room"}}
        monkeypatch.setattr(endpoint_module, "_MOST_FAILURES", 1)
        assert (await ask(handed_on, says("yes"))).content == "yes"
    began = time.monotonic()
    with pytest.raises(EndpointUnreachable):
        async with ChatEndpoint(model_of(served), {}, patience_s=0.7) as endpoint:
            await endpoint.complete([{"role": "user", "content": "?"}], (), 5)
    assert time.monotonic() - began < 30


def test_a_pause_that_an_api_asks_for_is_a_number_or_a_date() -> None:
    def pause(asked: str) -> float:
        request = httpx2.Request("POST", "http://api/")
        answer = httpx2.Response(429, headers={"Retry-After": asked}, request=request)
        return endpoint_module._asked_pause(APIStatusError("", response=answer, body=None))

    in_ten_s = format_datetime(datetime.now(UTC) + timedelta(seconds=10), usegmt=True)
    assert 5 < pause(in_ten_s) <= 10
    assert [pause(asked) for asked in ("7", "-1", "nan", "soon", "9999")] == [7, 0, 0, 0, 30]


def no_turn(body: dict[str, Any]) -> bool:
    """Whether a request is about what a router moderates."""
    return any("moderated" in str(message["content"]) for message in body["messages"])


async def failed_alone(database: RunDatabase, records: list[Record]) -> dict[str, Any]:
    """The slot of task `b`, which has failed, while task `a` has ended well."""
    assert [record.task_id for record in records] == ["a"]
    task = await database.tasks.find_one({"task_id": "b"})
    assert task is not None
    [slot] = task["slots"]
    assert (slot["status"], slot["failures"], slot["outages"]) == ("failed", 2, 0)
    return dict(slot)


async def test_a_prompt_that_never_gets_a_completion_fails_alone(
    database: RunDatabase, mongod: EmbeddedMongod
) -> None:
    nothing = {"choices": [{"index": 0, "finish_reason": "stop", "message": None}]}

    def reply(body: dict[str, Any]) -> dict[str, Any] | int:
        return nothing if no_turn(body) else says("<answer>46</answer>")

    lines = [line("a"), line("b", query="moderated")]
    async with api(reply) as served:
        records = await evaluated(database, mongod, served, lines, "--max_failures", "2")
    slot = await failed_alone(database, records)
    assert "EndpointRefused" in slot["error"] and "has no message" in slot["error"]


@pytest.mark.parametrize("status", [500, 429, 403])
async def test_a_prompt_that_is_refused_time_and_again_fails_alone(
    status: int, database: RunDatabase, mongod: EmbeddedMongod
) -> None:
    lines = [line("a"), line("b", query="moderated")]
    async with api(lambda body: status if no_turn(body) else says("<answer>46</answer>")) as served:
        records = await evaluated(database, mongod, served, lines, "--max_failures", "2")
    slot = await failed_alone(database, records)
    assert f"Error code: {status}" in slot["error"]
    assert sum(map(no_turn, served.requests)) < 20


async def test_a_prompt_has_its_failures_and_in_an_overload_the_whole_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint_module, "_LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(endpoint_module, "_FIRST_PAUSE_S", 0.01)
    answers: dict[str, int | None] = {"moderated": 500}
    async with (
        api(lambda body: answers["moderated"] if no_turn(body) else says("yes")) as served,
        ChatEndpoint(model_of(served), {}, patience_s=60) as patient,
        ChatEndpoint(model_of(served), {}, patience_s=1) as hasty,
    ):
        asked: list[dict[str, Any]] = [{"role": "user", "content": "moderated"}]
        with pytest.raises(EndpointRefused, match=r"answers others, but this request 8 times"):
            await patient.complete(asked, (), 5)
        answers["moderated"] = 429
        began = time.monotonic()
        with pytest.raises(EndpointRefused, match="Error code: 429"):
            await hasty.complete(asked, (), 5)
        assert time.monotonic() - began > 0.9
        assert sum(map(no_turn, served.requests)) > 16
        answers["moderated"] = None
        model = model_of(served).model_copy(update={"timeout": 0.2})
        async with ChatEndpoint(model, {}, patience_s=60) as short:
            with pytest.raises(EndpointRefused, match="8 times with APITimeoutError"):
                await short.complete(asked, (), 5)
        served.released.set()


async def test_an_outage_that_follows_answers_to_others_stays_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint_module, "_LONGEST_PAUSE_S", 0.05)
    replies: list[dict[str, Any] | int] = [says("yes"), *[502] * 100]
    async with (
        api(lambda body: replies.pop(0)) as served,
        ChatEndpoint(model_of(served), {}, patience_s=2) as endpoint,
    ):
        question: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
        assert (await endpoint.complete(question, (), 5)).content == "yes"
        with pytest.raises(EndpointUnreachable, match="502"):
            await endpoint.complete(question, (), 5)
    assert len(served.requests) > 10


async def test_an_api_that_answers_nothing_with_a_completion_is_away() -> None:
    async with (
        api(lambda body: {"choices": []}) as served,
        ChatEndpoint(model_of(served), {}, patience_s=0.7) as endpoint,
    ):
        with pytest.raises(EndpointUnreachable, match="it has no choices"):
            await endpoint.complete([{"role": "user", "content": "?"}], (), 5)
    assert served.requests[-1]["messages"] == [{"role": "user", "content": "Hello"}]


async def test_calls_of_other_forms_are_made_and_others_are_format_errors(
    database: RunDatabase, mongod: EmbeddedMongod
) -> None:
    function = {"name": "find", "arguments": {"item": "chain"}}
    messages = {
        "untyped": {"tool_calls": [{"id": None, "function": function}] * 2},
        "older": {"function_call": function},
        "custom": {"tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "x"}}]},
        "parts": {"content": [{"type": "text", "text": "<answer>found</answer>"}]},
    }

    def reply(body: dict[str, Any]) -> dict[str, Any] | int:
        asked, last = body["messages"][0], body["messages"][-1]
        if last["role"] == "tool":
            failed = last["content"].startswith("Error: ")
            return says(f"<answer>{last['content'] if failed else 'found'}</answer>")
        made = says("")
        made["choices"][0]["message"] = {"content": None, **messages[asked["content"]]}
        return {**made, "usage": {"prompt_tokens": None}}

    tasks = [line(name, query=name, answer="found") for name in messages]
    async with api(reply) as served:
        records = await evaluated(database, mongod, served, tasks)
    ended = {record.task_id: record for record in records}
    assert {name: ended[name].score for name in messages} == {
        "untyped": 1.0, "older": 1.0, "custom": 0.0, "parts": 1.0,
    }  # fmt: skip
    assert ended["custom"].turn_statuses == {"formaterror": 1, "completed": 1}
    assert str(ended["custom"].final_answer).startswith("Error: a tool call must have")
    sent = [r["messages"][1] for r in served.requests if len(r["messages"]) > 2]
    ids = sorted([call["id"] for call in message["tool_calls"]] for message in sent)
    assert ids == [["c"], ["call_0_0"], ["call_0_0", "call_0_1"]]


@pytest.mark.parametrize("status", [401, 402, 403, 404, 500])
async def test_an_api_that_refuses_all_from_now_on_ends_the_evaluation_which_then_goes_on(
    status: int, database: RunDatabase, mongod: EmbeddedMongod
) -> None:
    """The list of models is served all the while: it tells nothing."""
    answered = 2

    def reply(body: dict[str, Any]) -> dict[str, Any] | int:
        asks = len(served.requests) <= answered or mended
        return says("<answer>46</answer>") if asks else status

    mended, tasks = False, [line(f"{n}") for n in range(6)]
    flags = ("--startup_timeout", "2", "--max_concurrent_samples_per_process", "2")
    async with api(reply) as served:
        with pytest.raises(WaitedLongEnough) as ended:
            await evaluated(database, mongod, served, tasks, *flags)
        waited = "waited 2 s: " if status == 500 else ""
        told = f"{waited}the endpoint {served.url} gives no answer of model big: "
        assert str(ended.value).startswith(told) and str(status) in str(ended.value)
        assert len(served.requests) < 30
        slots = [slot for task in await database.tasks.find().to_list() for slot in task["slots"]]
        assert sorted(slot["status"] for slot in slots) == ["completed"] * 2 + ["pending"] * 4
        assert all(slot["failures"] == 0 for slot in slots)
        assert await database.outages.find_one() is None, "nobody waits any more"
        mended = True
        served.requests.clear()
        records = await evaluated(database, mongod, served, tasks, *flags)
    assert len(served.requests) == 4, "what was answered stays"
    assert [record.score for record in records] == [1.0] * 6


async def test_an_api_that_cannot_answer_yet_is_waited_for_before_its_first_task() -> None:
    replies: list[int] = [500] * 100
    told: list[str] = []
    async with api(lambda body: replies.pop() if replies else says("yes")) as served:
        with pytest.raises(ConfigError, match=r"--endpoint: .* Error code: 500"):
            await await_endpoint(model_of(served), 4.0, told.append)
        assert len(served.requests) < 15
        [line] = told
        assert line.startswith(f"--endpoint is waited for, 4 s at most: the endpoint {served.url}")
        del replies[5:]  # more than the first look takes
        await await_endpoint(model_of(served), 60.0, told.append)
        assert len(told) == 2 and not replies


async def test_an_api_that_is_not_needed_is_not_waited_for() -> None:
    """As where all is evaluated already."""
    async with api(lambda body: 500) as served:
        told = await asyncio.to_thread(look_at_endpoint, model_of(served), 60.0)
        assert told is not None and told.startswith("--endpoint is waited for when it is needed: ")
    async with api(lambda body: says("yes")) as served:
        assert await asyncio.to_thread(look_at_endpoint, model_of(served), 60.0) is None


async def test_an_api_that_never_answers_is_told_at_the_start() -> None:
    async with api(lambda body: None) as served:
        patient = model_of(served).model_copy(update={"timeout": 600})
        try:
            with pytest.raises(ConfigError, match="APITimeoutError"):
                async with asyncio.timeout(60):
                    await await_endpoint(patient, 1.0, print)
        finally:
            served.released.set()
