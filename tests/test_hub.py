"""Models by their name on a hub: a server on this machine, asked by the real client."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import COMMIT, served_hub

from agentrl.configs import ConfigError, parse_config
from agentrl.configs.model_path import model_folder

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "assets" / "demo" / "model"
NO_HUB = "http://127.0.0.1:1"


def agentrl(
    tmp_path: Path, endpoint: str, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `agentrl` in an empty folder, with this hub and a cache of its own."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "cache"), **variables,
    }  # fmt: skip
    folder = tmp_path / "empty"
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", "agentrl.cli", *words],
        cwd=folder, env=environment, text=True, capture_output=True, timeout=120,
    )  # fmt: skip


def test_a_name_becomes_the_folder_of_its_download_which_is_made_once(tmp_path: Path) -> None:
    with served_hub("lab/tiny", MODEL) as (hub, downloaded):
        first = agentrl(
            tmp_path, hub, "config", "run", "--json", "--model_name_or_path", "lab/tiny"
        )
        assert first.returncode == 0, first.stderr
        assert f"model lab/tiny: from {hub}" in first.stderr and "100%" in first.stderr
        assert sorted(downloaded) == sorted(file.name for file in MODEL.iterdir())
        again = agentrl(tmp_path, hub, "config", "run", "--json", MODEL="lab/tiny")
        assert again.stdout == first.stdout and len(downloaded) == len(set(downloaded))
    folder = next((tmp_path / "cache").rglob(COMMIT))
    assert f'"model_name_or_path": "{folder}"' in first.stdout
    assert (folder / "model.safetensors").read_bytes() == (MODEL / "model.safetensors").read_bytes()
    # With the hub gone, what is in the cache is enough.
    offline = agentrl(tmp_path, NO_HUB, "config", "run", "--json", MODEL="lab/tiny")
    assert offline.stdout == first.stdout, offline.stderr


@pytest.mark.parametrize(
    ("reachable", "sentence"),
    [
        (True, "and no model of this name at http://127.0.0.1"),
        (False, "and http://127.0.0.1:1 does not give a model of this name (Got: ConnectError"),
    ],
    ids=["no such model", "no hub"],
)
def test_a_name_that_is_not_to_be_had_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reachable: bool, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with served_hub("lab/tiny", MODEL) as (hub, downloaded):
        monkeypatch.setenv("HF_ENDPOINT", hub if reachable else NO_HUB)
        with pytest.raises(ConfigError) as error:
            parse_config(["--reference_model_name_or_path", "lab/none", "--beta", "0.1"])
    said = str(error.value)
    assert said.startswith(
        "--reference_model_name_or_path lab/none: there is no such folder here, "
    )
    assert sentence in said and "\n" not in said and not downloaded


def test_a_folder_is_never_looked_for_on_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lab").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", NO_HUB)
    with pytest.raises(ConfigError, match="--model lab/tiny: there is no such folder in /"):
        model_folder("lab/tiny", "--model")
    assert parse_config(["--model_name_or_path", "lab/tiny"]).model.model_name_or_path == "lab/tiny"
