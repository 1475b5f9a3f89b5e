"""`agentrl plan`, and that a launch follows it before it starts anything."""

from pathlib import Path

import pytest
from model_families import write_family

from agentrl.cli import main
from agentrl.configs import ConfigError
from agentrl.launcher import run, sglang_setup
from agentrl.launcher.deployment import REPOSITORY, SGLANG_OF_SETUP
from agentrl.launcher.inventory import described
from agentrl.launcher.sglang_setup import set_up_sglang

DEMO_MODEL = str(REPOSITORY / "assets" / "demo" / "model")


def test_a_plan_is_printed_with_its_flags_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = ["--model_name_or_path", DEMO_MODEL]
    assert main(["plan", "--gpus", "8x24", *model, "--gpus_for_inference", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "train: GPUs 0-5 · dp 6 x tp 1 x cp 1" in said
    assert "serve: GPUs 6, 7 · services 2 x tp 1" in said
    whole = "a step: 120 rows, 20 for each of 6 data-parallel rank(s) · 15 groups of"
    assert f"{whole} --num_generations 8" in said
    assert "--micro_batch_tokens" in said and "--gpus_for_inference" not in said.split("flags:")[1]
    assert not [*tmp_path.iterdir()]
    own = ["--per_device_train_batch_size", "21"]
    assert main(["plan", "--gpus", "8x24", *model, "--gpus_for_inference", "2", *own]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "126 rows, 21 for each of 6 data-parallel rank(s) · no multiple of --num_gen" in said
    assert main(["plan", *model]) == 2
    assert "describe some with --gpus 8x80" in capsys.readouterr().err


def test_an_adapter_is_planned_for_a_model_of_experts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = ["--model_name_or_path", str(write_family("qwen3_moe", tmp_path / "model"))]
    assert main(["plan", "--gpus", "8x24", *model, "--lora_rank", "4"]) == 0
    said = capsys.readouterr()
    assert "train: GPUs" in " ".join(said.out.split()) and "Warning" not in said.err


def test_a_launch_that_does_not_fit_is_refused_before_anything_is_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "read_inventory", lambda environment, machines: described("1x0.1"))
    assert main(["launch", "grpo", "demo"]) == 2
    assert "do not fit; " in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_sglang_is_set_up_by_the_script_only_if_it_starts_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "setup.sh"
    script.write_text(f'echo "$1" >>{tmp_path}/asked; [ ! -f {tmp_path}/broken ]\n')
    monkeypatch.setattr(sglang_setup, "_SETUP", script)
    set_up_sglang(None)
    set_up_sglang("/opt/sglang/bin/python -m sglang.launch_server")
    assert not (tmp_path / "asked").exists()
    set_up_sglang(SGLANG_OF_SETUP)
    assert (tmp_path / "asked").read_text() == "sglang\n"
    (tmp_path / "broken").touch()
    with pytest.raises(ConfigError, match="could not be installed"):
        set_up_sglang(SGLANG_OF_SETUP)
