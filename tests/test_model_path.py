"""A folder that is given as a model and is none says what it is and what makes a model of it."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentrl import cli
from agentrl.configs import ConfigError
from agentrl.configs.model_path import model_folder, trainable_folder


def with_files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (("trainer_state.json", "__0_0.distcp"), "is a checkpoint of a run"),
        (("checkpoint-5/__0_0.distcp", "metrics.jsonl"), "is the folder of a run"),
        (("adapter_config.json", "adapter_model.safetensors"), "is an adapter of PEFT"),
        (("hf/config.json",), "hf has: give that folder"),
        (("model.safetensors",), "has no config.json: give the folder"),
    ],
)
def test_what_is_no_model_says_what_it_is(files: Sequence[str], said: str, tmp_path: Path) -> None:
    given = with_files(tmp_path / "given", *files)
    with pytest.raises(ConfigError, match="MODEL") as refused:
        model_folder(str(given), "MODEL")
    assert said in str(refused.value)
    if "distcp" in str(files):
        assert f"`agentrl export {given} FOLDER`" in str(refused.value)


def test_a_quantised_model_is_refused_where_it_is_to_be_trained(tmp_path: Path) -> None:
    folder = with_files(tmp_path / "given", "config.json")
    assert trainable_folder(str(folder), "MODEL") == folder
    quantised = {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(quantised))
    assert model_folder(str(folder), "MODEL") == folder
    with pytest.raises(ConfigError, match=r"MODEL .*quantised \(mxfp4\).*in bfloat16"):
        trainable_folder(str(folder), "MODEL")


def test_a_checkpoint_of_another_trainer_is_a_model_as_it_is(tmp_path: Path) -> None:
    theirs = with_files(tmp_path / "checkpoint-500", "config.json", "trainer_state.json")
    assert model_folder(str(theirs), "MODEL") == theirs


@pytest.mark.parametrize(
    "command",
    [
        ("serve", "--model", "CHECKPOINT"),
        ("doctor", "--model", "CHECKPOINT"),
        ("launch", "grpo", "other", "--train_file", "none", "--model_name_or_path", "CHECKPOINT"),
        ("export", "CHECKPOINT", "out", "--model_name_or_path", "CHECKPOINT"),
    ],
)
def test_every_verb_that_takes_a_model_points_to_export(
    command: Sequence[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = a_checkpoint(tmp_path / "output" / "mine" / "checkpoint-5")
    status = cli.main([str(checkpoint) if word == "CHECKPOINT" else word for word in command])
    said = capsys.readouterr()
    assert status in (1, 2)
    assert f"`agentrl export {checkpoint} FOLDER` writes it as a model" in said.out + said.err


def test_an_evaluation_of_a_checkpoint_is_told_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    a_checkpoint(tmp_path / "output" / "mine" / "checkpoint-5")
    assert cli.main(["eval", "output/mine/checkpoint-5"]) == 2
    assert "`agentrl eval mine --checkpoint output/mine/checkpoint-5`" in capsys.readouterr().err


def test_the_export_of_a_model_folder_says_that_it_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = with_files(tmp_path / "checkpoint-500", "config.json", "trainer_state.json")
    assert cli.main(["export", str(theirs), str(tmp_path / "out")]) == 2
    assert "is no checkpoint of a run but a model folder" in capsys.readouterr().err


def a_checkpoint(folder: Path) -> Path:
    with_files(folder, "__0_0.distcp", ".metadata")
    state = {
        "step": 5, "version": 5, "run_name": "mine", "fence": 1, "processes": 1,
        "config": {"model": {"model_name_or_path": "start"}},
    }  # fmt: skip
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder
