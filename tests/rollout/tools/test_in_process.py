"""Servers that are objects in a thread of this process."""

import asyncio
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tool_session import a_task, config_file, names_of, session_with, tools_of

from agentrl.configs import ConfigError
from agentrl.rollout.tools import session as session_module
from agentrl.rollout.tools.calls import ToolServerUnreachable
from agentrl.rollout.tools.in_process import load_server

PROGRAM = '''
import asyncio, sys, threading, time
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

counts = {}

def a_server(*more):
    server = MCPServer("tools", log_level="CRITICAL")

    @server.tool(structured_output=False)
    async def count(ctx: Context) -> int:
        """How often this record called."""
        record = (ctx.request_context.meta or {})["agentrl/record_id"]
        counts[record] = counts.get(record, 0) + 1
        return counts[record]

    @server.tool(structured_output=False)
    async def place() -> str:
        """Where it runs."""
        return threading.current_thread().name

    @server.tool(structured_output=False)
    async def sleep(seconds: float) -> str:
        """Takes its time."""
        await asyncio.sleep(seconds)
        return "slept"

    @server.tool(structured_output=False)
    async def block(seconds: float) -> str:
        """Blocks its event loop."""
        time.sleep(seconds)
        return "blocked"

    @server.tool(structured_output=False)
    async def fail() -> str:
        """Fails."""
        raise ToolError("no such bin")

    @server.tool(structured_output=False)
    async def leave() -> str:
        """Calls sys.exit."""
        sys.exit(3)

    for tool in more:
        server.tool(structured_output=False)(tool)
    return server

server = a_server()

opened = []

async def create_session(room: str) -> str:
    """Opens a room."""
    opened.append(room)
    return "opened"

async def close_session() -> str:
    """Closes it."""
    opened.append("closed")
    return "closed"

async def rooms() -> str:
    """What was opened."""
    return ",".join(opened)

with_sessions = a_server(create_session, close_session, rooms)
'''


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "warehouse.py"
    path.write_text(PROGRAM)
    return path


async def test_an_object_of_a_file_is_a_server_in_a_thread_of_its_own(program: Path) -> None:
    async with tools_of(f"{program}:server") as box:
        assert names_of(box) == ["count", "place", "sleep", "block", "fail", "leave"]
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


async def test_a_tool_that_blocks_holds_up_no_trajectory_and_is_an_error_or_an_outage(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "_SIGN_OF_LIFE_S", 0.5)
    async with session_with(f"{program}:server", tool_timeout=0.5) as tools:
        slow = await tools.call("sleep", {"seconds": 60})
        assert slow.is_error and "did not answer within 0.5 s" in slow.text
        began = time.monotonic()
        blocking = asyncio.create_task(tools.call("block", {"seconds": 2}))
        await asyncio.sleep(0.1)
        assert time.monotonic() - began < 1.0, "the loop was blocked"
        with pytest.raises(ToolServerUnreachable, match=r"did not answer within 0.5 s"):
            await blocking
        await asyncio.sleep(1.5)
        assert (await tools.call("count", {})).text == "1"


@pytest.mark.parametrize("settings", [{}, {"session": "record"}])
async def test_a_tool_that_calls_sys_exit_ends_nothing_but_its_call(
    program: Path, tmp_path: Path, settings: dict[str, str]
) -> None:
    file = config_file(tmp_path, {"w": {"python": f"{program}:server", "timeout": 5, **settings}})
    async with session_with(file, on_tool_outage="text") as tools:
        assert (await tools.call("leave", {})).is_error
        await tools.call("count", {})  # a record's own session begins anew
        async with session_with(file) as others:
            assert not (await others.call("count", {})).is_error


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


FRAGILE = '''
import asyncio
from contextlib import asynccontextmanager
from mcp.server.mcpserver import MCPServer

begun = []

@asynccontextmanager
async def lifespan(server):
    async with asyncio.TaskGroup() as group:
        begun.append(group.create_task(work()))
        yield {}

wanted = asyncio.Event()

async def work():
    await wanted.wait()
    wanted.clear()
    raise RuntimeError("the background work broke")

server = MCPServer("tools", log_level="CRITICAL", lifespan=lifespan)

@server.tool(structured_output=False)
async def end() -> str:
    """Ends the client that serves this call."""
    wanted.set()
    await asyncio.sleep(0.2)
    return "ended"

@server.tool(structured_output=False)
async def cancel() -> str:
    """Cancels itself."""
    asyncio.current_task().cancel()
    await asyncio.sleep(1)

@server.tool(structured_output=False)
async def count() -> int:
    """Works."""
    return len(begun)
'''


async def test_a_server_whose_client_ends_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "fragile.py"
    path.write_text(FRAGILE, encoding="utf-8")
    async with session_with(f"{path}:server", tool_timeout=2) as tools:
        assert (await tools.call("count", {})).text == "1"
        with suppress(ToolServerUnreachable):
            await tools.call("end", {})
        assert (await tools.call("count", {})).text == "2"


async def test_a_tool_that_is_cancelled_is_an_error_of_its_call(tmp_path: Path) -> None:
    path = tmp_path / "fragile.py"
    path.write_text(FRAGILE, encoding="utf-8")
    async with session_with(f"{path}:server", tool_timeout=2) as tools:
        assert (await tools.call("cancel", {})).is_error
        assert (await tools.call("count", {})).text == "1"


def test_a_file_that_calls_sys_exit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "leaves.py"
    path.write_text("import sys; sys.exit(3)", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"leaves\.py cannot be used"):
        load_server(f"{path}:server")


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
