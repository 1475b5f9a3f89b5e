"""The memory model: counted by hand, against measured peaks, and in its table."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launching import HERE, launch
from published_models import MODELS
from transformers import AutoModelForCausalLM, PreTrainedConfig

from agentrl.cli import main as agentrl
from agentrl.training.model.memory_model import (
    MemorySetup,
    ModelShape,
    estimate,
    layer_bytes,
    longest_line,
)
from agentrl.training.model.memory_report import shape_of

DOCS = HERE.parents[1] / "docs" / "reference" / "memory.md"
SHAPE = ModelShape(
    hidden=10, layers=3, query=8, key=4, intermediate=20, vocabulary=100,
    layer_parameters=1000, root_parameters=500, layer_trained=1000, root_trained=500,
)  # fmt: skip
SETUP = MemorySetup(tokens=7, chunk=5)
LONG = MemorySetup(131072, fsdp=8, cp=8, bf16=True, checkpointing=True)
IN_TABLE = ("Qwen3-0.6B", "Qwen3-8B", "Qwen3-30B-A3B")


def model_shape(config: PreTrainedConfig) -> ModelShape:
    with torch.device("meta"):
        return shape_of(AutoModelForCausalLM.from_config(config))


def test_a_step_counted_by_hand() -> None:
    found = estimate(SHAPE, SETUP)
    assert found.weights == found.gradients == 4 * 3500
    assert found.optimizer == 8 * 3500
    assert found.gathered == 0
    # two norms of three widths of 10, queries and outputs of 8, keys and values of 4, 4 times 20
    layer = 4 * (2 * 3 * 10 + 2 * 8 + 2 * 4 + 4 * 20)
    assert found.saved == 7 * (3 * layer + 4 * (3 * 10 + 10))
    assert found.logits == 5 * 100 * 4
    assert estimate(SHAPE, replace(SETUP, entropy=True)).logits == 3 * found.logits
    assert found.peak == 16 * 3500 + found.saved + max(found.recomputed, found.logits)


def test_each_degree_and_flag_takes_from_what_it_should() -> None:
    plain = estimate(SHAPE, replace(SETUP, fsdp=2, tokens=64))

    def with_(**changes: object) -> dict[str, float]:
        found = estimate(SHAPE, replace(SETUP, **{"fsdp": 2, "tokens": 64, **changes}))  # type: ignore[arg-type]
        return {
            name: getattr(found, name) / getattr(plain, name)
            for name in ("weights", "gradients", "optimizer", "saved", "logits", "gathered")
        }

    assert with_(fsdp=4)["weights"] == pytest.approx(0.5)
    assert with_(cp=2)["saved"] == pytest.approx(0.5)
    assert with_(tp=2)["gathered"] == pytest.approx(0.5)
    assert with_(tp=2)["logits"] == 1.0, "half of them, and a copy of the head's own"
    assert with_(chunk=1)["logits"] == pytest.approx(0.2)
    assert with_(bf16=True)["gathered"] == pytest.approx(0.5)
    assert with_(checkpointing=True)["saved"] < 0.2
    offloaded = estimate(SHAPE, replace(SETUP, fsdp=2, param_offload=True))
    # Weights and gradients are pinned, and torch rounds up to twice of that.
    assert offloaded.states == 0 and offloaded.host == (2 * 8 + 8) * 1750
    away = estimate(SHAPE, replace(SETUP, fsdp=2, tokens=64, activation_offloading=True))
    layers = 3 * 64 * layer_bytes(SHAPE, SETUP)
    assert away.host == 2 * layers and away.saved == plain.saved - layers + layers // 3
    frozen = estimate(replace(SHAPE, layer_trained=10, root_trained=0), SETUP)
    assert (frozen.optimizer, frozen.gradients) == (8 * 30, 4 * 30)
    assert frozen.weights == 4 * 3500


def test_the_longest_line_is_the_last_that_fits() -> None:
    limit = estimate(SHAPE, replace(SETUP, tokens=1000)).peak
    longest = longest_line(SHAPE, SETUP, limit)
    assert longest == 1000
    assert longest_line(SHAPE, SETUP, 100) == 0


def test_shapes_are_counted_from_the_model() -> None:
    dense, mixture = model_shape(MODELS["Qwen3-8B"]), model_shape(MODELS["Qwen3-30B-A3B"])
    assert dense.parameters == pytest.approx(8.19e9, rel=0.001)
    assert mixture.parameters == pytest.approx(30.53e9, rel=0.001)
    assert mixture.expert_parameters == 128 * 3 * 2048 * 768
    assert dense.query_key_norm and dense.key == 1024


@pytest.mark.parametrize("name", IN_TABLE)
def test_the_table_of_the_docs_is_what_the_model_says(name: str) -> None:
    found = estimate(model_shape(MODELS[name]), LONG)
    fields = (
        found.states, found.gradients, found.gathered, found.saved, found.recomputed, found.logits,
        found.peak,
    )  # fmt: skip
    row = " | ".join([name, *(f"{field / 2**30:.1f}" for field in fields)])
    assert f"| {row} |" in DOCS.read_text(), row


def test_the_command_says_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    MODELS["Qwen3-8B"].save_pretrained(tmp_path)
    flags = [
        "memory", "--model_name_or_path", str(tmp_path), "--processes", "8", "--cp_size", "8",
        "--bf16", "--gradient_checkpointing", "--micro_batch_tokens", "131072",
    ]  # fmt: skip
    assert agentrl([*flags, "--device_gib", "80"]) == 0
    said = capsys.readouterr().out
    assert "8.19B parameters" in said
    peak = re.search(r"peak on the device\s*│\s*([\d.]+)", said)
    expected = estimate(model_shape(MODELS["Qwen3-8B"]), LONG).peak / 2**30
    assert peak is not None and float(peak[1]) == pytest.approx(expected, abs=0.01)
    assert agentrl([*flags, "--device_gib", "20"]) == 1
    assert "does not fit in 20 GiB" in capsys.readouterr().out
    assert agentrl([*flags, "--tp_size", "3"]) == 2


@pytest.mark.slow
@pytest.mark.timeout(320)  # 95 CPU seconds of steps
@pytest.mark.parametrize("processes", [1, 2])
def test_measured_peaks_are_what_the_model_expects(processes: int, tmp_path: Path) -> None:
    program = HERE / "peak_worker.py"
    process = launch(program, processes, tmp_path, MALLOC_MMAP_THRESHOLD_="65536")
    assert process.wait(timeout=300) == 0, (tmp_path / "log").read_text()[-5000:]
    for case, (measured, expected) in json.loads((tmp_path / "result.json").read_text()).items():
        assert expected == pytest.approx(measured, rel=0.2), case
