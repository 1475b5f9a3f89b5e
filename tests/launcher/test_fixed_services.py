"""Where `agentrl sample` and `agentrl eval` place their services on a machine with GPUs."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from agentrl.cli import main
from agentrl.configs import ConfigError
from agentrl.configs.parsing import config_of
from agentrl.launcher import fixed_weights, sampling_run
from agentrl.launcher.deployment import read_deployment
from agentrl.launcher.fixed_weights import FixedServices, fixed_services
from agentrl.launcher.inventory import described
from agentrl.launcher.stack import Addresses, Stack, plan_parts, with_urls


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A folder that says that it is a model of 70B parameters, in 140 GB."""
    folder = tmp_path / "large"
    LlamaConfig(
        vocab_size=128_256, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=131_072,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def test_a_service_gets_as_many_gpus_as_its_model_needs(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def devices(gpus: str, number: str = "", **flags: int) -> list[str | None]:
        monkeypatch.setattr(fixed_weights, "read_inventory", lambda environment: described(gpus))
        given = {"model_name_or_path": str(large), "max_tokens": 16_384, **flags}
        deployment = read_deployment({"NUM_SERVICES": number})
        return [*fixed_services(config_of(given), given, deployment).devices]

    assert devices("8x80") == ["0,1,2,3", "4,5,6,7"]
    assert devices("8x192") == ["0,1", "2,3", "4,5", "6,7"]
    assert devices("8x80", "1") == ["0,1,2,3"]
    assert devices("8x80", inf_tp_size=8) == ["0,1,2,3,4,5,6,7"]
    with pytest.raises(ConfigError, match=r"a service of 1 GPU\(s\) each for a model of 70.6B"):
        devices("8x80", inf_tp_size=1)
    with pytest.raises(ConfigError, match=r"not fit; give fewer by NUM_SERVICES, a shorter --max"):
        devices("4x24")


def test_none_are_started_beside_given_ones_and_one_on_a_machine_without_gpus(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixed_weights, "read_inventory", lambda environment: described("8x80"))
    given = {"model_name_or_path": str(large), "inference_urls": "http://there:30000"}
    assert fixed_services(config_of(given), given, read_deployment({})).devices == ()
    on_cpu = {"model_name_or_path": str(large), "use_cpu": True}
    for variables, count in (({}, 1), ({"NUM_SERVICES": "3"}, 3)):
        found = fixed_services(config_of(on_cpu), on_cpu, read_deployment(variables))
        assert found == FixedServices((None,) * count)


def test_sampling_says_where_its_services_are_and_starts_them_there(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fixed_weights, "read_inventory", lambda environment: described("8x80"))
    planned: list[Stack] = []

    def check(stack: Stack) -> None:
        planned.append(stack)
        raise ConfigError("that is all")

    monkeypatch.setattr(sampling_run, "check_start", check)
    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "query": "?", "answer": "1"}\n')
    words = ["sample", "--model", str(large), "--tasks", "tasks.jsonl", "--max_tokens", "16384"]
    assert main(words) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "8 GPUs with 80 GiB free" in said
    assert "serve: GPU 0,1,2,3, 4,5,6,7 · services 2 x tp 4" in said
    stack = with_urls(planned[0], "mongodb://127.0.0.1:1")
    services = [
        part for part in plan_parts(stack, Addresses((1, 2), None), {}) if "service" in part.name
    ]
    given = [part.environment["CUDA_VISIBLE_DEVICES"] for part in services]
    assert given == ["0,1,2,3", "4,5,6,7"]
    for part in services:
        words = [*part.command]
        assert words[words.index("--inf_tp_size") + 1] == "4"
        assert words[words.index("--dtype") + 1] == "bfloat16"
