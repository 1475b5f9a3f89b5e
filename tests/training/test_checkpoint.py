"""Checkpoints: exact, atomic, loadable by another number of processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from test_ranks import results
from tiny import linear_rows, sequences_of, tiny_model
from transformers import Qwen3ForCausalLM
from worker import LOSS, OPTIMIZER, OPTIONS, ROWS, STEPS

from agentrl.configs import parse_config
from agentrl.databases.documents import DBRecordData, TrainerStart
from agentrl.training.checkpoint import (
    CheckpointError,
    TrainerState,
    lineage_checkpoints,
    list_checkpoints,
    load_checkpoint,
    read_state,
    recorded_config,
    save_checkpoint,
    supersede_others,
)
from agentrl.training.objective import Objective
from agentrl.training.optimizer import make_optimizer, make_scheduler
from agentrl.training.parallel import make_mesh, parallelise
from agentrl.training.statistics import StepStatistics
from agentrl.training.step import train_step

HERE = Path(__file__).parent


class Training:
    """Model, optimizer and schedule of one process, as the trainer has them."""

    def __init__(self, seed: int = 0) -> None:
        self.model: Qwen3ForCausalLM = tiny_model(seed=seed)
        self.mesh = make_mesh(Accelerator(cpu=True))
        parallelise(self.model, self.mesh)
        self.optimizer = make_optimizer(self.model, OPTIMIZER)
        self.scheduler = make_scheduler(self.optimizer, OPTIMIZER, STEPS)

    def step(self, rows: list[DBRecordData]) -> StepStatistics:
        sequences = [sequences_of(row) for row in rows]
        return train_step(
            self.model, self.optimizer, self.scheduler, sequences, Objective(LOSS), OPTIONS,
            self.mesh,
        )  # fmt: skip

    def save(self, output: Path, step: int, limit: int | None = None, fence: int = 1) -> Path:
        state = TrainerState(step=step, version=step, run_name="run", config={}, fence=fence)
        return save_checkpoint(output, state, self.model, self.optimizer, self.scheduler, limit)

    def load(self, checkpoint: Path) -> TrainerState:
        return load_checkpoint(checkpoint, self.model, self.optimizer, self.scheduler)

    def weights(self) -> list[torch.Tensor]:
        return [parameter.full_tensor().clone() for parameter in self.model.parameters()]


@pytest.fixture
def training() -> "Training":
    return Training()


def test_resuming_gives_the_same_next_step_bit_for_bit(training: Training, tmp_path: Path) -> None:
    rows = linear_rows(6)
    training.step(rows)
    training.save(tmp_path, 1)
    random_after_save = torch.rand(3)
    expected, weights = training.step(rows), training.weights()

    resumed = Training(seed=5)
    assert resumed.load(list_checkpoints(tmp_path)[-1]).step == 1
    assert torch.equal(torch.rand(3), random_after_save)
    assert resumed.step(rows) == expected
    for ours, theirs in zip(resumed.weights(), weights, strict=True):
        assert torch.equal(ours, theirs)


def test_a_checkpoint_of_two_processes_resumes_in_one(launched: dict[int, Path]) -> None:
    resumed = Training(seed=5)
    assert resumed.load(list_checkpoints(launched[2])[-1]).step == 2
    third = resumed.step(ROWS)
    expected = results(launched[2])[2]
    assert third.loss == pytest.approx(expected["loss"], rel=1e-4)
    assert third.grad_norm == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert third.learning_rate == expected["learning_rate"]


def test_only_the_newest_are_kept(training: Training, tmp_path: Path) -> None:
    for step in (1, 2, 10):
        training.save(tmp_path, step, limit=2)
    assert [folder.name for folder in list_checkpoints(tmp_path)] == [
        "checkpoint-2",
        "checkpoint-10",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-2"]


def test_checkpoints_of_an_abandoned_future_are_not_found(
    training: Training, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        training.save(tmp_path, step)
    supersede_others(tmp_path, 1, [TrainerStart(fence=1, step=0)])
    assert [folder.name for folder in list_checkpoints(tmp_path)] == ["checkpoint-1"]
    assert (tmp_path / "superseded-checkpoint-3").is_dir()
    training.save(tmp_path, 2)
    assert read_state(list_checkpoints(tmp_path)[-1]).step == 2


def test_a_checkpoint_that_a_replaced_trainer_still_saved_is_no_part_of_the_run(
    training: Training, tmp_path: Path
) -> None:
    first = TrainerStart(fence=1, step=0)
    training.save(tmp_path, 2, fence=1)
    assert [folder.name for folder in lineage_checkpoints(tmp_path, [first])] == ["checkpoint-2"]
    starts = [first, TrainerStart(fence=2, step=2)]  # the second goes on from it
    training.save(tmp_path, 4, fence=1)  # and the first wakes
    training.save(tmp_path, 5, fence=2)
    assert [folder.name for folder in lineage_checkpoints(tmp_path, starts)] == [
        "checkpoint-2",
        "checkpoint-5",
    ]
    supersede_others(tmp_path, 5, starts)
    assert (tmp_path / "superseded-checkpoint-4").is_dir()


def test_a_folder_that_is_no_checkpoint_is_refused(training: Training, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        training.load(tmp_path / "checkpoint-7")


def test_a_disk_that_refuses_is_one_sentence(training: Training, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoint-1 cannot be written"):
        training.save(tmp_path / "file", 1)


def test_no_secret_is_in_a_checkpoint() -> None:
    config = parse_config(
        ["--mcp_auth_token", "hush", "--db_connection_string", "mongodb://me:hush@host/"]
    )
    assert "hush" not in str(recorded_config(config))


SAVES_FOR_EVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_checkpoint import Training
training, output = Training(), Path(sys.argv[1])
training.save(output, 1)
print("saved", flush=True)
step = 1
while True:
    step += 1
    training.save(output, step)
"""


def test_a_kill_while_saving_leaves_the_last_whole_checkpoint(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SAVES_FOR_EVER, str(tmp_path), str(HERE)],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"saved\n"
    deadline = time.monotonic() + 20
    while not list(tmp_path.glob("*.partial")) and time.monotonic() < deadline:
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert list(tmp_path.glob("*.partial")), "it was killed while saving"
    checkpoint = list_checkpoints(tmp_path)[-1]
    training = Training(seed=5)
    state = training.load(checkpoint)
    assert checkpoint.name == f"checkpoint-{state.step}"
    for ours, start in zip(training.weights(), tiny_model().parameters(), strict=True):
        assert torch.equal(ours, start)
    training.save(tmp_path, state.step + 1)
    assert not list(tmp_path.glob("*.partial")), "the next save clears what was left"
