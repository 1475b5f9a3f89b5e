"""A trainer that is told to stop finishes its step if there is time, else leaves it, and saves."""

import json
import re
import signal
import time
from pathlib import Path

import pytest
from launching import launch
from tiny import linear_rows
from trainer_run import Run, start

from agentrl.databases.documents import RowStatus
from agentrl.databases.row_ledger import count_rows
from agentrl.training.checkpoint.layout import list_checkpoints
from agentrl.training.run.drain import Drain

HERE = Path(__file__).parent


def test_a_step_may_go_on_until_the_time_is_needed_to_save() -> None:
    now = 100.0
    drain = Drain(60, clock=lambda: now)
    assert not drain.must_save(10), "nobody asked to stop"
    drain.begin()
    now += 20
    drain.begin()  # a second signal gives no new time
    assert not drain.must_save(20) and not drain.must_save(None)
    assert drain.must_save(30), "a save of 30 s, with a margin, needs 45 of the 40 s that are left"
    now += 15
    assert drain.must_save(20)
    assert drain.must_save(None), "before the first save half of the time is kept for it"
    assert not drain.must_save(1)


@pytest.mark.slow
def test_a_step_can_be_left_after_any_pass_and_nothing_of_it_stays(
    tmp_path: Path,
) -> None:
    launched = launch(HERE / "leaving.py", 2, tmp_path / "out")
    assert launched.wait(timeout=100) == 0, (tmp_path / "out" / "log").read_text()
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert len(result["unchanged"]) >= 3 and all(result["unchanged"])
    assert result["as_if_none_was_left"]


def test_a_step_that_does_not_end_in_time_is_left_and_what_was_before_it_is_saved(
    run: Run, tmp_path: Path
) -> None:
    rows = linear_rows(480)
    run.add(rows)
    # Some seconds a step: a pass for every two rows or so.
    flags = run.flags("--enable_sampling", "false", "--max_steps", "3", "--drain_seconds", "0")
    flags[flags.index("--per_device_train_batch_size") + 1] = "160"
    flags[flags.index("--save_steps") + 1] = "100"
    flags += ["--micro_batch_tokens", "64"]
    process = start(flags, tmp_path / "log")
    run.await_steps(1, process)
    time.sleep(0.2)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=60) == 0
    log = (tmp_path / "log").read_text()
    assert "step 2 is left" in log and "Traceback" not in log
    last = log.splitlines()[-1]
    assert re.search(rf"stopped after step 1 of 3; saved {run.output}/checkpoint-1$", last), last
    assert [folder.name for folder in list_checkpoints(run.output)] == ["checkpoint-1"]
    counts = run.database(count_rows)
    assert (counts[RowStatus.TRAINED], counts[RowStatus.READY]) == (160, 320)
    assert counts[RowStatus.LEASED] == 0
