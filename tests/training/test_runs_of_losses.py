"""Whole runs of the trainer with each kind of loss and of model: a real mongod, rows put in by
hand, real processes where there are several."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import linear_rows, make_row
from trainer_run import Run

from agentrl.databases.documents import DBRecordData, RowStatus
from agentrl.training.checkpoint import list_checkpoints
from agentrl.training.trainer import main

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).parents[2] / "assets" / "fsdp2_cpu.yml"
TREE = [(0, 12, -1), (12, 24, 0), (24, 34, 1), (34, 48, 1), (48, 60, 0)]
FLAGS = ("--enable_sampling", "false", "--drop_zero_advantage", "false")


def rows_of(count: int) -> list[DBRecordData]:
    """Linear ones, and each fourth a tree."""
    rows = linear_rows(count)
    for index in range(3, count, 4):
        rows[index] = make_row(f"row-{index:03d}", index, TREE, reward=float(index % 2))
    return rows


def check(run: Run, steps: int) -> None:
    assert [line["step"] for line in run.metrics()] == list(range(1, steps + 1))
    assert {row["status"] for row in run.rows()} == {RowStatus.TRAINED}
    assert all(line["grad_norm"] > 0 for line in run.metrics())


def launched(run: Run, flags: list[str], tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIG),
        "--num_processes", "2", "--main_process_port", "0", "-m", "agentrl.training.trainer",
    ]  # fmt: skip
    done = subprocess.run(
        [*command, *flags], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
        timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(
    "flags",
    [
        ["--loss_calculator", "GSPO", "--micro_batch_tokens", "40"],
        ["--loss_calculator", "KL-Cov", "--micro_batch_tokens", "40", "--kl_cov_ratio", "0.05"],
        ["--beta", "0.1", "--kl_estimator", "k3"],
        ["--lora_rank", "4", "--beta", "0.1"],
        ["--loss_calculator", "PPO", "--critic_learning_rate", "1e-3", "--beta", "0.05"],
    ],
    ids=["gspo", "kl-cov", "reference", "lora", "ppo"],
)
def test_a_run_trains_all_its_rows_and_goes_on_after_its_end(run: Run, flags: list[str]) -> None:
    run.add(rows_of(16)[:8])
    assert main(run.flags(*FLAGS, *flags)) == 0
    check(run, 2)
    run.add(rows_of(16)[8:])
    assert main(run.flags(*FLAGS, *flags)) == 0
    check(run, 4)
    assert list_checkpoints(run.output)[-1].name == "checkpoint-4"
