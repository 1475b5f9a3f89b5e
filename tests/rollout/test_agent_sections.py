"""Sections of the agent file that are mappings, as the original AgentRL has them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from chat_endpoint import ChatEndpoint, chat_endpoint

from agentrl.launcher.presets import DEMO
from agentrl.rollout.llm import client as llm_client
from agentrl.rollout.llm.client import LLMClient
from agentrl.rollout.llm.models import AgentModelsError, load_agent_models
from agentrl.rollout.scorers.judge import Judge
from agentrl.rollout.tool_calls import ParsedCall
from agentrl.rollout.tools.browse import BrowseAgent, BrowseRules

ORIGINAL = """
browse_agent:
  models:
    - {{api_key: "sk-1", base_url: "{url}", model: "reader"}}
    - {{api_key: "sk-2", base_url: "{url}", model: "second-reader"}}
  max_retries: 3
  retry_delay: 0.01
  backoff_factor: 2
  timeout: 180
  max_prompt_length: 60000
  min_prompt_length: 1500
  enable_logging: false
  browse_tools: [fetch_url, visit, execute_code]
  default_purpose:
    fetch_url: "Summarize the main content of this page."
    visit: "Summarize the main content of this page."
  tokenizer_path: ""
  status: true
scorer_agent:
  models:
    - {{api_key: "sk-3", base_url: "{url}", model: "judge"}}
  max_retries: 2
  retry_delay: 0.01
  backoff_factor: 2
  timeout: 60
  judge_prompt_template: |
    Does the prediction answer the question? A set is written {{{{1, 2}}}}.
    Question: {{question}}
    Labeled answer: {{labeled_answer}}
    Predicted answer: {{pred_answer}}
    Answer with one word, "Correct" or "Incorrect".
"""


@pytest.fixture
async def endpoint(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ChatEndpoint]:
    monkeypatch.setattr(llm_client, "_RETRY_PAUSE_S", 0.01)
    async with chat_endpoint() as endpoint:
        yield endpoint


def original(tmp_path: Path, url: str = "http://127.0.0.1:1/v1", **changed: str) -> Path:
    text = ORIGINAL.format(url=url)
    for key, value in changed.items():
        lines = [
            f"{line[: len(line) - len(line.lstrip())]}{key}: {value}"
            if line.strip().startswith(f"{key}:")
            else line
            for line in text.splitlines()
        ]
        text = "\n".join(lines)
    path = tmp_path / "agent_config.yml"
    path.write_text(text)
    return path


def test_each_model_has_what_its_section_says_of_all(tmp_path: Path) -> None:
    agents = load_agent_models(original(tmp_path))
    assert [model.model for model in agents.browse_agent] == ["reader", "second-reader"]
    assert {model.timeout for model in agents.browse_agent} == {180.0}
    (judge,) = agents.scorer_agent
    assert (judge.retries, judge.retry_delay, judge.key) == (1, 0.01, "sk-3")
    assert judge.max_tokens is None  # a verdict after a long thought is not cut off
    assert agents.browsing is not None
    assert agents.browsing.default_purpose.keys() == {"fetch_url", "visit"}
    assert agents.browsing.tokenizer_path is None


async def test_the_judge_is_asked_with_the_users_prompt(
    tmp_path: Path, endpoint: ChatEndpoint
) -> None:
    agents = load_agent_models(original(tmp_path, endpoint.url))
    endpoint.replies = {
        "judge": ["Correct", "<think>Correct?</think>**Incorrect**", "no idea", "correct."]
    }
    async with LLMClient(agents.scorer_agent, "the judge") as models:
        judge = Judge(models, agents.judge.judge_prompt_template)
        answers = ["{4}", "{5}", "4 {pred_answer}"]
        scores = [(await judge.score("2 + 2?", answer, "4")).value for answer in answers]
    assert scores == [1.0, 0.0, 1.0]  # the third after "no idea"
    (message,) = endpoint.requests[0]["messages"]
    assert message["role"] == "user"
    assert (
        "written {1, 2}.\nQuestion: 2 + 2?\nLabeled answer: 4\nPredicted answer: {4}\n"
        in (message["content"])
    )
    assert "Predicted answer: 4 {pred_answer}\n" in endpoint.requests[-1]["messages"][0]["content"]


async def test_lengths_are_tokens_of_the_tokenizer(tmp_path: Path, endpoint: ChatEndpoint) -> None:
    path = original(tmp_path, endpoint.url, min_prompt_length="9", max_prompt_length="12")
    agents = load_agent_models(path)
    assert agents.browsing is not None
    rules = BrowseRules.of_settings(agents.browsing, str(DEMO / "model"))
    endpoint.replies = {"reader": ["Many digits."]}
    visit = ParsedCall("visit", {})
    async with LLMClient(agents.browse_agent, "the browse agent") as models:
        browse = BrowseAgent(models, rules)
        # The demo's tokenizer makes a token of each digit.
        assert await browse.summarise("?", visit, "1234567890"[:9]) is None
        assert await browse.summarise("?", ParsedCall("search", {}), "1" * 50) is None
        whole = ParsedCall("visit", {"purpose": "The full content, please"})
        assert await browse.summarise("?", whole, "1" * 50) is None
        summary = await browse.summarise("?", visit, "1" * 50)
    assert summary is not None and summary.value == "Many digits."
    [request] = endpoint.requests
    assert request["messages"][-1]["content"].endswith(
        f"{'1' * 12}\n[38 further characters are not shown]"
    )


async def test_a_url_without_a_purpose_gets_the_default_one(tmp_path: Path) -> None:
    agents = load_agent_models(original(tmp_path))
    assert agents.browsing is not None
    rules = BrowseRules.of_settings(agents.browsing, str(DEMO / "model"))
    browse = BrowseAgent(LLMClient((), "the browse agent"), rules)

    def purpose(name: str, **arguments: str) -> object:
        return browse.with_purpose(ParsedCall(name, arguments)).arguments.get("purpose")

    assert purpose("visit", url="http://a") == "Summarize the main content of this page."
    assert purpose("visit", url="http://a", goal="the height") == "the height"
    assert purpose("visit", url="http://a", purpose="mine") == "mine"
    assert purpose("visit", path="a") is None
    assert purpose("execute_code", url="http://a") is None


async def test_without_status_nothing_is_read(tmp_path: Path, endpoint: ChatEndpoint) -> None:
    agents = load_agent_models(original(tmp_path, endpoint.url, status="false"))
    assert agents.browsing is not None
    rules = BrowseRules.of_settings(agents.browsing, str(DEMO / "model"))
    async with LLMClient(agents.browse_agent, "the browse agent") as models:
        page = "1" * 9000
        assert (
            await BrowseAgent(models, rules).summarise("?", ParsedCall("visit", {}), page) is None
        )
    assert endpoint.requests == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("scorer_agent: {models: []}", "scorer_agent: needs `models`"),
        (
            "scorer_agent: {models: [{model: m, base_url: 'http://h'}], max_retries: 0}",
            "scorer_agent.max_retries: 0 is no whole number above 0",
        ),
        (
            "scorer_agent: {models: [{model: m, base_url: 'http://h'}], "
            "judge_prompt_template: '{pred_answer} {guess}'}",
            "judge_prompt_template: must hold {pred_answer}",
        ),
        (
            "browse_agent: {models: [{model: m, base_url: 'http://h'}], brows_tools: [a]}",
            "browsing.brows_tools: Extra inputs",
        ),
        (
            "browse_agent: {models: [{model: m, base_url: '<YOUR_URL>'}]}",
            "browse_agent.0.base_url",
        ),
    ],
)
def test_a_mistake_is_named_with_its_key(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "a.yml").write_text(text)
    with pytest.raises(AgentModelsError) as caught:
        load_agent_models(tmp_path / "a.yml")
    assert told in str(caught.value)
