"""The demo's tools as a client sees them: a real server process, a real MCP client."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mcp import Client
from warehouse_tools import TASK_ID_KEY


async def call(client: Client, task_id: str, name: str, **arguments: object) -> str:
    """The text of a call that must succeed."""
    result = await client.call_tool(name, dict(arguments), meta={TASK_ID_KEY: task_id})
    text = text_of(result)
    assert not result.is_error, text
    return text


def text_of(result: object) -> str:
    [content] = result.content  # type: ignore[attr-defined]
    return str(content.text)


async def answer_with_tools(client: Client, task: dict[str, str]) -> str:
    """The answer to a task from its question and the tools alone."""
    task_id, query = task["id"], task["query"]
    if task["kind"] == "find":
        [item] = re.findall(r'"(\w+)"', query)
        bin_name = await call(client, task_id, "find", item=item)
        return await call(client, task_id, "stock", bin=bin_name)
    first, second = re.findall(r"\b[A-Z]\d\b", query)
    a = int(await call(client, task_id, "stock", bin=first))
    b = int(await call(client, task_id, "stock", bin=second))
    return await call(client, task_id, "add" if task["kind"] == "sum" else "sub", a=a, b=b)


async def test_the_tools_lead_to_the_answer_of_every_task_at_once_on_one_session(
    tool_server_url: str, train_tasks: list[dict[str, str]], heldout_tasks: list[dict[str, str]]
) -> None:
    tasks = train_tasks[:64] + heldout_tasks
    async with Client(tool_server_url) as client:
        answers = await asyncio.gather(*(answer_with_tools(client, task) for task in tasks))
    assert answers == [task["answer"] for task in tasks]


async def test_the_server_lists_four_tools_with_typed_arguments(tool_server_url: str) -> None:
    async with Client(tool_server_url) as client:
        tools = (await client.list_tools()).tools
    types = {
        tool.name: {name: spec["type"] for name, spec in tool.input_schema["properties"].items()}
        for tool in tools
    }
    assert types == {
        "find": {"item": "string"},
        "stock": {"bin": "string"},
        "add": {"a": "integer", "b": "integer"},
        "sub": {"a": "integer", "b": "integer"},
    }
    assert all(tool.description for tool in tools)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("find", {"item": "bolt"}), ("stock", {"bin": "A1"}), ("add", {"a": 1, "b": 2})],
)
@pytest.mark.parametrize("meta", [None, {TASK_ID_KEY: ""}, {TASK_ID_KEY: 7}])
async def test_a_call_that_names_no_task_is_refused(
    tool_server_url: str,
    name: str,
    arguments: dict[str, object],
    meta: dict[str, object] | None,
) -> None:
    async with Client(tool_server_url) as client:
        result = await client.call_tool(name, arguments, meta=meta)  # type: ignore[arg-type]
    assert result.is_error
    assert TASK_ID_KEY in text_of(result)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("add", {"a": 1, "b": "2"}, "b must be an integer"),
        ("sub", {"a": True, "b": 2}, "a must be an integer"),
        ("add", {"a": 10**30, "b": 2}, "a is too large"),
        ("find", {"item": 3}, "item must be a string"),
        ("stock", {"bin": ["A1"]}, "bin must be a string"),
        ("find", {"item": "unicorn"}, "no item 'unicorn'"),
        ("stock", {"bin": "ZZ9"}, "no bin 'ZZ9'"),
        ("find", {}, "Field required"),
        ("teleport", {}, "Unknown tool: teleport"),
    ],
)
async def test_a_mistaken_call_tells_the_model_what_was_wrong(
    tool_server_url: str, name: str, arguments: dict[str, object], message: str
) -> None:
    async with Client(tool_server_url) as client:
        result = await client.call_tool(name, arguments, meta={TASK_ID_KEY: "any-task"})  # type: ignore[typeddict-unknown-key]
    assert result.is_error
    assert message in text_of(result)


async def test_a_task_finds_the_same_warehouse_after_reconnecting(tool_server_url: str) -> None:
    async def first_bin_of_bolts(task_id: str) -> str:
        async with Client(tool_server_url) as client:
            result = await client.call_tool("find", {"item": "bolt"}, meta={TASK_ID_KEY: task_id})  # type: ignore[typeddict-unknown-key]
            return text_of(result)

    assert await first_bin_of_bolts("task-a") == await first_bin_of_bolts("task-a")
    bins = {await first_bin_of_bolts(f"task-{number}") for number in range(8)}
    assert len(bins) > 2


def test_a_server_that_others_reach_wants_a_token() -> None:
    script = Path(__file__).resolve().parents[2] / "assets" / "demo" / "tool_server.py"
    for host in ("0.0.0.0", "::"):
        refused = subprocess.run(
            [sys.executable, str(script), "--host", host, "--port", "0"],
            capture_output=True, text=True, env={**os.environ, "TOOLS_TOKEN": ""},
        )  # fmt: skip
        assert refused.returncode == 1
        assert f"--host {host}: other machines reach the server there" in refused.stderr
        assert "set TOOLS_TOKEN to one, and MCP_AUTH_TOKEN in the runs" in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
