"""Calls to servers without sessions, over what may stand between."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp_types.version import LATEST_MODERN_VERSION
from ports import free_port
from starlette.types import ASGIApp, Receive, Scope, Send
from tool_session import config_file, session_with

from agentrl.rollout.tools.calls import ToolServerUnreachable

Between = Callable[[Scope, Send, dict[str, str], ASGIApp], Awaitable[bool]]


@asynccontextmanager
async def serving(
    between: Between, *, events: bool = False
) -> AsyncIterator[tuple[str, list[str]]]:
    """A server and the names of its calls. `between` may answer a request in its place."""
    server = MCPServer("tools", log_level="CRITICAL")
    calls: list[str] = []

    @server.tool(structured_output=False)
    async def echo(text: str, ctx: Context) -> str:
        """The text itself."""
        calls.append(text)
        await ctx.report_progress(0.5, 1.0)
        return text

    inner = server.streamable_http_app(host="127.0.0.1", json_response=not events)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = {k.decode(): v.decode() for k, v in scope.get("headers", ())}
        if scope["type"] != "http" or not await between(scope, send, headers, inner):
            await inner(scope, receive, send)

    port = free_port()
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="critical")
    uvicorn_server = uvicorn.Server(config)
    running = asyncio.create_task(uvicorn_server.serve())
    try:
        yield f"http://user:word@127.0.0.1:{port}/mcp", calls
    finally:
        uvicorn_server.should_exit = True
        await running


async def answer(send: Send, status: int, body: bytes, **headers: str) -> bool:
    """Answers a request. True, because it is answered."""
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
    return True


def is_call(headers: dict[str, str]) -> bool:
    return headers.get("mcp-method") == "tools/call"


@pytest.mark.parametrize("events", [False, True])
async def test_a_call_is_one_request_with_the_headers_of_all(events: bool) -> None:
    seen: list[dict[str, str]] = []

    async def between(_: Scope, __: Send, headers: dict[str, str], ___: ASGIApp) -> bool:
        seen.append(headers)
        return False

    async with serving(between, events=events) as (url, calls), session_with(url) as tools:
        n_before = len(seen)
        texts = [f"ä {number}" for number in range(20)]
        answers = await asyncio.gather(*(tools.call("echo", {"text": text}) for text in texts))
        assert [answer.text for answer in answers] == texts
        assert sorted(calls) == sorted(texts)
        assert len(seen) == n_before + 20
        for headers in seen:
            assert headers["authorization"] == "Basic dXNlcjp3b3Jk"
            assert headers["accept-encoding"] == "identity"
        assert seen[-1]["mcp-protocol-version"] == LATEST_MODERN_VERSION
        assert seen[-1]["mcp-name"] == "echo"


async def test_a_redirect_within_the_server_is_followed() -> None:
    async def between(scope: Scope, send: Send, _: dict[str, str], __: ASGIApp) -> bool:
        if scope["path"] == "/mcp":
            return await answer(send, 307, b"", location="/there")
        scope["path"] = "/mcp"
        return False

    async with serving(between) as (url, calls), session_with(url) as tools:
        assert (await tools.call("echo", {"text": "a"})).text == "a"
        assert calls == ["a"]


async def test_a_call_that_may_have_run_is_not_sent_to_where_a_redirect_points() -> None:
    posted: list[str] = []

    async def between(scope: Scope, send: Send, headers: dict[str, str], _: ASGIApp) -> bool:
        if not is_call(headers):
            return False
        posted.append(scope["path"])
        return await answer(send, 303, b"", location="/there")

    async with serving(between) as (url, _), session_with(url) as tools:
        failed = await tools.call("echo", {"text": "a"})
        assert failed.is_error and "HTTP 303 and no answer" in failed.text
    assert posted == ["/mcp"]


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        (200, b'{"jsonrpc":"2.0","id":"call-0","result":{}}', "application/json", "no answer"),
        (202, b"", "application/json", "failed: "),
        (404, b"nothing", "text/plain", "failed: HTTP 404 and no answer"),
        (200, b"{", "application/json", "failed: no JSON-RPC"),
        (200, b'{"jsonrpc":"2.0","method":"x"}', "application/json", "HTTP 200 and no answer"),
        (200, b"data: {\n\n", "text/event-stream", "failed: no JSON-RPC"),
        (
            400,
            json.dumps({"jsonrpc": "2.0", "id": None, "error": {"code": -32602, "message": "No"}}),
            "application/json",
            "The tool echo failed: No",
        ),
    ],
)
async def test_what_is_no_answer_is_an_error_of_the_call(
    status: int, body: bytes | str, kind: str, said: str
) -> None:
    n_calls = 0

    async def between(_: Scope, send: Send, headers: dict[str, str], __: ASGIApp) -> bool:
        nonlocal n_calls
        if not is_call(headers):
            return False
        n_calls += 1
        given = body.encode() if isinstance(body, str) else body
        return await answer(send, status, given, content_type=kind)

    async with serving(between) as (url, _), session_with(url) as tools:
        failed = await tools.call("echo", {"text": "a"})
        assert failed.is_error and said in failed.text
        assert n_calls == 1


@pytest.mark.parametrize("length", [{}, {"content_length": "1000"}])
async def test_events_that_end_without_the_answer_are_an_outage(length: dict[str, str]) -> None:
    """The second stream is cut off: it promises more."""
    note: dict[str, Any] = {"jsonrpc": "2.0", "method": "notifications/message", "params": {}}
    n_calls = 0

    async def between(_: Scope, send: Send, headers: dict[str, str], __: ASGIApp) -> bool:
        nonlocal n_calls
        if not is_call(headers):
            return False
        n_calls += 1
        body = f"data: {json.dumps(note)}\n\n".encode()
        return await answer(send, 200, body, content_type="text/event-stream", **length)

    async with serving(between) as (url, _), session_with(url) as tools:
        with pytest.raises(ToolServerUnreachable):
            await tools.call("echo", {"text": "a"})
        assert n_calls == 1


@pytest.mark.parametrize("status", [408, 429, 520])
@pytest.mark.parametrize("settings", [{}, {"session": "record"}])
async def test_a_status_that_is_not_the_tool_s_is_an_outage(
    tmp_path: Path, settings: dict[str, str], status: int
) -> None:
    to_say: list[int] = []
    once = status in (408, 429)  # then the server is there for the next request

    async def between(scope: Scope, send: Send, _: dict[str, str], __: ASGIApp) -> bool:
        if scope["method"] != "POST" or not to_say:
            return False
        return await answer(send, to_say.pop() if once else to_say[0], b"slow down")

    async with serving(between) as (url, calls):
        file = config_file(tmp_path, {"w": {"url": url, **settings}})
        async with session_with(file) as tools:
            assert (await tools.call("echo", {"text": "a"})).text == "a"
            to_say.append(status)
            with pytest.raises(ToolServerUnreachable, match=f"HTTP {status}"):
                await tools.call("echo", {"text": "b"})
            to_say.clear()
            assert calls == ["a"]
