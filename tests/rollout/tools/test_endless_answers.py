"""Answers without an end, or far too large: one sentence, no memory, and no second call."""

import asyncio
import resource
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvicorn
from aiohttp import web
from mcp.server.mcpserver import MCPServer
from ports import free_port
from tool_session import config_file, session_with, tools_of

from agentrl.inference.client import SGLangClient
from agentrl.inference.protocol import GenerateRequest, SamplingParams, ServiceUnreachable
from agentrl.limited_httpx import MAX_ANSWER_BYTES
from agentrl.rollout.llm.client import LLMClient, ModelsUnreachable
from agentrl.rollout.llm.models import AgentModel
from agentrl.rollout.tools.calls import ToolServerUnreachable

MIB = 1 << 20
LARGE = MAX_ANSWER_BYTES + MIB
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def memory_stays() -> Iterator[None]:
    """An answer is never held whole, several times over, with what comes after it."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 600 * 1024, f"{grown >> 10} MiB more"


@asynccontextmanager
async def endless(start: bytes, piece: bytes) -> AsyncIterator[str]:
    """A server that begins every answer so, and goes on with the same piece for ever."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n" + start)
            while True:
                writer.write(piece)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}"


async def test_an_inference_service_s_answer_is_read_up_to_a_size() -> None:
    start = b"Content-Type: application/json\r\n\r\n{"
    async with endless(start, b" " * MIB) as url, SGLangClient(url) as client:
        with pytest.raises(ServiceUnreachable, match="more than 67108864 bytes"):
            await client.model_info()
    async with endless(start, b"x" * MIB) as url, SGLangClient(url) as client:
        request = GenerateRequest("r", (1, 2), SamplingParams(64))
        with pytest.raises(ServiceUnreachable, match="a chunk of more than"):
            await client.generate(request)


async def test_a_stream_that_says_nothing_of_meaning_is_no_progress() -> None:
    async with endless(b"\r\n", b": alive\n\n") as url, SGLangClient(url, silence_s=0.2) as client:
        with pytest.raises(ServiceUnreachable, match="said nothing"):
            await client.generate(GenerateRequest("r", (1, 2)), timeout_s=30)


async def test_a_judge_s_answer_is_read_up_to_a_size() -> None:
    start = b"Content-Type: application/json\r\n\r\n{"
    async with endless(start, b" " * MIB) as url:
        model = AgentModel(model="m", base_url=url, retries=0)
        async with LLMClient([model], "the judge") as models:
            with pytest.raises(ModelsUnreachable):
                await models.ask("judge", "this", lambda reply: reply, "any form")


async def test_an_aggregator_s_answer_is_read_up_to_a_size_and_asked_for_once() -> None:
    calls = 0

    async def tool(request: web.Request) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * MIB)

    async def servers(request: web.Request) -> web.Response:
        return web.json_response({"servers": ["s"]})

    async def tools(request: web.Request) -> web.Response:
        return web.json_response({"tools": [{"function": {"name": "big"}}]})

    app = web.Application()
    app.add_routes(
        [web.get("/mcpapi/servers", servers), web.get("/mcpapi/server/s/tools", tools),
         web.post("/mcpapi/tool/s.big", tool)]
    )  # fmt: skip
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        async with session_with(f"http://127.0.0.1:{port}/mcpapi") as session:
            answer = await session.call("big", {})
        assert answer.is_error
        assert answer.text == "The tool big gave an answer of more than 32 MiB, which was not read."
        assert calls == 1
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("json_response", [True, False], ids=["json", "events"])
async def test_an_mcp_server_s_answer_is_read_up_to_a_size_and_asked_for_once(
    json_response: bool,
) -> None:
    server = MCPServer("big", log_level="ERROR")
    calls: list[int] = []

    @server.tool(structured_output=False)
    async def big(size: int) -> str:
        """So many characters."""
        calls.append(size)
        return "x" * size

    app = server.streamable_http_app(host="127.0.0.1", json_response=json_response)
    port = free_port()
    serving = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="critical"))
    running = asyncio.create_task(serving.serve())
    try:
        async with session_with(f"http://127.0.0.1:{port}/mcp") as session:
            answer = await session.call("big", {"size": LARGE})
            assert answer.is_error and answer.text.startswith("The tool big failed: ")
            assert "more than 32 MiB" in answer.text or "byte limit" in answer.text
            # The session goes on, and what is not too large is read.
            assert (await session.call("big", {"size": 2 * MIB})).whole == "x" * 2 * MIB
            assert calls == [LARGE, 2 * MIB]
    finally:
        serving.should_exit = True
        await running


def endless_process(folder: Path, **settings: str) -> tuple[Path, Path]:
    """A config file for a process that writes endless lines, and the journal of its calls."""
    journal = folder / "journal"
    program = Path(__file__).with_name("endless_process.py")
    entry = {"command": sys.executable, "args": [str(program), str(journal)], **settings}
    return config_file(folder, {"endless": entry}), journal


@pytest.mark.parametrize("session", ["shared", pytest.param("record", marks=pytest.mark.slow)])
async def test_a_process_s_line_is_read_up_to_a_size_and_asked_for_once(
    tmp_path: Path, session: str
) -> None:
    file, journal = endless_process(tmp_path, session=session)
    async with session_with(file, tool_timeout=60) as tools:
        too_large = "failed: it gave an answer of more than 32 MiB, which was not read"
        for call in (("big", {"size": LARGE}), ("endless", {"id_first": False})):
            answer = await tools.call(*call)
            assert (answer.text, answer.is_error) == (f"The tool {call[0]} {too_large}", True)
            if session == "record":
                assert "begin anew" in (await tools.call("big", {"size": 1})).text
            # Another process goes on, and what is not too large is read.
            assert (await tools.call("big", {"size": 2 * MIB})).whole == "x" * 2 * MIB
    assert journal.read_text().split() == ["big", "big", "endless", "big"]


@pytest.mark.parametrize("id_first", [True, False])
async def test_an_endless_line_fails_the_call_it_names_and_is_an_outage_for_those_beside_it(
    tmp_path: Path, id_first: bool
) -> None:
    file, journal = endless_process(tmp_path)
    async with session_with(file, tool_timeout=60) as tools:
        beside = asyncio.create_task(tools.call("hang", {}))
        while not journal.exists():
            await asyncio.sleep(0.01)
        endless = asyncio.create_task(tools.call("endless", {"id_first": id_first}))
        async with asyncio.timeout(20):
            await asyncio.wait({beside, endless})
        assert isinstance(beside.exception(), ToolServerUnreachable)
        if id_first:
            assert "more than 32 MiB" in endless.result().text
        else:  # whose answer it is, is not known
            assert isinstance(endless.exception(), ToolServerUnreachable)
        assert (await tools.call("big", {"size": 5})).text == "xxxxx"


async def test_a_process_that_begins_with_an_endless_line_is_said_at_once(tmp_path: Path) -> None:
    endless = "while True: print('x' * 65536, end='')"
    entry = {"command": sys.executable, "args": ["-c", endless]}
    file = config_file(tmp_path, {"broken": entry})
    async with asyncio.timeout(20):
        with pytest.raises(ToolServerUnreachable, match="ended before it answered"):
            async with tools_of(file, startup_timeout_s=300):
                pass
