"""The tools against `server-everything` and `server-filesystem`, which we did not write."""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from node_servers import ListeningServer, node
from ports import free_port
from tool_session import a_task, config_file, names_of, session_with, tools_of

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import ToolResult
from agentrl.databases.records import RecordLedger
from agentrl.rollout.tools.calls import ToolServerUnreachable

Listening = Callable[[str, int], ListeningServer]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the file server may touch."""
    folder = tmp_path / "files"
    folder.mkdir()
    return folder


@pytest.fixture
def both(tmp_path: Path, folder: Path) -> Path:
    """A config file with both servers."""
    servers = {"everything": node("everything"), "files": node("filesystem", str(folder))}
    return config_file(tmp_path, servers)


async def test_both_at_once_with_their_tools_in_one_list(both: Path) -> None:
    async with tools_of(both, mcp_block_tools="toggle-*,files.*_directory*") as box:
        names = names_of(box)
        assert {"echo", "get-sum", "read_text_file", "write_file"} <= set(names)
        assert not [name for name in names if "toggle" in name or "directory" in name[-9:]]
        sums = next(s["function"] for s in box.schemas if s["function"]["name"] == "get-sum")
        assert sums["parameters"]["required"] == ["a", "b"]


async def test_results_of_every_kind_are_text_for_the_model(both: Path, folder: Path) -> None:
    async with session_with(both) as tools:

        async def text(name: str, **arguments: Any) -> str:
            answer = await tools.call(name, arguments)
            assert not answer.is_error, answer.text
            return answer.text

        assert await text("echo", message="grüß 🌍") == "Echo: grüß 🌍"
        assert await text("get-sum", a=1, b=2) == "The sum of 1 and 2 is 3."
        weather = json.loads(await text("get-structured-content", location="Chicago"))
        assert set(weather) == {"temperature", "conditions", "humidity"}
        image = await text("get-tiny-image")
        assert "[image (image/png, 4033 bytes) left out: only text can be read]" in image
        resource = await text("get-resource-reference", resourceType="Blob", resourceId=2)
        assert "[resource demo://resource/dynamic/blob/2 (text/plain" in resource
        assert "[link to Text Resource 2: demo://" in await text("get-resource-links", count=2)

        page = str(folder / "page.txt")
        await text("write_file", path=page, content="line 1\nline 2")
        assert await text("read_text_file", path=page) == "line 1\nline 2"
        assert await text("list_directory", path=str(folder)) == "[FILE] page.txt"


async def test_errors_are_texts_for_the_model(both: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hush")
    async with session_with(both) as tools:
        outside = await tools.call("read_text_file", {"path": str(tmp_path / "secret")})
        assert outside.is_error and "Access denied" in outside.text
        wrong = await tools.call("get-sum", {"a": "one"})
        assert wrong.is_error and "expected number" in wrong.text
        missing = await tools.call("read_text_file", {"path": str(folder / "none")})
        assert missing.is_error and "ENOENT" in missing.text


async def test_a_call_past_its_time_is_given_up_and_the_server_is_used_on(tmp_path: Path) -> None:
    file = config_file(tmp_path, {"everything": {**node("everything"), "timeout": 2}})
    async with session_with(file) as tools:
        slow = await tools.call("trigger-long-running-operation", {"duration": 30, "steps": 1})
        assert slow.is_error and "did not answer within 2 s" in slow.text
        assert (await tools.call("echo", {"message": "a"})).text == "Echo: a"


async def test_what_the_model_does_not_read_is_in_the_database(
    both: Path, folder: Path, database: RunDatabase
) -> None:
    ledger = RecordLedger(database, 60.0)
    ledger.leases.begin(["record"], time.monotonic())
    (folder / "long.txt").write_text("0123456789" * 100)
    async with session_with(both, records=ledger, max_tool_result_chars=50) as tools:
        long = await tools.call("read_text_file", {"path": str(folder / "long.txt")})
        image = await tools.call("get-tiny-image", {})
    assert long.text == "0123456789" * 5 + "\n[950 characters left out]"
    stored = [
        ToolResult.from_mongo(document)
        for key in (long.kept, image.kept)
        if (document := await database.tool_results.find_one({"_id": key}))
    ]
    assert stored[0].text == "0123456789" * 100
    assert stored[1].files[0].data.startswith(b"\x89PNG")


async def test_each_record_has_a_process_of_its_own(tmp_path: Path, folder: Path) -> None:
    entry = {**node("everything"), "session": "record"}
    async with tools_of(config_file(tmp_path, {"everything": entry})) as box:

        async def environment(record: str) -> str:
            async with box.session(a_task(), record) as tools:
                return (await tools.call("echo", {"message": record})).text

        texts = await asyncio.gather(*(environment(f"r{i}") for i in range(3)))
        assert texts == ["Echo: r0", "Echo: r1", "Echo: r2"]


@pytest.mark.parametrize(("transport", "path"), [("streamableHttp", "mcp"), ("sse", "sse")])
async def test_over_http_a_server_that_restarts_costs_calls_only_while_it_is_away(
    listening: Listening, transport: str, path: str
) -> None:
    server = listening(transport, free_port())
    url = f"http://127.0.0.1:{server.port}/{path}"
    async with session_with(url, mcp_sessions=2, tool_timeout=20) as tools:
        calls = [tools.call("get-sum", {"a": i, "b": 1}) for i in range(20)]
        answers = await asyncio.gather(*calls)
        assert [answer.text for answer in answers] == [
            f"The sum of {i} and 1 is {i + 1}." for i in range(20)
        ]
        server.kill()
        with pytest.raises(ToolServerUnreachable):
            await tools.call("echo", {"message": "a"})
        await asyncio.to_thread(server.start)
        back = [await tools.call("echo", {"message": str(i)}) for i in range(4)]
        assert [answer.text for answer in back] == [f"Echo: {i}" for i in range(4)]
