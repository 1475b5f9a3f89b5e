"""A run that goes on with other tasks, through the front door: after its end, and after a kill."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
from pymongo import MongoClient

from agentrl.databases.mongod import EmbeddedMongod
from agentrl.training.checkpoint.layout import list_checkpoints, read_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "assets" / "demo"
ROWS_PER_STEP, HELD_OUT = 16, 2


@dataclass(frozen=True)
class Ledger:
    """What the run's database holds in the end."""

    tasks: list[dict[str, Any]]
    rows: list[dict[str, Any]]

    def rows_of(self, data: int) -> list[dict[str, Any]]:
        tasks = {task["_id"] for task in self.tasks if task["data"] == data}
        return [row for row in self.rows if row["task"] in tasks]


class FrontDoor:
    """`grpo_example.sh RUN` with few rows a step."""

    def __init__(self, folder: Path) -> None:
        self.name, self.folder = f"test-{uuid4().hex[:8]}", folder
        self.output = folder / "output"
        self._held_out = _lines_of("heldout.jsonl", HELD_OUT, folder / "heldout.jsonl")
        self._environment = {**os.environ, "VIRTUAL_ENV": sys.prefix, "OMP_NUM_THREADS": "1"}

    def start(self, *flags: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [
                str(ROOT / "grpo_example.sh"), self.name, "--output_dir", str(self.output),
                "--eval_file", str(self._held_out), "--eval_rollouts", "1", "--eval_steps", "1000",
                "--per_device_train_batch_size", str(ROWS_PER_STEP), "--save_steps", "1",
                "--lease_seconds", "4", *flags,
            ],
            env=self._environment, cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def finish(self, *flags: str) -> None:
        launch = self.start(*flags)
        said, _ = launch.communicate(timeout=240)
        assert launch.returncode == 0, said

    def kill_at_work(self, *flags: str) -> None:
        """Kill all of a launch at once, two steps and a checkpoint after it began."""
        launch = self.start(*flags)
        deadline = time.monotonic() + 240
        while self.steps() < 2 or not list_checkpoints(self.output):
            assert launch.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        parts = [*psutil.Process(launch.pid).children(recursive=True), psutil.Process(launch.pid)]
        for part in parts:
            part.send_signal(signal.SIGSTOP)  # none sees another one die
        for part in parts:
            part.kill()
        psutil.wait_procs(parts, timeout=30)

    def steps(self) -> int:
        metrics = self.output / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def ledger(self) -> Ledger:
        mongod = EmbeddedMongod(self.output / "mongo", self.folder / "mongod.log")
        with mongod, MongoClient[dict[str, Any]](mongod.url, tz_aware=True) as client:
            database = client[self.name]
            return Ledger(list(database["tasks"].find()), list(database["record_data"].find()))


def _open_groups_of_the_first_data(ledger: Ledger) -> list[dict[str, Any]]:
    ended = {"completed", "left_out"}
    return [task for task in ledger.tasks if task["data"] == 0 and task["status"] not in ended]


def _lines_of(file: str, count: int, copy: Path) -> Path:
    copy.write_text("".join((DEMO / file).read_text().splitlines(keepends=True)[:count]))
    return copy


@pytest.mark.parametrize("killed", [False, True], ids=["after its end", "after a kill"])
def test_a_run_goes_on_with_fewer_tasks_than_a_step_has_rows_and_trains_no_others(
    tmp_path: Path, killed: bool
) -> None:
    run = FrontDoor(tmp_path)
    if killed:
        run.kill_at_work("--max_steps", "40")
    else:
        run.finish("--max_steps", "2")
    begun_by = read_state(list_checkpoints(run.output)[-1]).step
    other = _lines_of("train.jsonl", 3, tmp_path / "other.jsonl")
    last = begun_by + 2
    changed_at = datetime.now(UTC)
    run.finish("--max_steps", str(last), "--train_file", str(other), "--change_data")

    ledger = run.ledger()
    assert run.steps() == last
    steps = Counter(row["trained"][0]["step"] for row in ledger.rows_of(1) if row["trained"])
    assert steps == {begun_by + 1: ROWS_PER_STEP, last: ROWS_PER_STEP}
    # Groups that were begun may end after the trainer's last look, and their rows are ready then.
    ended = {t["_id"] for t in ledger.tasks if t["completed_at"] and t["completed_at"] < changed_at}
    old = {row["status"] for row in ledger.rows_of(0) if row["task"] in ended}
    assert old <= {"trained", "evicted"}, "nothing of the old data waits to be trained"
    assert {step["step"] for row in ledger.rows_of(0) for step in row["trained"]} == set(
        range(1, begun_by + 1)
    )
    evaluated = Counter(
        task["epoch"] for task in ledger.tasks if task["split"] == "eval" and task["data"] == 1
    )
    assert evaluated == {begun_by: HELD_OUT, last: HELD_OUT}
    # Two steps can be over before the leases of the killed sampler are: later steps see their end.
    while (open_ := _open_groups_of_the_first_data(run.ledger())) and last < begun_by + 14:
        last += 4
        run.finish("--max_steps", str(last), "--train_file", str(other))
    assert not open_, "groups that were begun are brought to their end"
    for log in (ROOT / "logs" / "as").glob(f"{run.name}_*"):
        log.unlink()
