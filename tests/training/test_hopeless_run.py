"""A run whose tasks are used up before anything could be trained ends with its cause, on all
ranks."""

import asyncio
import time
from pathlib import Path

import pytest
from forked import ForkedRanks
from trainer_run import Run

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import GroupOutcome, Split
from agentrl.databases.runs import HOPELESS, load_run
from agentrl.databases.tasks import TaskLedger
from agentrl.training.checkpoint.layout import list_checkpoints
from agentrl.training.trainer import main


async def sample_in_vain(database: RunDatabase) -> None:
    """A sampler whose attempts all score the same."""
    sampler = TaskLedger(database, "s", lease_seconds=30, max_failures=1)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        claims = await sampler.claim(Split.TRAIN, count=8)
        for claim in claims:
            group = await sampler.complete(claim, 0.0)
            if group is not None:
                left_out = {"drop_zero_advantage": len(group.slots)}
                await sampler.finalised(group, outcome=GroupOutcome(rows=0, left_out=left_out))
                return
        await asyncio.sleep(0.2)
    raise AssertionError("the trainer added no task")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_without_a_row_in_all_its_epochs_ends_with_the_cause_on_all_ranks(
    run: Run, tmp_path: Path, processes: int
) -> None:
    flags = run.flags("--train_file", str(run.tasks), "--num_train_epochs", "1")
    log = tmp_path / "log"
    trainer = ForkedRanks(processes, log, ["-m", "agentrl.training.trainer", *flags])
    run.database(sample_in_vain)
    assert trainer.wait(timeout=60) != 0
    said = [line for line in log.read_text().splitlines() if line.startswith("agentrl train")]
    assert len(said) == 1, log.read_text()
    for words in ("trained nothing in all 1 epochs", "1 groups finished, in 1 of them all scores",
                  "too hard", "--drop_zero_advantage"):  # fmt: skip
        assert words in said[0]
    document = run.database(load_run)
    assert document is not None and document.trainer is None
    assert document.status == HOPELESS and said[0].endswith(str(document.failure))
    assert list_checkpoints(run.output) == [], "the start weights are no checkpoint"
    # The next trainer finds the same, and says so too.
    if processes == 1:
        assert main(flags) == 2
