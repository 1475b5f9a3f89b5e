"""One process and two FSDP2 processes are the same training."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
CONFIG = HERE.parents[1] / "assets" / "fsdp2_cpu.yml"


def launch(processes: int, out: Path) -> subprocess.Popen[bytes]:
    out.mkdir()
    log = (out / "log").open("wb")
    return subprocess.Popen(
        [
            sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIG),
            "--num_processes", str(processes), "--main_process_port", "0",
            str(HERE / "worker.py"), str(out),
        ],
        stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders of the worker's results, by number of processes."""
    folders = {n: tmp_path_factory.mktemp("ranks") / str(n) for n in (1, 2)}
    running = {n: launch(n, folder) for n, folder in folders.items()}
    for n, process in running.items():
        assert process.wait(timeout=100) == 0, (folders[n] / "log").read_text()
    return folders


def results(folder: Path) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = json.loads((folder / "result.json").read_text())
    return read


def test_each_step_has_the_same_loss_gradient_norm_and_statistics(launched: dict[int, Path]) -> None:
    for one, two in zip(results(launched[1]), results(launched[2]), strict=True):
        del one["n_micro_batches"], two["n_micro_batches"]
        assert one == pytest.approx(two, rel=2e-4, abs=1e-6)


def test_a_rank_without_rows_still_takes_part(launched: dict[int, Path]) -> None:
    single_row = results(launched[2])[1]
    assert single_row["n_micro_batches"] == 1
    assert single_row["grad_norm"] > 0


def test_the_weights_are_the_same_after_three_steps(launched: dict[int, Path]) -> None:
    models = [AutoModelForCausalLM.from_pretrained(launched[n] / "weights") for n in (1, 2)]
    start = AutoModelForCausalLM.from_pretrained(launched[1] / "base")
    moved = 0.0
    for (name, one), two, base in zip(
        models[0].named_parameters(), models[1].parameters(), start.parameters(), strict=True
    ):
        torch.testing.assert_close(one, two, atol=2e-4, rtol=1e-3, msg=f"{name} differs")
        moved = max(moved, float((one - base).abs().max()))
    assert moved > 5e-3, "they have moved"
