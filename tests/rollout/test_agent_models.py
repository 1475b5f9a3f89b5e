"""The file of --agent_config_path."""

from pathlib import Path

import pytest

from agentrl.rollout.llm.models import AgentModels, AgentModelsError, load_agent_models

EXAMPLE = Path(__file__).parents[2] / "assets" / "agent_config_example.yml"


def test_the_example_is_valid_and_lists_models_in_order() -> None:
    config = load_agent_models(EXAMPLE)
    assert [model.model for model in config.scorer_agent] == ["Qwen3-32B", "gpt-4.1-mini"]
    assert config.scorer_agent[0].base_url == "http://127.0.0.1:8000/v1"
    assert len(config.browse_agent) == 1
    assert config.ranking_models == config.ruler_agent != ()


def test_without_models_of_its_own_the_ruler_asks_the_judges(tmp_path: Path) -> None:
    file = tmp_path / "agents.yml"
    file.write_text("scorer_agent: [{model: m, base_url: 'http://h/v1'}]")
    config = load_agent_models(file)
    assert config.ranking_models == config.scorer_agent


def test_a_reward_service_has_a_url_and_perhaps_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "agents.yml"
    file.write_text("http_scorer: {url: 'http://h/score', token_env: REWARD_TOKEN}")
    with pytest.raises(AgentModelsError, match="http_scorer: the environment variable REWARD_T"):
        load_agent_models(file)
    monkeypatch.setenv("REWARD_TOKEN", "secret")
    service = load_agent_models(file).http_scorer
    assert service is not None and service.key == "secret"


def test_no_file_is_a_config_without_models() -> None:
    assert load_agent_models(None) == AgentModels()


def test_a_key_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "agents.yml"
    file.write_text("scorer_agent: [{model: m, base_url: 'http://h/v1', api_key_env: JUDGE_KEY}]")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    assert load_agent_models(file).scorer_agent[0].key == "secret"


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("scorer_agent: [{base_url: 'http://h'}]", ["scorer_agent.0.model: Field required"]),
        ("scorer_agent: [{model: m, base_url: h}]", ["scorer_agent.0.base_url"]),
        ("judges: []", ["judges: Extra inputs are not permitted"]),
        (
            "scorer_agent: [{model: m, base_url: 'http://h', tempratur: 1, retries: -1}]",
            ["scorer_agent.0.tempratur", "scorer_agent.0.retries"],
        ),
        (
            "scorer_agent: [{model: m, base_url: 'http://h', api_key_env: NOT_SET_ANYWHERE}]",
            ["the environment variable NOT_SET_ANYWHERE is not set"],
        ),
        (
            "scorer_agent: [{model: m, base_url: 'http://h', api_key: a, api_key_env: B}]",
            ["give api_key or api_key_env, not both"],
        ),
        ("- a", ["holds no mapping"]),
        ("a: [", ["is not YAML"]),
    ],
)
def test_a_fault_is_named_with_file_and_key(tmp_path: Path, text: str, faults: list[str]) -> None:
    file = tmp_path / "agents.yml"
    file.write_text(text)
    with pytest.raises(AgentModelsError) as caught:
        load_agent_models(file)
    for part in (str(file), "--agent_config_path", *faults):
        assert part in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(AgentModelsError, match=r"none\.yml cannot be read: No such file"):
        load_agent_models(tmp_path / "none.yml")
