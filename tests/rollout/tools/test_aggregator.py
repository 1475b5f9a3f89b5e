"""Tools behind an aggregator's HTTP API."""

import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aggregator_server import AggregatorAPI
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from tool_session import a_task, names_of, session_with, tools_of

from agentrl.configs import ConfigError
from agentrl.rollout.tools.aggregator import read_answer
from agentrl.rollout.tools.calls import ToolServerUnreachable
from agentrl.rollout.tools.connection import ConnectFailed
from agentrl.rollout.tools.results import read_result


async def serve(api: AggregatorAPI) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(api.app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/mcpapi"


@pytest.fixture
async def url() -> AsyncIterator[str]:
    runner, url = await serve(AggregatorAPI())
    yield url
    await runner.cleanup()


async def test_its_servers_tools_are_offered_by_name_and_called_by_server(url: str) -> None:
    async with tools_of(url) as box:
        assert names_of(box) == [
            "web__search", "fetch", "whose", "hang", "files__search", "answer",
        ]  # fmt: skip
        async with box.session(a_task(), "record") as tools:
            assert (await tools.call("web__search", {"query": "a"})).text == "web: a"
            assert (await tools.call("files__search", {"name": "b"})).text == "files: b"
            assert json.loads((await tools.call("whose", {})).text) == ["task", "record"]


async def test_servers_are_picked_by_name(url: str) -> None:
    async with tools_of(url, mcp_server_name="files") as box:
        assert names_of(box) == ["search", "answer"]
    async with tools_of(url, mcp_server_name="all") as box:
        assert len(names_of(box)) == 6
    with pytest.raises(ConfigError, match=r"--mcp_server_name mail: .* there are files, web"):
        async with tools_of(url, mcp_server_name="mail,web"):
            pass


async def test_what_it_cannot_pass_on_and_tell_apart_is_said(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    task = a_task(tools_kwargs={"fetch": {"create_kwargs": {"depth": 1}}})
    async with session_with(url, task):
        pass
    assert "tools_kwargs of tasks name 'web': an aggregator takes no create_kwargs" in caplog.text
    with pytest.raises(ConfigError, match="two servers are named files; write NAME=URL"):
        async with tools_of(f"one={url},two={url}"):
            pass


@pytest.mark.parametrize(
    ("body", "text", "is_error"),
    [
        ({"json": {"status": "success", "content": {"a": 1}}}, '{"a":1}', False),
        ({"json": {"content": {"result": "x"}}}, "x", False),
        ({"json": {"content": [1, 2]}}, "[1,2]", False),
        ({"json": {"a": 1}}, '{"a":1}', False),
        ({"json": "plain"}, "plain", False),
        ({"json": {"status": "error", "content": "no"}}, "no", True),
        ({"json": {"content": {"error": "no", "detail": "why"}}}, "no: why", True),
        ({"json": {"status_code": 500, "detail": "it broke"}}, "it broke", True),
        ({"json": {"detail": "bad arguments"}, "status": 422}, "bad arguments", True),
        ({"json": {"content": [{"type": "text", "text": "no"}], "isError": True}}, "no", True),
    ],
)
async def test_its_answers_are_read_in_every_form(
    url: str, body: dict[str, Any], text: str, is_error: bool
) -> None:
    async with session_with(url) as tools:
        answer = await tools.call("answer", {"body": body})
        assert (answer.text, answer.is_error) == (text, is_error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["status", "status_code", "content", "error", "detail", "result", "type", "text"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_whatever_it_answers_is_a_text(body: Any) -> None:
    reading = read_result(read_answer(body))
    assert isinstance(reading.text, str)


async def test_what_fails_is_a_text_for_the_model(url: str) -> None:
    async with session_with(url, tool_timeout=2, on_tool_outage="text") as tools:
        assert "HTTP 502" in (await tools.call("fetch", {})).text
        assert "did not answer within 2 s" in (await tools.call("hang", {})).text
        assert (await tools.call("files__search", {"name": "c"})).text == "files: c"


async def test_an_aggregator_that_is_gone_costs_the_call() -> None:
    runner, url = await serve(AggregatorAPI())
    async with session_with(url, on_tool_outage="text") as tools:
        await runner.cleanup()
        answer = await tools.call("whose", {})
        assert answer.is_error and "cannot be reached" in answer.text


async def test_an_aggregator_that_is_gone_or_has_lost_a_server_is_an_outage() -> None:
    runner, url = await serve(AggregatorAPI())
    async with session_with(url, tool_timeout=2) as tools:
        with pytest.raises(ToolServerUnreachable, match=f"{url} is out of reach: HTTP 502") as met:
            await tools.call("fetch", {})
        assert (await tools.call("hang", {})).is_error  # it is slow, and its aggregator there
        await met.value.probe()
        await runner.cleanup()
        with pytest.raises(ToolServerUnreachable, match=f"{url} is out of reach"):
            await tools.call("whose", {})
        with pytest.raises(ConnectFailed):
            await met.value.probe()


async def test_an_aggregator_that_takes_no_call_now_is_an_outage_whatever_it_says() -> None:
    runner, url = await serve(AggregatorAPI())
    async with session_with(url) as tools:
        busy = {"json": {"detail": "slow down"}, "status": 429}
        with pytest.raises(ToolServerUnreachable, match="HTTP 429"):
            await tools.call("answer", {"body": busy})
    await runner.cleanup()


async def test_the_token_is_sent_and_a_wrong_one_is_refused() -> None:
    runner, url = await serve(AggregatorAPI(token="secret"))
    async with session_with(url, mcp_auth_token="secret") as tools:
        assert not (await tools.call("whose", {})).is_error
    with pytest.raises(ToolServerUnreachable, match=r"HTTP 401.*--mcp_auth_token"):
        async with tools_of(url, startup_timeout_s=30):
            pass
    await runner.cleanup()


async def test_one_that_nobody_serves_is_one_sentence_with_its_url() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/mcpapi"
        with pytest.raises(ToolServerUnreachable, match=f"{url} could not be used"):
            async with tools_of(url, startup_timeout_s=0):
                pass
