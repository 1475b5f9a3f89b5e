"""The browse agent, against a real OpenAI-compatible HTTP server."""

from collections.abc import AsyncIterator

import pytest
from chat_endpoint import ChatEndpoint, chat_endpoint

from agentrl.configs import ContextConfig
from agentrl.rollout.llm import client as llm_client
from agentrl.rollout.llm.client import LLMClient, LLMReply, ModelsUnreachable
from agentrl.rollout.llm.models import AgentModel
from agentrl.rollout.tool_calls import ParsedCall
from agentrl.rollout.tools.browse import BrowseAgent, BrowseRules

FETCH = ParsedCall("fetch", {"url": "http://a.example/größe"})
PAGE = "<p>The tower is 330 m high.</p>" * 20


@pytest.fixture
async def endpoint(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ChatEndpoint]:
    monkeypatch.setattr(llm_client, "_RETRY_PAUSE_S", 0.01)
    async with chat_endpoint() as endpoint:
        yield endpoint


async def summarise(
    endpoint: ChatEndpoint, *names: str, config: ContextConfig | None = None
) -> LLMReply[str] | None:
    models = [AgentModel(model=name, base_url=endpoint.url, retries=1) for name in names]
    async with LLMClient(models, "the browse agent") as opened:
        flags = config or ContextConfig(browse_min_chars=100)
        browse = BrowseAgent(opened, BrowseRules.of_flags(flags))
        return await browse.summarise("How high is the tower?", FETCH, PAGE)


async def test_a_model_reads_the_result_with_question_and_call_in_view(
    endpoint: ChatEndpoint,
) -> None:
    endpoint.replies = {"a": ["<think>hm</think>\n330 m."]}
    assert await summarise(endpoint, "a") == LLMReply("330 m.", "a")
    [request] = endpoint.requests
    material = request["messages"][-1]["content"]
    assert "How high is the tower?" in material
    assert 'fetch {"url":"http://a.example/größe"}' in material
    assert material.endswith(PAGE)


async def test_a_result_that_no_model_could_take_in_is_cut_and_says_so(
    endpoint: ChatEndpoint,
) -> None:
    endpoint.replies = {"a": ["Little."]}
    await summarise(endpoint, "a", config=ContextConfig(browse_min_chars=50, browse_max_chars=100))
    material = endpoint.requests[0]["messages"][-1]["content"]
    assert material.endswith(f"{PAGE[:100]}\n[{len(PAGE) - 100} further characters are not shown]")


async def test_models_are_tried_in_order_and_an_empty_reply_will_not_do(
    endpoint: ChatEndpoint,
) -> None:
    endpoint.replies = {"a": [503, "<think>nothing</think> "], "b": [401], "c": ["330 m."]}
    assert await summarise(endpoint, "a", "b", "c") == LLMReply("330 m.", "c")
    assert [request["model"] for request in endpoint.requests] == ["a", "a", "b", "c"]


async def test_when_no_model_is_in_reach_it_is_an_outage(endpoint: ChatEndpoint) -> None:
    endpoint.replies = {"a": [500, 500], "b": [503, 503]}
    with pytest.raises(ModelsUnreachable, match="the browse agent is out of reach") as caught:
        await summarise(endpoint, "a", "b")
    assert caught.value.dependency == "the browse agent"


async def test_when_no_reply_will_do_there_is_no_summary(
    endpoint: ChatEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint.replies = {"a": ["", ""]}
    assert await summarise(endpoint, "a") is None
    assert "no browse agent read the result of fetch" in caplog.text


@pytest.mark.parametrize(
    ("patterns", "tool", "length", "read"),
    [
        ("*", "fetch", 11, True),
        ("*", "fetch", 10, False),
        ("fetch_*, browse", "fetch_url", 11, True),
        ("fetch_*, browse", "browse", 11, True),
        ("fetch_*, browse", "search", 11, False),
    ],
)
async def test_long_results_of_the_named_tools_are_read(
    endpoint: ChatEndpoint, patterns: str, tool: str, length: int, read: bool
) -> None:
    rules = BrowseRules.of_flags(ContextConfig(browse_tools=patterns, browse_min_chars=10))
    endpoint.replies = {"a": ["Many x."]}
    for models in ([AgentModel(model="a", base_url=endpoint.url)], []):
        async with LLMClient(models, "the browse agent") as opened:
            browse = BrowseAgent(opened, rules)
            summary = await browse.summarise("?", ParsedCall(tool, {}), "x" * length)
            assert (summary is not None) is (read and bool(models))
