"""`agentrl doctor`: which tools a run would have, from which servers; whether a model will do."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from agentrl.launcher.doctor import main

DEMO_MODEL = Path(__file__).resolve().parents[2] / "assets" / "demo" / "model"
COUNTING = Path(__file__).parents[1] / "rollout" / "tools" / "counting_mcp_server.py"


def config_file(folder: Path, *flags: str) -> Path:
    entry = {"command": sys.executable, "args": [str(COUNTING), "stdio", *flags]}
    path = folder / "tools.json"
    path.write_text(json.dumps({"mcpServers": {"one": entry, "two": entry}}))
    return path


def test_the_tools_are_listed_by_server_with_the_names_that_the_model_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_file(tmp_path, "--create")
    main(["--mcp_manager_url", str(file), "--mcp_allow_tools", "count,one.hang"])
    [line] = [line for line in capsys.readouterr().out.splitlines() if " tools: " in line]
    assert "3 tools: one__count, hang (of one (`" in line
    assert "`), a session for each record); two__count (of two (`" in line
    assert "tools of the same name have their server's in front" in line


def test_tools_that_cannot_be_had_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--mcp_manager_url", str(tmp_path / "none.json")]) == 1
    assert "wrong tools: --mcp_manager_url" in capsys.readouterr().out


def test_a_model_that_is_no_folder_is_one_sentence_that_says_how_to_get_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for path, words in (
        (str(tmp_path / "nowhere"), "there is no such folder: give the folder of a Hugging Face"),
        (str(tmp_path / "file"), "is a file"),
        (str(tmp_path / "empty"), "has no config.json"),
    ):
        assert main(["--model", path]) == 1
        out = capsys.readouterr().out
        [line] = [line for line in out.splitlines() if line.startswith("wrong model: ")]
        assert path in line and words in line
        *_, found, training, result = out.splitlines()
        assert (found, result) == (line, "1 of 7 checks failed")
        assert "not probed" in training


def test_a_model_is_probed_as_a_run_would_train_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*flags: str) -> str:
        main(["--model", str(folder), *flags])
        [line] = [line for line in capsys.readouterr().out.splitlines() if " training: " in line]
        return line

    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    assert "trained as tree with agentrl_tree: logprobs differ by " in said()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config["max_position_embeddings"] = 512
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert "trained as tree" in said("--max_tokens", "512")
    line = said("--max_tokens", "4096")
    assert line.startswith("wrong") and "depend on the rows before it, by " in line


def test_weights_that_cannot_be_read_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    (folder / "model.safetensors").write_bytes(b"cut off")
    assert main(["--model", str(folder)]) == 1
    [line] = [line for line in capsys.readouterr().out.splitlines() if " training: " in line]
    assert line.startswith("wrong") and "the model cannot be loaded (" in line
