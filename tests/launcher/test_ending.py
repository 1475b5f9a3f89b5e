"""The last lines of a launch: what failed, what was saved, and the way on."""

from pathlib import Path

from agentrl.databases.attempt_tally import AttemptCounts
from agentrl.launcher.ending import (
    FAILED,
    Outcome,
    Saved,
    failures_lines,
    last_lines_of,
    stopped_by,
)

FAILING = AttemptCounts(96, 80, ((80, "RuntimeError: the prompt does not fit"),))


def saved(folder: Path, step: int, attempts: AttemptCounts | None = None) -> Saved:
    return Saved("demo", folder, step, 30.0, attempts or AttemptCounts(ended=340))


def test_a_stop_says_what_was_saved(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-12").mkdir()
    *_, last = last_lines_of(stopped_by(10), saved(tmp_path, 12))
    assert last == (
        f"stopped by SIGUSR1; saved: checkpoint-12 in {tmp_path}, 340 trajectories stored by this "
        "launch; the same command resumes from checkpoint-12"
    )
    assert stopped_by(10).status == 138


def test_a_stop_says_what_was_not_saved(tmp_path: Path) -> None:
    *_, none = last_lines_of(stopped_by(15), saved(tmp_path, 0))
    assert "saved: no checkpoint yet, 340 trajectories stored" in none
    (tmp_path / "checkpoint-9").mkdir()
    *_, late = last_lines_of(stopped_by(15), saved(tmp_path, 12))
    assert "without the 3 steps after it" in late and "--drain_seconds 30)" in late


def test_failures_come_before_the_last_line_and_point_to_the_list(tmp_path: Path) -> None:
    lines = last_lines_of(Outcome(FAILED, "the trainer ended"), saved(tmp_path, 0, FAILING))
    assert lines[-2] == (
        "80 of 96 attempts failed: 80 × RuntimeError: the prompt does not fit "
        "(`agentrl show demo --failed` lists them)"
    )
    assert lines[-1].startswith("the trainer ended; the same command starts it again")
    assert last_lines_of(Outcome(0), saved(tmp_path, 0, FAILING)) == [], "the report has said it"


def test_a_run_whose_attempts_mostly_failed_says_its_exit_status() -> None:
    assert failures_lines(FAILING, "demo")[1] == "most attempts failed: the exit status is 1"
    assert len(failures_lines(AttemptCounts(96, 40, ((40, "E: x"),)), "demo")) == 1
    assert failures_lines(AttemptCounts(96), "demo") == []
