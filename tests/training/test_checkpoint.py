"""Checkpoints: exact, atomic, written while training goes on, loadable by other processes."""

import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing import ROWS, Training, die_saving
from forked import FORKS
from launching import HERE, launch
from test_ranks import results
from torch.distributed.checkpoint.state_dict_saver import save
from worker import ROWS as RANKS_ROWS

from agentrl.configs import parse_config
from agentrl.databases.documents import TrainerStart
from agentrl.databases.runs import TrainerReplaced
from agentrl.training.checkpoint import save as checkpoint_io
from agentrl.training.checkpoint.layout import (
    CheckpointError,
    clear_unfinished,
    lineage_checkpoints,
    list_checkpoints,
    read_state,
    recorded_config,
    supersede_others,
)


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_resuming_gives_the_same_steps_bit_for_bit(training: Training, tmp_path: Path) -> None:
    training.step(ROWS)
    training.save(1)
    random_after_save = torch.rand(3)
    expected, weights = [training.step(ROWS), training.step(ROWS)], training.weights()

    resumed = Training(tmp_path, seed=5)
    assert resumed.load(list_checkpoints(tmp_path)[-1]).step == 1
    assert torch.equal(torch.rand(3), random_after_save)
    assert [resumed.step(ROWS), resumed.step(ROWS)] == expected
    assert equal(resumed.weights(), weights)


def test_what_changes_after_a_save_began_is_not_in_it(training: Training, tmp_path: Path) -> None:
    """The second save too, which copies to where the first did."""
    going_on = threading.Event()
    training.hold = going_on.wait  # before it writes anything
    saved = []
    for step in (1, 2):
        going_on.clear()
        training.step(ROWS)
        saved.append(training.weights())
        training.begin_to_save(step)
        training.step(ROWS)
        assert not training.saver.failed
        assert len(list_checkpoints(tmp_path)) == step - 1
        going_on.set()
        training.saver.wait()
    for checkpoint, weights in zip(list_checkpoints(tmp_path), saved, strict=True):
        resumed = Training(tmp_path, seed=5)
        resumed.load(checkpoint)
        assert equal(resumed.weights(), weights)


@pytest.mark.slow
def test_a_checkpoint_of_two_processes_resumes_in_one(
    launched: dict[int, Path], training: Training
) -> None:
    assert training.load(list_checkpoints(launched[2])[-1]).step == 2
    third = training.step(RANKS_ROWS)
    expected = results(launched[2])[2]
    assert third.loss == pytest.approx(expected["loss"], rel=1e-4)
    assert third.grad_norm == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert third.learning_rate == expected["learning_rate"]


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    training = Training(tmp_path, limit=2)
    for step in (1, 2, 10):
        training.save(step)
    assert [folder.name for folder in list_checkpoints(tmp_path)] == [
        "checkpoint-2",
        "checkpoint-10",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-2"]


def test_checkpoints_of_an_abandoned_future_are_not_found(
    training: Training, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        training.save(step)
    supersede_others(tmp_path, 1, [TrainerStart(fence=1, step=0)])
    assert [folder.name for folder in list_checkpoints(tmp_path)] == ["checkpoint-1"]
    assert (tmp_path / "superseded-checkpoint-3").is_dir()
    training.save(2)
    assert read_state(list_checkpoints(tmp_path)[-1]).step == 2


def test_a_checkpoint_that_a_replaced_trainer_still_saved_is_no_part_of_the_run(
    training: Training, tmp_path: Path
) -> None:
    first = TrainerStart(fence=1, step=0)
    training.save(2, fence=1)
    assert [folder.name for folder in lineage_checkpoints(tmp_path, [first])] == ["checkpoint-2"]
    starts = [first, TrainerStart(fence=2, step=2)]  # the second goes on from it
    training.save(4, fence=1)  # and the first wakes
    training.save(5, fence=1)
    training.save(5, fence=2)
    assert [folder.name for folder in lineage_checkpoints(tmp_path, starts)] == [
        "checkpoint-2",
        "checkpoint-5",
    ]
    assert (tmp_path / "superseded-checkpoint-5").is_dir()
    supersede_others(tmp_path, 5, starts)
    assert (tmp_path / "superseded-checkpoint-4").is_dir()


def test_a_trainer_that_is_replaced_while_it_saves_removes_and_names_nothing(
    tmp_path: Path,
) -> None:
    training = Training(tmp_path, limit=1)
    training.save(1)

    def taken() -> None:
        raise TrainerReplaced("another trainer has taken over the run: this one stops")

    training.hold = taken
    training.begin_to_save(2)
    with pytest.raises(TrainerReplaced):
        training.saver.wait()
    assert [folder.name for folder in list_checkpoints(tmp_path)] == ["checkpoint-1"]


def test_a_folder_that_is_no_checkpoint_is_refused(training: Training, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        training.load(tmp_path / "checkpoint-7")


def test_a_disk_that_refuses_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    training = Training(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"checkpoint-1 cannot be written: .* directory"):
        training.save(1)
    assert not training.saver.failed, "it was raised"


def test_a_disk_that_is_full_is_one_sentence(training: Training, tmp_path: Path) -> None:
    training.save(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"-2 cannot be written: .*\(process 0\)$"):
            training.save(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    training.save(2)
    assert [folder.name for folder in list_checkpoints(tmp_path)] == [
        "checkpoint-1",
        "checkpoint-2",
    ]


def test_a_checkpoint_of_two_processes_is_one_folder_with_a_file_of_each(
    launched: dict[int, Path],
) -> None:
    (checkpoint,) = launched[2].glob("checkpoint-*")
    assert {path.name for path in checkpoint.iterdir()} == {
        "__0_0.distcp", "__1_0.distcp", ".metadata", "trainer_state.json",
    }  # fmt: skip
    assert read_state(checkpoint).fence == 3


@pytest.mark.parametrize(
    ("file", "length", "said"),
    [
        ("__0_0.distcp", None, r"__0_0\.distcp is not there: is --output_dir on a disk"),
        ("__0_0.distcp", 1000, r"__0_0\.distcp has 1000 of the \d+ bytes"),
        (".metadata", None, r"No such file .*\.metadata"),
        (".metadata", 1000, "its index cannot be read again"),
    ],
)
def test_a_checkpoint_whose_files_are_not_as_they_were_written_does_not_count_as_saved(
    training: Training,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    length: int | None,
    said: str,
) -> None:
    training.save(1)

    def save_and_lose(*arguments: Any, **options: Any) -> None:
        """A disk that has not what was written and synced."""
        save(*arguments, **options)
        written = tmp_path / "checkpoint-2.1.partial" / file
        written.unlink() if length is None else os.truncate(written, length)

    monkeypatch.setattr(checkpoint_io, "save", save_and_lose)
    with pytest.raises(CheckpointError, match=rf"checkpoint-2 cannot be written: .*{said}"):
        training.save(2)
    assert [folder.name for folder in list_checkpoints(tmp_path)] == ["checkpoint-1"]


def test_a_checkpoint_whose_files_are_damaged_is_refused_by_name(
    training: Training, tmp_path: Path
) -> None:
    training.save(1)
    (data,) = (tmp_path / "checkpoint-1").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="checkpoint-1 cannot be read"):
        training.load(tmp_path / "checkpoint-1")


def test_no_secret_is_in_a_checkpoint() -> None:
    config = parse_config(
        ["--mcp_auth_token", "hush", "--db_connection_string", "mongodb://me:hush@host/"]
    )
    assert "hush" not in str(recorded_config(config))


class Kills:
    """Kills processes that save, each in a folder of its own, and looks at what they leave."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        training = Training(folder)
        training.step(ROWS)
        self._weights = {1: training.weights()}
        training.step(ROWS)
        self._weights[2] = training.weights()

    def save(self, change: int, size: int | None = None) -> int:
        """The step whose checkpoint a killed process left; 0 if it was not killed.

        What is left is whole, and the run goes on from it.
        """
        self._count += 1
        output = self._folder / str(self._count)
        process = FORKS.Process(target=die_saving, args=(output, change, size), daemon=True)
        process.start()
        process.join()
        if process.exitcode == 0:
            return 0
        assert process.exitcode in (-signal.SIGKILL, -signal.SIGXFSZ)
        checkpoint = list_checkpoints(output)[-1]
        training = Training(output, seed=5)
        state = training.load(checkpoint)
        assert checkpoint.name == f"checkpoint-{state.step}"
        assert equal(training.weights(), self._weights[state.step])
        clear_unfinished(output)
        training.save(3)
        assert {path.name for path in output.iterdir()} <= {
            "checkpoint-1", "checkpoint-2", "checkpoint-3",
        }  # fmt: skip
        return state.step


def test_a_kill_in_the_middle_of_a_file_leaves_the_last_whole_checkpoint(tmp_path: Path) -> None:
    assert Kills(tmp_path).save(0, size=100_000) == 1


@pytest.mark.slow
def test_a_kill_before_any_change_on_the_disk_leaves_the_last_whole_checkpoint(
    tmp_path: Path,
) -> None:
    kills = Kills(tmp_path)
    left = []
    while step := kills.save(len(left) + 1):
        left.append(step)
    assert len(left) > 12, "folder, data, its index, state, their syncs, renames, a removal"
    assert left == sorted(left), "the new one from some change on"
    assert set(left) == {1, 2}


@pytest.mark.slow
def test_a_process_that_dies_while_all_save_leaves_the_last_whole_checkpoint(
    tmp_path: Path,
) -> None:
    launched = launch(HERE / "dying_rank.py", 2, tmp_path / "out")
    assert launched.wait(timeout=100) != 0
    (log,) = tmp_path.glob("out/log")
    assert "SIGKILL" in log.read_text()
    assert list((tmp_path / "out").glob("checkpoint-2.1.partial/*.distcp")), "while it wrote"
    (checkpoint,) = list_checkpoints(tmp_path / "out")
    training = Training(tmp_path, seed=5)
    assert training.load(checkpoint).step == 1
