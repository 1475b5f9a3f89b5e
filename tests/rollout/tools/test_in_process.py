"""Servers that are objects in a thread of this process."""

import asyncio
import sys
import threading
import time
from pathlib import Path

import pytest
from tool_session import a_task, config_file, names_of, session_with, tools_of

from agentrl.configs import ConfigError
from agentrl.rollout.tools.calls import ToolServerUnreachable


async def test_an_object_of_a_file_is_a_server_in_a_thread_of_its_own(program: Path) -> None:
    async with tools_of(f"{program}:server") as box:
        assert names_of(box) == [
            "count", "place", "sleep", "block", "block_in_task", "fail", "leave"
        ]  # fmt: skip
        async with box.session(a_task(), "one") as one, box.session(a_task(), "two") as two:
            answers = await asyncio.gather(*(tools.call("count", {}) for tools in (one, one, two)))
            assert [answer.text for answer in answers] == ["1", "2", "1"]
            assert (await one.call("place", {})).text == "tools warehouse"
            failed = await one.call("fail", {})
            assert failed.is_error and "no such bin" in failed.text
    deadline = time.monotonic() + 5
    while any(thread.name == "tools warehouse" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the thread goes on"
        await asyncio.sleep(0.01)


async def test_a_file_can_import_others_of_its_folder(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    importing = program.with_name("importing.py")
    program.rename(program.with_name("bins_beside.py"))
    importing.write_text("from bins_beside import server\n")
    async with session_with(f"{importing}:server") as tools:
        assert (await tools.call("count", {})).text == "1"


async def test_a_module_s_object_is_a_server(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.rename(program.with_name("bins_of_a_module.py"))
    monkeypatch.syspath_prepend(program.parent)
    async with session_with("bins_of_a_module:server") as tools:
        assert (await tools.call("count", {})).text == "1"


async def test_a_record_s_session_is_opened_and_closed(program: Path) -> None:
    task = a_task(tools_kwargs={"warehouse": {"create_kwargs": {"room": "red"}}})
    async with tools_of(f"{program}:with_sessions") as box:
        for rooms in ("red", "red,closed,red"):
            async with box.session(task, "record") as tools:
                assert (await tools.call("rooms", {})).text == rooms


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("{folder}/warehouse.py:absent", "is missing"),
        ("{folder}/warehouse.py:counts", "is dict"),
        ("{folder}/absent.py:server", "there is no such Python file"),
        ("no_such_module:server", "no_such_module cannot be imported: ModuleNotFoundError"),
    ],
)
async def test_what_is_no_server_is_said(program: Path, given: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        async with tools_of(given.format(folder=program.parent)):
            pass


IMPORTS = """
import asyncio
from mcp.server.mcpserver import MCPServer

async def set_up():
    server = MCPServer("tools", log_level="CRITICAL")

    @server.tool(structured_output=False)
    async def add() -> int:
        return 2

    return server

server = asyncio.run(set_up())
"""


async def test_a_file_may_run_a_loop_while_it_is_imported(tmp_path: Path) -> None:
    path = tmp_path / "sets_up.py"
    path.write_text(IMPORTS, encoding="utf-8")
    async with session_with(f"{path}:server") as tools:
        assert (await tools.call("add", {})).text == "2"


SHARED = """
import asyncio, threading
from mcp.server.mcpserver import MCPServer

lock = asyncio.Lock()
threads = set()

async def use() -> str:
    async with lock:
        threads.add(threading.current_thread())
        await asyncio.sleep(0.05)
    return str(len(threads))

one, two = (MCPServer(name, log_level="CRITICAL") for name in ("one", "two"))
one.tool(structured_output=False)(use)
two.tool(structured_output=False)(use)
"""


async def test_all_servers_of_a_file_and_all_agents_share_its_event_loop(tmp_path: Path) -> None:
    path = tmp_path / "shares.py"
    path.write_text(SHARED, encoding="utf-8")
    file = config_file(tmp_path, {name: {"python": f"{path}:{name}"} for name in ("one", "two")})
    async with session_with(file) as both, session_with(f"{path}:one") as other:
        calls = [
            tools.call(name, {})
            for tools, name in ((both, "one__use"), (both, "two__use"), (other, "use"))
            for _ in range(3)
        ]
        assert [answer.text for answer in await asyncio.gather(*calls)] == ["1"] * 9


WHOLE = '''
from contextlib import asynccontextmanager
from datetime import date
from typing import Any
from mcp import MCPError
from mcp.server import Server
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp_types import INVALID_PARAMS, CallToolResult, ListToolsResult, TextContent, Tool

seen = []

async def watch(context, call_next):
    seen.append(context.method)
    result = await call_next(context)
    result.get("content", []).append({"type": "text", "text": "(watched)"})
    return result

@asynccontextmanager
async def lifespan(server):
    yield {"door": "open"}

server = MCPServer("tools", log_level="CRITICAL", lifespan=lifespan, middleware=[watch])

@server.tool()
async def parts(bin: str) -> dict[str, int]:
    """Structured content."""
    return {bin: 3}

@server.tool(structured_output=False)
async def picture() -> Image:
    """An image."""
    return Image(data=b"png", format="png")

@server.tool(structured_output=False)
async def door(ctx: Context) -> str:
    """What the lifespan yielded, after a report and a log message that nobody reads."""
    await ctx.report_progress(1, 2)
    await ctx.info("looking")
    return ctx.request_context.lifespan_context["door"]

@server.tool(structured_output=False)
async def calls() -> int:
    """How many calls the middleware saw."""
    return seen.count("tools/call")

@server.tool(structured_output=False)
async def take(order: Any, ctx: Context) -> str:
    """Changes what it is given, and names its client."""
    ctx.request_context.meta["agentrl/task_id"] = "other"
    return f"{order['items'].pop()} for {ctx.session.client_params.client_info.name}"

@server.tool(structured_output=False)
async def refuse() -> str:
    """An error of the protocol."""
    raise MCPError(code=INVALID_PARAMS, message="no such bin")

async def listed(ctx: Any, params: Any) -> ListToolsResult:
    schema = {"type": "object"}
    output = {"type": "object", "properties": {"count": {"type": "integer"}}}
    return ListToolsResult(
        tools=[
            Tool(name="counted", input_schema=schema, output_schema=output),
            Tool(name="dated", input_schema=schema),
            Tool(name="raising", input_schema=schema),
        ]
    )

async def called(ctx: Any, params: Any) -> Any:
    if params.name == "raising":
        raise KeyError("secret of the server")
    values = {"counted": {"count": "many"}, "dated": {"day": date(2026, 1, 2)}}
    return CallToolResult(content=[], structured_content=values[params.name])

low = Server("low", on_list_tools=listed, on_call_tool=called)
'''


async def test_a_call_is_the_server_s_own_with_middleware_lifespan_and_contents(
    tmp_path: Path,
) -> None:
    path = tmp_path / "whole.py"
    path.write_text(WHOLE, encoding="utf-8")
    async with session_with(f"{path}:server") as tools:
        assert (
            await tools.call("parts", {"bin": "A"})
        ).text == '{\n  "A": 3\n}\n(watched)\n{"A":3}'
        assert "image (image/png, 3 bytes) left out" in (await tools.call("picture", {})).text
        assert (await tools.call("door", {})).text == "open\n(watched)"
        assert (await tools.call("calls", {})).text == "4\n(watched)"
        wrong = await tools.call("parts", {"bin": 3})
        assert wrong.is_error and "valid string" in wrong.text
        refused = await tools.call("refuse", {})
        assert refused.is_error and refused.text == "The tool refuse failed: no such bin"
        order = {"items": [1, 2]}
        for _ in range(2):
            assert (await tools.call("take", {"order": order})).text == "2 for mcp\n(watched)"
        assert order == {"items": [1, 2]}, "what the model wrote stays as it was"


async def test_results_of_handlers_are_in_wire_form_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "whole.py"
    path.write_text(WHOLE, encoding="utf-8")
    async with session_with(f"{path}:low") as tools:
        assert (await tools.call("dated", {})).text == '{"day":"2026-01-02"}'
        assert "cannot be read (RuntimeError)" in (await tools.call("counted", {})).text
        failed = await tools.call("raising", {})
        assert failed.is_error and "secret" not in failed.text


HANDLER = """
class Handler:
    def __init__(self):
        self.ready = False

    async def initialize(self):
        self.ready = True
        self.openai_tools = [
            {"type": "function", "function": {"name": "stock", "description": "Parts in a bin.",
             "parameters": {"type": "object", "properties": {"bin": {"type": "string"}}}}},
            {"type": "function", "function": {"name": "fail"}},
        ]
        return True

    async def call_tool(self, tool_name, arguments):
        if tool_name == "fail":
            return {"status": "error", "content": {"error": "no such bin", "detail": "K7"}}
        return {"status": "success", "content": {"bin": arguments["bin"], "n": 42}}

    async def close(self):
        self.ready = False


class Dead(Handler):
    async def initialize(self):
        return False
"""


async def test_a_handler_of_the_first_version_is_a_server(tmp_path: Path) -> None:
    (tmp_path / "own_handler.py").write_text(HANDLER)
    url = f"{tmp_path / 'own_handler.py'}:Handler"
    async with session_with(url) as session:
        right = await session.call("stock", {"bin": "K7"})
        wrong = await session.call("fail", {})
    assert (right.text, right.is_error) == ('{"bin":"K7","n":42}', False)
    assert wrong.is_error and "no such bin: K7" in wrong.text


async def test_a_handler_that_does_not_start_is_out_of_reach(tmp_path: Path) -> None:
    (tmp_path / "dead_handler.py").write_text(HANDLER)
    with pytest.raises(ToolServerUnreachable, match=r"initialize\(\) did not return True"):
        async with session_with(f"{tmp_path / 'dead_handler.py'}:Dead"):
            pass
