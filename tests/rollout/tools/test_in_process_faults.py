"""Servers in our process that block, hang, leave or never come."""

import asyncio
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tool_session import a_task, config_file, session_with, tools_of

from agentrl.configs import ConfigError
from agentrl.rollout.tools import in_process, server_thread
from agentrl.rollout.tools.calls import ToolBlocks, ToolServerUnreachable
from agentrl.rollout.tools.connection import ConnectFailed


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


WAITS = """
import time
from pathlib import Path

def load_index():
    while Path(__file__).with_name("waits").exists():
        time.sleep(0.1)

load_index()
"""


async def test_an_import_that_does_not_end_is_said_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "waits_for_ever.py"
    path.write_text(WAITS, encoding="utf-8")
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
