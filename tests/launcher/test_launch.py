"""A whole launch with real parts: that it fails and stops as it should, and leaves nothing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentrl.databases.mongod_lock import mongod_holds
from agentrl.launcher.deployment import REPOSITORY
from agentrl.subreaper import descendants


@contextmanager
def launched(folder: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """`agentrl launch grpo demo` in an empty folder with the demo's assets."""
    (folder / "assets").symlink_to(REPOSITORY / "assets")
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl.cli", "launch", "grpo", "demo", *flags],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]


def family_of(process: subprocess.Popen[str], at_least: int) -> list[int]:
    """The launch's processes, once there are so many."""
    deadline = time.monotonic() + 60
    while len(family := descendants(process.pid)) < at_least:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    return family


@pytest.mark.slow
def test_a_trainer_that_fails_ends_the_launch_with_its_reason_and_the_way_on(
    tmp_path: Path,
) -> None:
    with launched(tmp_path, "--resume_from_checkpoint", "no-such-checkpoint") as process:
        family = family_of(process, 7)  # mongod, and three subreapers with their parts
        output, _ = process.communicate(timeout=90)
    assert process.returncode == 1, output
    assert "trainer ended with status" in output
    assert "logs/as/demo_train_0.log" in output
    assert "no-such-checkpoint" in output, "the log's last lines say why"
    assert "the same command starts it again" in output
    assert alive(family) == []
    assert not mongod_holds(tmp_path / "output" / "demo" / "mongo")


def test_slurms_warning_stops_a_launch_in_order_and_leaves_nothing(tmp_path: Path) -> None:
    with launched(tmp_path) as process:
        family = family_of(process, 7)
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGTERM)  # as Slurm sends it too, when the time is over
        output, _ = process.communicate(timeout=60)
    assert process.returncode in (128 + signal.SIGUSR1, 128 + signal.SIGTERM), output
    assert "stopped by SIG" in output
    assert output.splitlines()[-1].endswith(
        "saved: no checkpoint yet, 0 trajectories stored by this launch; the same command starts "
        "it again: there is no checkpoint yet"
    )
    assert alive(family) == []
    log = (tmp_path / "logs" / "as" / "demo_mongo.log").read_text()
    assert '"exitCode":0' in log, "mongod ended in order"


def test_a_launch_killed_with_sigkill_leaves_nothing(tmp_path: Path) -> None:
    with launched(tmp_path) as process:
        family = family_of(process, 7)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 45
        while alive(family):
            assert time.monotonic() < deadline, alive(family)
            time.sleep(0.1)
    assert not mongod_holds(tmp_path / "output" / "demo" / "mongo")
