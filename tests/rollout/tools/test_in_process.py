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
from agentrl.rollout.tools import in_process, server_thread
from agentrl.rollout.tools.calls import ToolBlocks, ToolServerUnreachable
from agentrl.rollout.tools.connection import ConnectFailed

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
    async def block_in_task(seconds: float) -> str:
        """Blocks its event loop in a task that it begins."""
        await asyncio.gather(block(seconds))

    @server.tool(structured_output=False)
    async def fail() -> str:
        """Fails."""
        raise ToolError("no such bin")

    @server.tool(structured_output=False)
    async def leave(error: str = "SystemExit") -> str:
        """Raises what ends a process."""
        raise {"SystemExit": SystemExit(3), "KeyboardInterrupt": KeyboardInterrupt(),
               "GeneratorExit": GeneratorExit()}[error]

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


async def test_a_tool_that_blocks_for_a_while_holds_up_no_trajectory(program: Path) -> None:
    async with session_with(f"{program}:server", tool_timeout=0.5) as tools:
        slow = await tools.call("sleep", {"seconds": 60})
        assert slow.is_error and "did not answer within 0.5 s" in slow.text
        began = time.monotonic()
        blocking = asyncio.create_task(tools.call("block", {"seconds": 1.5}))
        await asyncio.sleep(0.1)
        assert time.monotonic() - began < 1.0, "the loop was blocked"
        blocked = await blocking
        assert blocked.is_error and "did not answer within 0.5 s" in blocked.text
        assert (await tools.call("count", {})).text == "1"


@pytest.mark.parametrize("tool", ["block", "block_in_task"])
@pytest.mark.parametrize("settings", [{}, {"session": "record"}])
async def test_a_tool_that_blocks_for_good_costs_its_attempt_and_is_an_outage_to_others(
    program: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, str],
    tool: str,
) -> None:
    monkeypatch.setattr(server_thread, "_MOMENT_S", 0.5)
    file = config_file(tmp_path, {"w": {"python": f"{program}:server", "timeout": 1, **settings}})
    async with tools_of(file, on_tool_outage="text") as box:
        async with box.session(a_task("bad"), "one") as one, box.session(a_task(), "two") as two:
            beside = asyncio.create_task(two.call("sleep", {"seconds": 60}))
            await asyncio.sleep(0.2)
            with pytest.raises(ToolBlocks, match=rf"block, {program}:\d+"):
                await one.call(tool, {"seconds": 20})
            answer = await beside
            assert answer.is_error and f"the tool {tool} (task bad, record one)" in answer.text
        async with box.session(a_task(), "three") as three:
            assert (await three.call("count", {})).text == "1"
    (line,) = [line for line in caplog.messages if "blocks the event loop" in line]
    assert f"the tool {tool} (task bad, record one)" in line
    assert f"at block, {program}:" in line


async def test_calls_that_block_for_a_short_time_each_are_not_blamed_for_all(
    program: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_thread, "_MOMENT_S", 0.5)
    async with session_with(f"{program}:server", tool_timeout=0.3) as tools:
        calls = [tools.call("block", {"seconds": 0.2}) for _ in range(10)]
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(1)
        assert not (await tools.call("count", {})).is_error
    assert not [line for line in caplog.messages if "blocks the event loop" in line]


async def test_a_lifespan_that_blocks_for_good_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_thread, "_MOMENT_S", 0.5)
    path = tmp_path / "lives.py"
    path.write_text(LIVES, encoding="utf-8")
    file = config_file(tmp_path, {"w": {"python": f"{path}:blocks", "session": "record"}})
    async with tools_of(file, startup_timeout_s=1) as box:
        (tmp_path / "blocks").touch()
        with pytest.raises(ToolServerUnreachable):
            async with box.session(a_task(), "one"):
                pass
        await until_said(caplog, "the lifespan of w")
        (tmp_path / "blocks").unlink()
        async with box.session(a_task(), "two") as tools:
            assert (await tools.call("add", {})).text == "2"


@pytest.mark.parametrize("settings", [{}, {"session": "record"}])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("SystemExit", "the tool leave called sys.exit(3)"),
        ("KeyboardInterrupt", "the tool leave raised KeyboardInterrupt"),
        ("GeneratorExit", "the tool leave raised GeneratorExit"),
    ],
)
async def test_what_would_end_the_process_ends_nothing_but_the_call_of_its_tool(
    program: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, str],
    error: str,
    said: str,
) -> None:
    file = config_file(tmp_path, {"w": {"python": f"{program}:server", "timeout": 5, **settings}})
    async with session_with(file) as tools:
        left = await tools.call("leave", {"error": error})
        assert left.is_error and said in left.text
        assert (await tools.call("count", {})).text == "1", "the session goes on"
    assert f"{said}, for task task and record record" in caplog.messages


LIVES = '''
import sys, time
from contextlib import asynccontextmanager
from pathlib import Path
from mcp.server.mcpserver import MCPServer

@asynccontextmanager
async def leave(server):
    sys.exit(4)
    yield {}

@asynccontextmanager
async def leave_at_the_end(server):
    yield {}
    sys.exit(5)

@asynccontextmanager
async def block(server):
    while Path(__file__).with_name("blocks").exists():
        time.sleep(0.1)
    yield {}

leaves = MCPServer("leaves", log_level="CRITICAL", lifespan=leave)
leaves_at_the_end = MCPServer("leaves", log_level="CRITICAL", lifespan=leave_at_the_end)
blocks = MCPServer("blocks", log_level="CRITICAL", lifespan=block)

@leaves_at_the_end.tool(structured_output=False)
@blocks.tool(structured_output=False)
async def add() -> int:
    """Adds."""
    return 2
'''


async def until_said(caplog: pytest.LogCaptureFixture, words: str) -> None:
    deadline = time.monotonic() + 20
    while not any(words in line for line in caplog.messages):
        assert time.monotonic() < deadline, caplog.messages
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("settings", [{}, {"session": "record"}])
async def test_a_lifespan_that_calls_sys_exit_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, str]
) -> None:
    path = tmp_path / "lives.py"
    path.write_text(LIVES, encoding="utf-8")
    file = config_file(tmp_path, {"w": {"python": f"{path}:leaves", **settings}})
    with pytest.raises(ToolServerUnreachable, match=r"the lifespan of w .* called sys\.exit\(4\)"):
        async with tools_of(file):
            pass
    file = config_file(tmp_path, {"w": {"python": f"{path}:leaves_at_the_end", **settings}})
    async with session_with(file) as tools:
        assert (await tools.call("add", {})).text == "2"
    assert any("called sys.exit(5)" in line for line in caplog.messages)


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


IMPORTS = """
import asyncio, time
from pathlib import Path
from mcp.server.mcpserver import MCPServer

async def set_up():
    server = MCPServer("tools", log_level="CRITICAL")

    @server.tool(structured_output=False)
    async def add() -> int:
        return 2

    return server

server = asyncio.run(set_up())

def load_index():
    while Path(__file__).with_name("waits").exists():
        time.sleep(0.1)

load_index()
"""


async def test_a_file_may_run_a_loop_while_it_is_imported(tmp_path: Path) -> None:
    path = tmp_path / "sets_up.py"
    path.write_text(IMPORTS, encoding="utf-8")
    async with session_with(f"{path}:server") as tools:
        assert (await tools.call("add", {})).text == "2"


async def test_an_import_that_does_not_end_is_said_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "waits_for_ever.py"
    path.write_text(IMPORTS, encoding="utf-8")
    (tmp_path / "waits").touch()
    beside = asyncio.create_task(asyncio.sleep(0.1))
    with pytest.raises(
        ToolServerUnreachable,
        match=rf"waits_for_ever .* not imported within 1 s; .* at load_index, {path}:\d+",
    ):
        async with tools_of(f"{path}:server", startup_timeout_s=1):
            pass
    assert beside.done(), "the loop was blocked"
    (tmp_path / "waits").unlink()


async def test_an_import_s_error_is_one_line_without_control_codes(tmp_path: Path) -> None:
    path = tmp_path / "raises.py"
    path.write_text(r"raise ValueError('one\n\x1b[31mtwo [/bold]')", encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        async with tools_of(f"{path}:server"):
            pass
    assert r"ValueError: one \x1b[31mtwo [/bold] (line 1)" in str(raised.value)


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


LARGE = """
from mcp import MCPError
from mcp.server.mcpserver import MCPServer

server = MCPServer("large", log_level="CRITICAL")
N = 33 << 20

@server.tool(structured_output=False)
async def text() -> str:
    return "x" * N

@server.tool(structured_output=False)
async def wide() -> str:
    return "ä" * (N // 2)

@server.tool()
async def structured() -> dict[str, list[str]]:
    return {"values": ["x" * (N // 4)] * 4}

@server.tool(structured_output=False)
async def error() -> str:
    raise MCPError(code=1, message="x" * N)

@server.tool(structured_output=False)
async def fits() -> str:
    return "x" * (31 << 20)
"""


async def test_an_answer_of_an_object_is_limited_as_over_a_wire(tmp_path: Path) -> None:
    path = tmp_path / "large.py"
    path.write_text(LARGE, encoding="utf-8")
    async with session_with(f"{path}:server") as tools:
        for name in ("text", "wide", "structured", "error"):
            answer = await tools.call(name, {})
            assert answer.is_error and "an answer of more than 32 MiB" in answer.text, name
        assert not (await tools.call("fits", {})).is_error


HANGS = """
import threading
from mcp.server.mcpserver import MCPServer

server = MCPServer("hangs", log_level="CRITICAL")
go = threading.Event()

@server.tool(structured_output=False)
def hang() -> str:
    go.wait()

@server.tool(structured_output=False)
async def release() -> str:
    go.set()
    return "released"
"""


@pytest.mark.parametrize("settings", [{}, {"session": "record"}])
async def test_def_tools_that_hang_are_told_once_and_an_outage_beyond_a_number(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, str],
) -> None:
    monkeypatch.setattr(server_thread, "_MOMENT_S", 0.3)
    monkeypatch.setattr(in_process, "MOST_LEFT", 3)
    path = tmp_path / "hangs.py"
    path.write_text(HANGS, encoding="utf-8")
    file = config_file(tmp_path, {"w": {"python": f"{path}:server", "timeout": 1, **settings}})
    async with session_with(file) as tools:
        for _ in range(3):
            answer = await tools.call("hang", {})
            assert answer.is_error and "did not answer within 1 s" in answer.text
        await asyncio.sleep(1)
        with pytest.raises(ToolServerUnreachable, match="3 calls go on") as out:
            await tools.call("hang", {})
        assert out.value.probe is not None
        with pytest.raises(ConnectFailed, match="3 calls go on"):
            await out.value.probe()
        sys.modules[f"agentrl user module {path}"].go.set()
        await asyncio.sleep(0.5)
        await out.value.probe()
        assert (await tools.call("release", {})).text == "released"
    assert len([line for line in caplog.messages if "the tool hang" in line]) == 1


async def test_a_file_that_calls_sys_exit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "leaves.py"
    path.write_text("import sys; sys.exit(3)", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"leaves\.py cannot be used"):
        async with tools_of(f"{path}:server"):
            pass


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
