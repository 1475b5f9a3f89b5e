"""What becomes of rows when trainers die, stall and lose their database: real processes, a real
mongod, real kills."""

import signal
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import crashing
import pytest
from forked import FORKS
from tiny import linear_rows, make_row
from trainer_run import Run, start

from agentrl.databases.documents import RowStatus
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.runs import reopen
from agentrl.training.checkpoint.layout import list_checkpoints

pytestmark = pytest.mark.slow


def killed_before(flags: list[str], write: int) -> int:
    """Train until before that write; returns the exit status, negative if it was killed."""
    process: ForkServerProcess = FORKS.Process(
        target=crashing.train, args=(flags, write), daemon=True
    )
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.timeout(300)  # some 50 trainers
def test_a_kill_between_any_two_writes_neither_loses_nor_doubles_a_row(run: Run) -> None:
    """The trainer dies before its first write, its successor before its second, and so on."""
    run.add(linear_rows(4))
    flags = run.flags(
        "--enable_sampling", "false", "--per_device_train_batch_size", "2",
        "--max_trained_count", "2", "--lease_seconds", "60",
    )  # fmt: skip
    write = 1
    while (status := killed_before(flags, write)) == -signal.SIGKILL:
        run.database(reopen)
        write += 1
    assert status == 0
    assert write > 30, "the whole run is far more writes"
    assert [row["status"] for row in run.rows()] == [RowStatus.TRAINED] * 4
    steps = [[trained["step"] for trained in row["trained"]] for row in run.rows()]
    assert steps == [[1, 3], [1, 3], [2, 4], [2, 4]]


def test_rows_of_steps_that_a_kill_undid_are_trained_again_and_not_evicted(
    run: Run, tmp_path: Path
) -> None:
    """Versions count on after the resume: by their numbers these rows would be too old."""
    rows = [make_row(f"row-{n:02}", n, [(0, 20, -1)], version=n // 4) for n in range(24)]
    flags = run.flags("--train_file", str(run.tasks), "--max_steps", "6", "--max_staleness", "1")
    flags[flags.index("--save_steps") + 1] = "3"
    run.add(rows[:22])  # of the sixth step half, so that the trainer waits
    process = start(flags, tmp_path / "log")
    run.await_steps(5, process)
    run.await_checkpoint(3, process)
    process.kill()
    process.wait()
    assert [folder.name for folder in list_checkpoints(run.output)] == ["checkpoint-3"]
    run.database(reopen)
    run.add(rows[22:])
    process = start(flags, tmp_path / "log")
    assert process.wait(timeout=100) == 0, (tmp_path / "log").read_text()
    assert [row["status"] for row in run.rows()] == [RowStatus.TRAINED] * 24
    assert [row["trained"][0]["step"] for row in run.rows()] == [n // 4 + 1 for n in range(24)]
    # the sixth step trains what would be version 5, had the run not been resumed
    assert run.metrics()[-1]["version"] == 8
    assert {line["staleness_max"] for line in run.metrics()} == {0}
    assert {line["rows_evicted"] for line in run.metrics()} == {0}


def test_a_trainer_that_was_stopped_and_replaced_wakes_to_nothing_but_its_end(
    run: Run, tmp_path: Path
) -> None:
    rows = linear_rows(16)
    flags = run.flags("--train_file", str(run.tasks), "--max_steps", "4")
    run.add(rows[:6])  # a step and a half
    stopped = start(flags, tmp_path / "stopped.log")
    run.await_steps(1, stopped)
    stopped.send_signal(signal.SIGSTOP)
    run.database(reopen)  # as if its lease had run out
    (run.output / "metrics.jsonl").unlink()
    successor = start(flags, tmp_path / "successor.log")
    try:
        run.await_steps(1, successor)
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(timeout=100) == 2
        assert "another trainer has taken over run" in (tmp_path / "stopped.log").read_text()
        run.add(rows[6:])
        assert successor.wait(timeout=100) == 0, (tmp_path / "successor.log").read_text()
    finally:
        stopped.kill()
        successor.kill()
    trained = [row["trained"] for row in run.rows()]
    assert [[step["step"] for step in steps] for steps in trained] == [
        [n // 4 + 1] for n in range(16)
    ]
    assert len({steps[0]["trainer"] for steps in trained}) == 1


def test_a_run_outlives_its_databases_crash_and_restart(tmp_path: Path) -> None:
    rows = linear_rows(16)
    with EmbeddedMongod(tmp_path / "data", tmp_path / "mongod.log") as server:
        run = Run(tmp_path, server.url)
        run.add(rows[:10])
        trainer = start(
            run.flags("--train_file", str(run.tasks), "--max_steps", "4"), tmp_path / "log"
        )
        try:
            run.await_steps(2, trainer)
            server.kill()
            server.start()
            run.add(rows[10:])
            assert trainer.wait(timeout=100) == 0, (tmp_path / "log").read_text()
        finally:
            trainer.kill()
        assert [[step["step"] for step in row["trained"]] for row in run.rows()] == [
            [n // 4 + 1] for n in range(16)
        ]
