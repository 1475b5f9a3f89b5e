"""A run through the front door on two, one and three trainer processes, killed in between."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.training.checkpoint.layout import list_checkpoints, read_state
from agentrl.training.checkpoint.save import check_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 5


@dataclass(frozen=True)
class Launch:
    """How a launch ended."""

    status: int
    output: str


class FrontDoor:
    """`grpo_example.sh RUN`, on any number of processes."""

    def __init__(self, folder: Path) -> None:
        self.name = f"test-{uuid4().hex[:8]}"
        self.output = folder / "output"
        self.held_out = folder / "heldout.jsonl"
        lines = (ROOT / "assets" / "demo" / "heldout.jsonl").read_text().splitlines()
        self.held_out.write_text("\n".join(lines[:2]))
        self.environment = {**os.environ, "VIRTUAL_ENV": sys.prefix, "OMP_NUM_THREADS": "1"}

    def start(self, processes: int) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [
                str(ROOT / "grpo_example.sh"), self.name, "--output_dir", str(self.output),
                "--eval_file", str(self.held_out), "--per_device_train_batch_size", "8",
                "--max_steps", str(STEPS), "--save_steps", "1", "--eval_steps", "0",
                "--eval_rollouts", "1", "--lease_seconds", "4",
            ],
            env={**self.environment, "NUM_PROCESSES": str(processes)}, cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def until_killed(self, processes: int, after: int) -> Launch:
        """Launch, and kill -9 the last trainer process once there is a checkpoint of `after`."""
        launched = self.start(processes)
        try:
            folder = self.output / f"checkpoint-{after}"
            wait_for(lambda: folder.exists(), launched)
            self.trainers(launched)[-1].send_signal(signal.SIGKILL)
            output, _ = launched.communicate(timeout=90)
        finally:
            if launched.poll() is None:
                launched.terminate()
                launched.wait(90)
        return Launch(launched.returncode, output)

    def to_the_end(self, processes: int) -> Launch:
        launched = self.start(processes)
        output, _ = launched.communicate(timeout=400)
        return Launch(launched.returncode, output)

    def agentrl(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "agentrl.cli", *arguments], cwd=ROOT, text=True,
            capture_output=True, timeout=300, env=self.environment,
        )  # fmt: skip

    def trainers(self, launched: "subprocess.Popen[str]") -> list[psutil.Process]:
        """The trainer's processes, in the order of their ranks."""
        found = [
            process
            for process in psutil.Process(launched.pid).children(recursive=True)
            if "agentrl.training.trainer" in process.cmdline()
        ]
        ranks = {int(p.environ()["RANK"]): p for p in found if "RANK" in p.environ()}
        if not ranks:  # a single one runs in the process that is its launcher
            return [p for p in found if "agentrl.launcher.accelerate" in p.cmdline()[:4]]
        return [process for _, process in sorted(ranks.items())]

    def log(self) -> str:
        return (ROOT / "logs" / "as" / f"{self.name}_train_0.log").read_text()


def wait_for(condition: Callable[[], bool], launched: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert launched.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


@dataclass(frozen=True)
class Finished:
    door: FrontDoor
    on_two: Launch
    log_of_two: str
    on_one: Launch
    on_three: Launch


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """Killed on two processes, then on one, and brought to its end on three."""
    door = FrontDoor(tmp_path_factory.mktemp("processes"))
    on_two = door.until_killed(2, after=1)
    log = door.log()
    on_one = door.until_killed(1, after=read_state(list_checkpoints(door.output)[-1]).step + 1)
    yield Finished(door, on_two, log, on_one, door.to_the_end(3))
    for file in (ROOT / "logs" / "as").glob(f"{door.name}_*"):
        file.unlink()


def test_a_process_that_is_killed_ends_the_launch_which_says_how_to_go_on(
    finished: Finished,
) -> None:
    for launch in (finished.on_two, finished.on_one):
        assert launch.status == 1
        assert "resumes from checkpoint-" in launch.output
    assert "agentrl train: another process of the trainer has ended" in finished.log_of_two


def test_each_launch_goes_on_from_the_last_ones_checkpoint(finished: Finished) -> None:
    assert finished.on_three.status == 0, finished.on_three.output
    lines = (finished.door.output / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))
    assert "going on from" not in finished.log_of_two
    assert finished.door.log().count("going on from") == 2


def test_every_checkpoint_is_one_folder_with_a_file_of_each_process(finished: Finished) -> None:
    checkpoints = list_checkpoints(finished.door.output)
    processes = [read_state(checkpoint).processes for checkpoint in checkpoints]
    assert processes[-1] == 3 and processes == sorted(processes, key=[2, 1, 3].index)
    for checkpoint, count in zip(checkpoints, processes, strict=True):
        check_files(checkpoint)
        files = {path.name for path in checkpoint.glob("*.distcp")}
        assert files == {f"__{rank}_0.distcp" for rank in range(count)}
    assert not list(finished.door.output.glob("*.partial"))


def test_the_last_checkpoint_is_evaluated(finished: Finished) -> None:
    evaluated = finished.door.agentrl("eval", finished.door.name, "--output_dir",
        str(finished.door.output), "--eval_file", str(finished.door.held_out))  # fmt: skip
    assert evaluated.returncode == 0, evaluated.stdout + evaluated.stderr
    assert f"checkpoint-{STEPS}" in evaluated.stdout


def test_an_export_is_what_was_published_and_loads_in_transformers(
    finished: Finished, tmp_path: Path
) -> None:
    exported = finished.door.agentrl("export", str(finished.door.output), str(tmp_path / "model"))
    assert exported.returncode == 0, exported.stderr
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
    published = sorted(
        (finished.door.output / "weights").iterdir(), key=lambda folder: int(folder.name[1:])
    )
    weights = load_file(published[-1] / "model.safetensors")
    for name, parameter in model.named_parameters():
        if name in weights:  # a tied weight is there once
            torch.testing.assert_close(parameter.detach(), weights[name].to(parameter.dtype))
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()} == {
        0o666 & ~umask()
    }


def umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
