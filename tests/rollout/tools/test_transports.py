"""Servers over SSE and stdio, several at once, and the pool of sessions with one."""

import asyncio
import os
import signal
import ssl
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tool_session import a_task, config_file, names_of, session_with, tools_of

from agentrl.limited_httpx import tls_context
from agentrl.rollout.tools import session as session_module
from agentrl.rollout.tools.calls import ToolServerUnreachable

COUNTING = Path(__file__).with_name("counting_mcp_server.py")


def counting_process(*flags: str, **settings: Any) -> dict[str, Any]:
    """The config file's entry of a counting server that is a process of ours."""
    return {"command": sys.executable, "args": [str(COUNTING), "stdio", *flags], **settings}


async def test_a_process_is_a_server_and_sees_only_the_environment_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_SECRET", "hush")
    entry = counting_process(env={"GIVEN": "${OUR_SECRET}!"})
    async with session_with(config_file(tmp_path, {"counting": entry})) as tools:
        assert [(await tools.call("count", {})).text for _ in range(3)] == ["1", "2", "3"]
        assert (await tools.call("environment", {"name": "GIVEN"})).text == "hush!"
        assert (await tools.call("environment", {"name": "OUR_SECRET"})).text == "not set"


async def test_a_process_that_dies_costs_calls_and_is_started_again(tmp_path: Path) -> None:
    file = config_file(tmp_path, {"counting": counting_process()})
    async with session_with(file, on_tool_outage="text") as tools:
        assert (await tools.call("count", {"by": 5})).text == "5"
        waiting = asyncio.create_task(tools.call("hang", {}))
        died = await tools.call("die", {})
        assert died.is_error and "was lost while die was at work" in died.text
        assert "was lost while hang was at work" in (await waiting).text
        again = await tools.call("count", {})
        assert (again.text, again.is_error) == ("1", False)


@pytest.mark.slow
async def test_a_process_that_all_share_and_that_dies_or_hangs_is_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "_SIGN_OF_LIFE_S", 1.0)
    file = config_file(tmp_path, {"counting": counting_process(timeout=2)})
    async with session_with(file) as tools:
        with pytest.raises(ToolServerUnreachable, match="was lost while die was at work"):
            await tools.call("die", {})
        pid = int((await tools.call("pid", {})).text)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ToolServerUnreachable, match="did not answer within 2 s"):
            await tools.call("count", {})
        assert int((await tools.call("pid", {})).text) != pid


@pytest.mark.slow
async def test_a_record_that_kills_the_process_of_its_own_reads_of_it(tmp_path: Path) -> None:
    file = config_file(tmp_path, {"counting": counting_process(session="record")})
    async with session_with(file) as tools:
        died = await tools.call("die", {})
        assert died.is_error and "was lost while die was at work" in died.text
        assert "state of its tools with it" in (await tools.call("count", {})).text
        assert (await tools.call("count", {})).text == "1"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"command": "no-such-program"}, "cannot be started: No such file"),
        ({"command": sys.executable, "args": ["-c", "exit(3)"]}, "ended before it answered"),
    ],
)
async def test_a_process_that_does_not_start_is_said_at_once(
    tmp_path: Path, entry: dict[str, Any], reason: str
) -> None:
    async with asyncio.timeout(20):
        with pytest.raises(ToolServerUnreachable, match=f"tool server broken .*{reason}"):
            async with tools_of(config_file(tmp_path, {"broken": entry}), startup_timeout_s=300):
                pass


async def test_a_server_over_sse_is_used_and_used_again_after_its_end(
    counting_server: Callable[..., Any],
) -> None:
    server = counting_server("sse")
    url = f"http://127.0.0.1:{server.port}/sse"
    async with session_with(url, tool_timeout=20, on_tool_outage="text") as tools:
        assert (await tools.call("count", {"by": 2})).text == "2"
        waiting = asyncio.create_task(tools.call("hang", {}))
        died = await tools.call("die", {})
        assert died.is_error and (await waiting).is_error
        await asyncio.to_thread(server.wait_for_its_end)
        assert "cannot be reached" in (await tools.call("count", {})).text
        await asyncio.to_thread(server.start)
        assert (await tools.call("count", {})).text == "1"


async def test_servers_of_every_kind_are_used_at_once_and_one_that_dies_costs_no_other(
    tmp_path: Path, counting_server: Callable[..., Any], hostile_server: Any
) -> None:
    sse = counting_server("sse")
    servers = {
        "process": counting_process(),
        "events": {"url": f"http://127.0.0.1:{sse.port}/sse"},
        "hostile": {"url": hostile_server.url},
    }
    flags = {"mcp_allow_tools": "count,die,echo", "mcp_block_tools": "hostile.die",
             "on_tool_outage": "text"}  # fmt: skip
    async with tools_of(config_file(tmp_path, servers), **flags) as box:
        assert names_of(box) == [
            "process__count", "process__die", "events__count", "events__die", "echo",
        ]  # fmt: skip
        async with box.session(a_task(), "record") as tools:
            texts = ("process__count", {}), ("events__count", {"by": 7}), ("echo", {"text": "e"})
            answers = await asyncio.gather(*(tools.call(*call) for call in texts))
            assert [answer.text for answer in answers] == ["1", "7", "e"]
            assert (await tools.call("process__die", {})).is_error
            assert (await tools.call("events__count", {})).text == "8"


async def test_calls_are_spread_over_the_sessions_of_a_server(tmp_path: Path) -> None:
    file = config_file(tmp_path, {"counting": counting_process(sessions=3)})
    async with session_with(file) as tools:
        # Each session is a process with a count of its own. A call that hangs keeps its session
        # busy, so that the next goes to another.
        hanging = []
        for _ in range(3):
            assert (await tools.call("count", {})).text == "1"
            hanging.append(asyncio.create_task(tools.call("hang", {})))
            await asyncio.sleep(0)
        for task in hanging:
            task.cancel()
        await asyncio.wait(hanging)


async def test_a_time_out_of_a_server_of_its_own_is_heeded(tmp_path: Path) -> None:
    file = config_file(tmp_path, {"counting": counting_process(timeout=2)})
    async with session_with(file, tool_timeout=60) as tools:
        assert "did not answer within 2 s" in (await tools.call("hang", {})).text
        assert (await tools.call("count", {})).text == "1"


async def test_a_process_ends_with_the_tools(tmp_path: Path) -> None:
    async with session_with(config_file(tmp_path, {"counting": counting_process()})) as tools:
        pid = int((await tools.call("pid", {})).text)
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("transport", ["stdio", "sse", "http"])
async def test_arguments_that_no_message_can_hold_cost_only_their_call(
    tmp_path: Path, counting_server: Callable[..., Any], transport: str
) -> None:
    if transport == "stdio":
        servers: str | Path = config_file(tmp_path, {"counting": counting_process()})
    else:
        port = counting_server(transport).port
        servers = f"http://127.0.0.1:{port}/{'sse' if transport == 'sse' else 'mcp'}"
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    async with session_with(servers, tool_timeout=20) as tools:
        pid = (await tools.call("pid", {})).text
        for value in ("half \ud83d of a pair", deep):
            refused = await tools.call("environment", {"name": value})
            assert refused.is_error and "cannot be sent" in refused.text
        assert (await tools.call("pid", {})).text == pid


async def test_certificates_are_read_once_for_all_servers_and_not_by_the_event_loop(
    hostile_server: Any, counting_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_by: list[threading.Thread] = []
    create = httpx2.create_ssl_context

    def create_here(*args: Any, **settings: Any) -> Any:
        if not isinstance(settings.get("verify"), ssl.SSLContext):
            read_by.append(threading.current_thread())
        return create(*args, **settings)

    monkeypatch.setattr(httpx2, "create_ssl_context", create_here)
    monkeypatch.setattr("httpx2._transports.default.create_ssl_context", create_here)
    tls_context.cache_clear()
    counting = counting_server("http")
    urls = f"{hostile_server.url},counting=http://127.0.0.1:{counting.port}/mcp"
    for _ in range(2):
        async with tools_of(urls):
            pass
    assert len(read_by) == 1 and read_by[0] is not threading.main_thread()
