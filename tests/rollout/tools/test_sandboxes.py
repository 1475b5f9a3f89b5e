"""Sessions of single records: opened with what the task gives, closed with the record."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tool_session import a_task, config_file, names_of, session_with, tools_of

from agentrl.rollout.tools.calls import ToolServerUnreachable, ToolSessionFailed
from agentrl.rollout.tools.catalogue import Offer, catalogue
from agentrl.rollout.tools.sandboxes import create_kwargs

COUNTING = Path(__file__).with_name("counting_mcp_server.py")

TOOLS = catalogue([Offer("box", "run"), Offer("box", "read"), Offer("web", "search")])


def given(**by_name: dict[str, Any]) -> dict[str, Any]:
    """A task's further fields, with create_kwargs by tool or server."""
    return {"tools_kwargs": {name: {"create_kwargs": value} for name, value in by_name.items()}}


def test_what_a_task_gives_a_server_and_its_tools_is_one_set_of_arguments() -> None:
    fields = given(box={"a": 1}, run={"b": 2}, read={"a": 1}, search={"q": 3}, calc={"x": 4})
    by_server, unknown = create_kwargs(fields, TOOLS)
    assert by_server == {"box": {"a": 1, "b": 2}, "web": {"q": 3}}
    assert unknown == ("calc",)
    assert create_kwargs({}, TOOLS) == create_kwargs({"tools_kwargs": None}, TOOLS) == ({}, ())
    assert create_kwargs({"tools_kwargs": {"run": {"execute_kwargs": {}}}}, TOOLS)[0] == {"box": {}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools_kwargs": [1]}, "tools_kwargs is no object"),
        ({"tools_kwargs": {"run": 1}}, "tools_kwargs.run holds no object `create_kwargs`"),
        ({"tools_kwargs": {"run": {"create_kwargs": "x"}}}, "holds no object `create_kwargs`"),
        (given(run={"a": 1}, read={"a": 2}), "gives a twice and differently to the tools of box"),
    ],
)
def test_what_is_no_such_layout_fails_the_record(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolSessionFailed, match=message):
        create_kwargs(fields, TOOLS)


async def test_each_record_has_a_session_created_with_its_tasks_arguments(
    tmp_path: Path, counting_server: Callable[..., Any]
) -> None:
    journal = tmp_path / "journal"
    server = counting_server("http", "--create", "--journal", str(journal))
    async with tools_of(server.url) as box:
        assert names_of(box) == ["count", "meta", "environment", "pid", "hang", "die"]

        async def counted(start: int) -> list[str]:
            task = a_task(**given(count={"start": start}))
            async with box.session(task, f"record-{start}") as tools:
                return [(await tools.call("count", {})).text for _ in range(3)]

        counts = await asyncio.gather(*(counted(start) for start in (0, 10, 20)))
        assert counts == [["1", "2", "3"], ["11", "12", "13"], ["21", "22", "23"]]
        async with box.session(a_task(), "record") as tools:
            assert (await tools.call("count", {})).text == "1"
    lines = journal.read_text().splitlines()
    told = sorted(line for line in lines if line != "deleted")
    assert told == [
        "closed 1", "closed 13", "closed 23", "closed 3",
        "created 0", "created 0", "created 10", "created 20",
    ]  # fmt: skip
    assert lines.count("deleted") == 4


async def test_a_session_is_closed_when_its_record_is_cancelled(
    tmp_path: Path, counting_server: Callable[..., Any]
) -> None:
    journal = tmp_path / "journal"
    server = counting_server("http", "--create", "--journal", str(journal))
    async with tools_of(server.url) as box:
        at_work = asyncio.Event()

        async def attempt() -> None:
            async with box.session(a_task(), "record") as tools:
                await tools.call("count", {"by": 4})
                at_work.set()
                await tools.call("hang", {})

        record = asyncio.create_task(attempt())
        await at_work.wait()
        record.cancel()
        with pytest.raises(asyncio.CancelledError):
            await record
        assert journal.read_text().splitlines()[-2:] == ["closed 4", "deleted"]


async def test_a_refused_creation_fails_the_record_and_no_other(
    counting_server: Callable[..., Any],
) -> None:
    server = counting_server("http", "--create")
    async with tools_of(server.url) as box:
        with pytest.raises(ToolSessionFailed, match=r"opened no session .*must not be negative"):
            async with box.session(a_task(**given(count={"start": -1})), "record"):
                pass
        async with box.session(a_task(), "record") as tools:
            assert (await tools.call("count", {})).text == "1"


async def test_a_model_that_loses_its_session_is_told_and_gets_a_new_one(
    counting_server: Callable[..., Any],
) -> None:
    server = counting_server("http", "--create")
    task = a_task(**given(count={"start": 10}))
    async with session_with(server.url, task, tool_timeout=20, on_tool_outage="text") as tools:
        assert (await tools.call("count", {})).text == "11"
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start)
        both = await asyncio.gather(tools.call("count", {}), tools.call("count", {}))
        assert all(answer.is_error for answer in both)
        assert any("state of its tools with it" in answer.text for answer in both)
        assert (await tools.call("count", {})).text == "11"


async def test_a_record_whose_server_is_gone_or_came_back_without_its_state_is_an_outage(
    counting_server: Callable[..., Any],
) -> None:
    server = counting_server("http", "--create")
    async with tools_of(server.url, tool_timeout=20) as box:
        async with box.session(a_task(), "record") as tools:
            assert (await tools.call("count", {})).text == "1"
            await asyncio.to_thread(server.stop)
            with pytest.raises(ToolServerUnreachable, match="out of reach"):
                await tools.call("count", {})
            with pytest.raises(ToolServerUnreachable, match="it opened no session for a record"):
                async with box.session(a_task(), "another"):
                    pass
        await asyncio.to_thread(server.start)
        async with box.session(a_task(), "record") as tools:
            assert (await tools.call("count", {})).text == "1"
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.start)
            with pytest.raises(ToolServerUnreachable, match="lost the session of a record"):
                await tools.call("count", {})


async def test_the_config_file_opens_any_server_for_each_record(tmp_path: Path) -> None:
    entry = {"command": sys.executable, "args": [str(COUNTING), "stdio"], "session": "record"}
    async with tools_of(config_file(tmp_path, {"counting": entry})) as box:

        async def pid_and_count(record: str) -> tuple[str, str]:
            async with box.session(a_task(), record) as tools:
                return (await tools.call("pid", {})).text, (await tools.call("count", {})).text

        (pid, count), (other, of_other) = await asyncio.gather(
            pid_and_count("a"), pid_and_count("b")
        )
        assert pid != other
        assert (count, of_other) == ("1", "1")


async def test_a_server_without_sessions_gets_the_arguments_with_every_call(
    counting_server: Callable[..., Any],
) -> None:
    server = counting_server("http")
    task = a_task("line-7", **given(count={"start": 5}))
    async with session_with(server.url, task, "record-3") as tools:
        assert json.loads((await tools.call("meta", {})).text) == {
            "agentrl/create_kwargs": {"start": 5},
            "agentrl/record_id": "record-3",
            "agentrl/task_id": "line-7",
        }


async def test_names_that_no_tool_has_are_told_once(
    counting_server: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    server = counting_server("http")
    async with tools_of(server.url) as box:
        for record in ("a", "b"):
            async with box.session(a_task(**given(calc={"x": 1})), record):
                pass
    told = [line for line in caplog.messages if "'calc'" in line]
    assert told == ["tools_kwargs of tasks name 'calc': there is no such tool or server"]
