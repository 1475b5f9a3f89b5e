"""A folder's weights, read in parts, are those that transformers loads whole."""

import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from launching import launch
from loading_worker import LARGE, check_equal
from parallel_cases import CASES
from tiny import tiny_model
from transformers import Qwen3ForCausalLM

from agentrl.configs import ComputeConfig, ConfigError, ModelConfig
from agentrl.training.model.loading import empty_model, fill
from agentrl.training.model.prepare import prepare_model
from agentrl.training.parallel import make_mesh


@pytest.mark.parametrize("case", ["chains", "qwen2", "llama", "qwen3_moe"])
@pytest.mark.parametrize("files", ["one", "many"])
def test_each_model_is_loaded_as_it_was_saved(case: str, files: str, tmp_path: Path) -> None:
    size = "20KB" if files == "many" else "50GB"
    CASES[case].model().bfloat16().save_pretrained(tmp_path / case, max_shard_size=size)
    assert (len(list((tmp_path / case).glob("*.safetensors"))) > 1) == (files == "many")
    check_equal(tmp_path / case, make_mesh(Accelerator(cpu=True)))


def test_experts_are_separate_in_the_files_that_were_read(tmp_path: Path) -> None:
    CASES["qwen3_moe"].model().save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in index["weight_map"]


def test_a_folder_without_safetensors_is_loaded_by_one_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with caplog.at_level("INFO", logger="agentrl"):
        check_equal(tmp_path, make_mesh(Accelerator(cpu=True)))
    assert "loaded by one process" in caplog.text


def test_weights_of_another_shape_than_the_config_are_refused(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    model = empty_model(ModelConfig(model_name_or_path=str(tmp_path)))
    mesh = make_mesh(Accelerator(cpu=True))
    prepare_model(model, mesh, ComputeConfig())
    with pytest.raises(ConfigError, match=r"gate_proj.weight is \[48, 32\] in the files and \[64"):
        fill(model, ModelConfig(model_name_or_path=str(tmp_path)), mesh, mesh.device)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    tiny_model().config.save_pretrained(tmp_path)
    model = empty_model(ModelConfig(model_name_or_path=str(tmp_path)))
    mesh = make_mesh(Accelerator(cpu=True))
    prepare_model(model, mesh, ComputeConfig())
    with pytest.raises(ConfigError, match="the model cannot be loaded"):
        fill(model, ModelConfig(model_name_or_path=str(tmp_path)), mesh, mesh.device)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("processes", [2, 4])
def test_however_it_is_sharded_each_process_reads_its_part(processes: int, tmp_path: Path) -> None:
    for name, case in CASES.items():
        case.model().save_pretrained(tmp_path / name)
    Qwen3ForCausalLM(LARGE).save_pretrained(tmp_path / "large")
    program = Path(__file__).parent / "loading_worker.py"
    process = launch(program, processes, tmp_path, MALLOC_MMAP_THRESHOLD_="1048576")
    assert process.wait(timeout=180) == 0, (tmp_path / "log").read_text()[-5000:]
