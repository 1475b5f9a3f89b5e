"""Tools over a real MCP server that does all that a server should not."""

import asyncio
import json
import os
import signal
import time
from typing import Any

import pytest
from aiohttp import web
from tool_session import a_task, session_with, tools_of

from agentrl.rollout.tools import session as session_module
from agentrl.rollout.tools.calls import ToolServerUnreachable
from agentrl.rollout.tools.connection import ConnectFailed
from agentrl.rollout.tools.results import ToolAnswer


async def test_the_listed_tools_are_function_schemas(hostile_server: Any) -> None:
    async with tools_of(hostile_server.url) as box:
        echo = next(tool for tool in box.schemas if tool["function"]["name"] == "echo")
    assert echo["type"] == "function"
    assert echo["function"]["description"] == "The text itself."
    assert echo["function"]["parameters"]["properties"]["text"]["type"] == "string"


async def test_a_call_tells_the_server_which_task_and_record_it_serves(hostile_server: Any) -> None:
    async with tools_of(hostile_server.url) as box:

        async def whoami(i: int) -> ToolAnswer:
            async with box.session(a_task(f"task-{i}"), f"record-{i}") as session:
                return await session.call("whoami", {})

        answers = await asyncio.gather(*(whoami(i) for i in range(8)))
    assert [json.loads(answer.text) for answer in answers] == [
        {"agentrl/record_id": f"record-{i}", "agentrl/task_id": f"task-{i}"} for i in range(8)
    ]


async def test_any_number_of_calls_may_wait_for_their_tools_at_once(hostile_server: Any) -> None:
    async with session_with(hostile_server.url, tool_timeout=60) as session:
        answers = await asyncio.gather(*(session.call("meet", {"n": 120}) for _ in range(120)))
    assert {answer.text for answer in answers} == {"met"}


@pytest.mark.parametrize(
    ("tool", "arguments", "text"),
    [
        ("fail", {"reason": "no such bin"}, "no such bin"),
        ("echo", {"texts": "a"}, "text"),
        ("echo", {"text": [1]}, "text"),
        ("nonsense", {}, "There is no tool 'nonsense'. Tools: big, die, echo"),
        ("hang", {"seconds": 60}, "did not answer within 0.5 s"),
        ("garbage", {"kind": "no json"}, "failed"),
        ("garbage", {"kind": "no result"}, "gave an answer that cannot be read"),
        ("garbage", {"kind": "no envelope"}, "failed"),
        ("garbage", {"kind": "html"}, "failed"),
        ("garbage", {"kind": "cut off"}, "failed"),
        ("garbage", {"kind": "surrogate"}, "failed"),
        ("garbage", {"kind": "empty error"}, "gave no reason"),
    ],
)
async def test_every_failure_is_a_text_for_the_model_and_the_next_call_works(
    hostile_server: Any, tool: str, arguments: dict[str, Any], text: str
) -> None:
    read = {"tool_timeout": 0.5, "on_tool_outage": "text"}
    async with session_with(hostile_server.url, **read) as session:
        answer = await session.call(tool, arguments)
        assert answer.is_error
        assert text in answer.text
        after = await session.call("echo", {"text": "still here"})
        assert (after.text, after.is_error) == ("still here", False)


async def test_a_failing_call_does_not_disturb_those_beside_it(hostile_server: Any) -> None:
    async with session_with(hostile_server.url, tool_timeout=5, on_tool_outage="text") as session:
        slow = asyncio.create_task(session.call("hang", {"seconds": 0.5}))
        await asyncio.sleep(0.1)
        kinds = ("cut off", "no json", "html")
        bad = await asyncio.gather(*(session.call("garbage", {"kind": kind}) for kind in kinds))
        assert all(answer.is_error for answer in bad)
        assert (await slow).text == "slept"


async def test_a_cancelled_call_leaves_the_connection_usable(hostile_server: Any) -> None:
    async with session_with(hostile_server.url) as session:
        slow = asyncio.create_task(session.call("hang", {"seconds": 60}))
        await asyncio.sleep(0.1)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        assert (await session.call("echo", {"text": "a"})).text == "a"


@pytest.mark.parametrize("flags", [(), ("--sessions",)])
async def test_a_dead_server_costs_calls_until_it_is_back(
    own_server: Any, flags: tuple[str, ...]
) -> None:
    own_server.flags = flags
    own_server.start()
    async with session_with(own_server.url, tool_timeout=5, on_tool_outage="text") as session:
        died = await session.call("die", {})
        assert died.is_error
        await asyncio.to_thread(own_server.wait_for_its_end)
        refused = await session.call("echo", {"text": "a"})
        assert refused.is_error
        assert "attempts failed" in refused.text or "cannot be reached" in refused.text
        await asyncio.to_thread(own_server.start)
        answers = await asyncio.gather(*(session.call("echo", {"text": str(i)}) for i in range(8)))
        assert [answer.text for answer in answers] == [str(i) for i in range(8)]


async def test_the_bearer_token_is_sent_and_a_wrong_one_is_refused_at_once(own_server: Any) -> None:
    own_server.flags = ("--token", "secret")
    own_server.start()
    async with session_with(own_server.url, mcp_auth_token="secret") as session:
        assert (await session.call("echo", {"text": "a"})).text == "a"
    for token in (None, "guess"):
        began = time.monotonic()
        with pytest.raises(ToolServerUnreachable, match=r"HTTP 401.*--mcp_auth_token"):
            async with tools_of(own_server.url, mcp_auth_token=token, startup_timeout_s=30):
                pass
        assert time.monotonic() - began < 10


async def test_an_unreachable_server_is_one_sentence_with_url_and_time(own_server: Any) -> None:
    own_server.start()
    own_server.stop()
    with pytest.raises(ToolServerUnreachable) as caught:
        async with tools_of(own_server.url, startup_timeout_s=0.6):
            pass
    assert own_server.url in str(caught.value)
    assert "tried for 0." in str(caught.value)
    assert caught.value.__cause__ is None


async def test_a_server_that_takes_connections_and_never_answers_is_unreachable() -> None:
    hung_up = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hung_up.wait()
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}/mcp"
    async with asyncio.timeout(10):
        with pytest.raises(ToolServerUnreachable, match=url):
            async with tools_of(url, startup_timeout_s=0.5):
                pass
    hung_up.set()
    silent.close()


async def test_entering_waits_for_a_server_that_is_still_starting(own_server: Any) -> None:
    own_server.start()
    own_server.stop()
    starting = asyncio.create_task(asyncio.to_thread(own_server.start))
    async with tools_of(own_server.url, startup_timeout_s=30) as box:
        assert box.schemas
    await starting


@pytest.mark.parametrize("flags", [(), ("--sessions",)])
async def test_a_call_that_met_a_dead_server_is_an_outage_and_no_answer(
    own_server: Any, flags: tuple[str, ...]
) -> None:
    own_server.flags = flags
    own_server.start()
    async with session_with(own_server.url, tool_timeout=5) as session:
        waiting = asyncio.create_task(session.call("hang", {"seconds": 60}))
        await asyncio.sleep(0.2)
        own_server.stop()
        for call in (waiting, session.call("echo", {"text": "a"})):
            with pytest.raises(ToolServerUnreachable, match=own_server.url) as met:
                await call
            assert met.value.dependency == f"the tool server {own_server.url}"
            with pytest.raises(ConnectFailed):  # it is asked whether it answers again: not yet
                await met.value.probe()
        await asyncio.to_thread(own_server.start)
        await met.value.probe()
        assert (await session.call("echo", {"text": "a"})).text == "a"


async def test_a_call_out_of_time_is_the_tools_fault_unless_the_server_is_silent_too(
    own_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "_SIGN_OF_LIFE_S", 1.0)
    own_server.start()
    async with session_with(own_server.url, tool_timeout=0.5) as session:
        slow = await session.call("hang", {"seconds": 60})
        assert (slow.text, slow.is_error) == ("The tool hang did not answer within 0.5 s.", True)
        os.kill(own_server.pid, signal.SIGSTOP)
        with pytest.raises(ToolServerUnreachable, match=r"did not answer within 0.5 s"):
            await session.call("echo", {"text": "a"})
        os.kill(own_server.pid, signal.SIGCONT)
        assert (await session.call("echo", {"text": "a"})).text == "a"


@pytest.mark.parametrize(("names_the_call", "calls"), [(True, 1), (False, 2)])
async def test_a_call_is_sent_again_only_where_the_session_is_gone_and_not_the_call_refused(
    names_the_call: bool, calls: int
) -> None:
    """HTTP 400 with the word "session" is both: of a tool, and of servers that forgot theirs."""
    sessions: list[str] = []
    called: list[str] = []

    def answer(message: Any) -> Any:
        match message["method"]:
            case "initialize":
                sessions.append(f"session-{len(sessions)}")
                capabilities = {"capabilities": {"tools": {}}}
                info = {"serverInfo": {"name": "shop", "version": "1"}}
                return {"protocolVersion": "2025-06-18", **capabilities, **info}
            case "tools/list":
                return {"tools": [{"name": "buy", "inputSchema": {"type": "object"}}]}
            case "tools/call":
                called.append(sessions[-1])
                return {"content": [{"type": "text", "text": "bought"}]}
            case _:
                return None

    async def mcp(request: web.Request) -> web.Response:
        message = await request.json()
        if "id" not in message:
            return web.Response(status=202)
        if message["method"] == "server/discover":
            error = {"code": -32601, "message": "unknown"}
            return web.json_response({"jsonrpc": "2.0", "id": message["id"], "error": error})
        result = answer(message)
        if message["method"] == "tools/call" and len(called) == 1:
            error = {"code": -32000, "message": "Bad Request: no valid session"}
            request_id = message["id"] if names_the_call else None
            told = {"jsonrpc": "2.0", "id": request_id, "error": error}
            return web.json_response(told, status=400)
        return web.json_response(
            {"jsonrpc": "2.0", "id": message["id"], "result": result},
            headers={"mcp-session-id": sessions[-1]},
        )

    app = web.Application()
    app.add_routes([web.post("/mcp", mcp)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with session_with(f"http://127.0.0.1:{port}/mcp") as tools:
            bought = await tools.call("buy", {})
        assert len(called) == calls
        assert bought.is_error == names_the_call
    finally:
        await runner.cleanup()
