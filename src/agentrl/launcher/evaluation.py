"""What an evaluation found, as numbers with intervals: computed, printed and written here."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import SlotStatus, Split
from agentrl.launcher.run_folder import write_whole
from agentrl.launcher.statistics import (
    Estimate,
    TaskOutcome,
    bootstrap,
    pass_curve,
    powers_of_two,
)
from agentrl.rollout.rewarding import SUCCESS_SCORE


@dataclass(frozen=True)
class Attempts:
    """All attempts at one held-out task: scores of those that ended with one, and their turns."""

    scores: Sequence[float]
    turns: Sequence[int]
    failed: int  # given up after errors: no attempt of the model's, so in no rate
    unscored: int  # a scorer had nothing to say of them: in no rate either

    @property
    def outcome(self) -> TaskOutcome:
        """As successes among attempts."""
        return TaskOutcome(len(self.scores), sum(score >= SUCCESS_SCORE for score in self.scores))


@dataclass(frozen=True)
class EvaluationReport:
    """`eval/CHECKPOINT.json`. Intervals are 95 % bootstrap intervals over tasks."""

    run: str
    checkpoint: str
    step: int
    epoch: int  # of its tasks and records in the database, split `eval`
    tasks: int
    attempts: int  # with a score
    failed_attempts: int
    unscored_attempts: int
    mean_score: Estimate
    pass_at: Mapping[int, Estimate]  # by k
    mean_turns: Estimate


def summarise_attempts(
    run: str, checkpoint: str, step: int, epoch: int, attempts: Sequence[Attempts]
) -> EvaluationReport:
    """The report on all tasks. Raises `ValueError` if no attempt ended with a score."""
    scored = [task for task in attempts if task.scores]
    if not scored:
        raise ValueError("no attempt ended with a score")
    ks = powers_of_two(max(len(task.scores) for task in scored))
    return EvaluationReport(
        run=run,
        checkpoint=checkpoint,
        step=step,
        epoch=epoch,
        tasks=len(attempts),
        attempts=sum(len(task.scores) for task in scored),
        failed_attempts=sum(task.failed for task in attempts),
        unscored_attempts=sum(task.unscored for task in attempts),
        mean_score=bootstrap([mean(task.scores) for task in scored]),
        pass_at=pass_curve([task.outcome for task in scored], ks),
        mean_turns=bootstrap([mean(task.turns) for task in scored]),
    )


async def read_attempts(database: RunDatabase, epoch: int) -> list[Attempts]:
    """What became of the evaluation `epoch`, a task each."""
    turns = {
        document["_id"]: document["n_turns"]
        async for document in database.records.find(
            {"split": Split.EVAL, "epoch": epoch}, {"n_turns": 1}
        )
    }
    attempts = []
    async for task in database.tasks.find({"split": Split.EVAL, "epoch": epoch}, {"slots": 1}):
        statuses = [slot["status"] for slot in task["slots"]]
        scored = [slot for slot in task["slots"] if slot["score"] is not None]
        attempts.append(
            Attempts(
                scores=[slot["score"] for slot in scored],
                turns=[turns[slot["record"]] for slot in scored],
                failed=statuses.count(SlotStatus.FAILED),
                unscored=statuses.count(SlotStatus.COMPLETED) - len(scored),
            )
        )
    return attempts


def print_report(console: Console, report: EvaluationReport) -> None:
    """The report as a table."""
    console.print(
        f"{report.run}, {report.checkpoint}: {report.tasks} held-out tasks, "
        f"{report.attempts} attempts",
        highlight=False,
    )
    table = Table()
    table.add_column("")
    table.add_column("mean", justify="right")
    table.add_column("95 % interval", justify="right")
    for k, estimate in report.pass_at.items():
        table.add_row(f"pass@{k}", *_cells(estimate))
    table.add_row("mean score", *_cells(report.mean_score))
    table.add_row("mean turns", *_cells(report.mean_turns))
    console.print(table)
    if report.failed_attempts:
        console.print(
            f"{report.failed_attempts} attempts ended in errors and are in no rate: the records "
            "hold them"
        )
    if report.unscored_attempts:
        console.print(
            f"{report.unscored_attempts} attempts have no score and are in no rate: `explanations` "
            "of the records may say why"
        )


def _cells(estimate: Estimate) -> tuple[str, str]:
    return f"{estimate.mean:.3f}", f"{estimate.low:.3f} to {estimate.high:.3f}"


def write_report(folder: Path, report: EvaluationReport) -> Path:
    """Write `CHECKPOINT.json` into the folder, whole or not at all."""
    path = folder / f"{report.checkpoint}.json"
    with write_whole(path) as partial:
        partial.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    return path
