"""A trainer process that is killed: the others end at once, and rank 0 says so, wherever it was."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launching import CONFIG
from tiny import linear_rows
from trainer_run import Run


def start_two(flags: list[str], log: Path) -> subprocess.Popen[bytes]:
    """The trainer on two processes, as a launch starts it."""
    command = [
        sys.executable, "-m", "agentrl.launcher.accelerate", "--config_file", str(CONFIG),
        "--num_processes", "2", "-m", "agentrl.training.trainer", *flags,
    ]  # fmt: skip
    with log.open("wb") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )


def rank(launched: subprocess.Popen[bytes], number: int) -> psutil.Process:
    for process in psutil.Process(launched.pid).children(recursive=True):
        if process.environ().get("RANK") == str(number) and "python" in process.name():
            return process
    raise AssertionError(f"there is no process {number}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "busy", [pytest.param(True, id="in a step"), pytest.param(False, id="waiting for rows")]
)
def test_the_others_say_that_a_process_was_killed(busy: bool, run: Run, tmp_path: Path) -> None:
    run.add(linear_rows(480 if busy else 4))
    flags = run.flags("--train_file", str(run.tasks), "--max_steps", "9")
    if busy:  # some seconds a step
        flags[flags.index("--per_device_train_batch_size") + 1] = "80"
        flags += ["--micro_batch_tokens", "64"]
    else:
        flags[flags.index("--per_device_train_batch_size") + 1] = "2"
    launched = start_two(flags, tmp_path / "log")
    try:
        run.await_steps(1, launched)
        time.sleep(0.7)
        rank(launched, 1).send_signal(signal.SIGKILL)
        killed = time.monotonic()
        assert launched.wait(timeout=60) != 0
    finally:
        launched.kill()
    assert time.monotonic() - killed < 25, "torch kills what does not end within 30 s"
    log = (tmp_path / "log").read_text()
    assert "agentrl train: another process of the trainer has ended" in log, log
    assert "Traceback" not in log.partition("agentrl train: ")[0], log
