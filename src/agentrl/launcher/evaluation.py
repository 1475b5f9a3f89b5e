"""The report of an evaluation with confidence intervals: computed, printed and written."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import SlotStatus, Split, epoch_places
from agentrl.databases.success import SUCCESS_SCORE
from agentrl.launcher.statistics import (
    Estimate,
    PassRate,
    TaskOutcome,
    mean_over_tasks,
    pass_curve,
    powers_of_two,
)
from agentrl.whole_file import write_whole

_AT_ONCE = 1000  # tasks whose records are asked for in one query


@dataclass(frozen=True)
class TaskRollouts:
    """All rollouts of one held-out task."""

    task: str  # id of its line in the task file
    scores: Sequence[float]  # of the rollouts with a score
    turns: Sequence[int]  # of the same rollouts
    failed: int  # rollouts given up after errors; they count in no rate
    unscored: int  # rollouts without a score, or whose scoring failed; they count in no rate

    @property
    def outcome(self) -> TaskOutcome:
        """Number of scored rollouts and of successes."""
        return TaskOutcome(len(self.scores), sum(score >= SUCCESS_SCORE for score in self.scores))


@dataclass(frozen=True)
class EvaluationReport:
    """The content of `eval/CHECKPOINT-TASKS-HASH.json`.

    `checkpoint`: the checkpoint's name, or that of another model. `scores`: those of each task, by
    its id. Intervals are of 95 % confidence: Wilson's for pass@k, over tasks for the others
    (`mean_over_tasks`). Both account for the correlation of rollouts of one task.
    """

    run: str
    checkpoint: str
    task_file: str
    task_file_sha256: str
    set_up: Mapping[str, Any]  # digest of the weights, rollouts, flags and digests of their files
    step: int
    epoch: int  # of its tasks and records in the database, split `eval`
    tasks: int
    rollouts: int  # with a score
    failed_rollouts: int
    unscored_rollouts: int
    mean_score: Estimate
    pass_at: Mapping[int, PassRate]  # by k
    mean_turns: Estimate
    scores: Mapping[str, Sequence[float]]

    @property
    def most_failed(self) -> bool:
        """Whether more than half of all rollouts failed."""
        return 2 * self.failed_rollouts > self.all_rollouts

    @property
    def all_rollouts(self) -> int:
        """Number of all rollouts, scored, unscored and failed."""
        return self.rollouts + self.unscored_rollouts + self.failed_rollouts

    def of_fewer_tasks(self) -> str | None:
        """Which pass@k are of some tasks only, as a sentence; None if all are of all tasks."""
        fewer = [
            f"pass@{k} of {rate.tasks}"
            for k, rate in self.pass_at.items()
            if rate.tasks < self.tasks
        ]
        if not fewer:
            return None
        return f"Of the {self.tasks} tasks, those with k scores count: {', '.join(fewer)}"


@dataclass(frozen=True)
class HeldOutFile:
    """The task file of an evaluation, identified by its content."""

    path: Path
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Self:
        """The file as it is now."""
        return cls(path, sha256(path.read_bytes()).hexdigest())


def summarise_rollouts(
    run: str,
    checkpoint: str,
    step: int,
    epoch: int,
    rollouts: Sequence[TaskRollouts],
    task_file: HeldOutFile,
    set_up: Mapping[str, Any] = MappingProxyType({}),
) -> EvaluationReport:
    """Compute the report on all tasks. Raises `ValueError` if no rollout has a score."""
    scored = [task for task in rollouts if task.scores]
    if not scored:
        raise ValueError("no rollout ended with a score")
    ks = powers_of_two(max(len(task.scores) for task in scored))
    return EvaluationReport(
        run=run,
        checkpoint=checkpoint,
        task_file=str(task_file.path),
        task_file_sha256=task_file.sha256,
        set_up=dict(set_up),
        step=step,
        epoch=epoch,
        tasks=len(rollouts),
        rollouts=sum(len(task.scores) for task in scored),
        failed_rollouts=sum(task.failed for task in rollouts),
        unscored_rollouts=sum(task.unscored for task in rollouts),
        mean_score=mean_over_tasks([mean(task.scores) for task in scored]),
        pass_at=pass_curve([task.outcome for task in scored], ks),
        mean_turns=mean_over_tasks([mean(task.turns) for task in scored]),
        scores={task.task: task.scores for task in rollouts},
    )


async def read_rollouts(database: RunDatabase, epoch: int) -> list[TaskRollouts]:
    """Read the rollouts of evaluation `epoch`, one entry per task."""
    of_epoch = {"split": Split.EVAL, "group_order": epoch_places(epoch)}
    tasks = await database.tasks.find(of_epoch, {"slots": 1, "task_id": 1}, hint="order").to_list()
    turns: dict[str, int] = {}
    for first in range(0, len(tasks), _AT_ONCE):
        some = [task["_id"] for task in tasks[first : first + _AT_ONCE]]
        found = database.records.find({"task": {"$in": some}}, {"n_turns": 1}, hint="task")
        turns.update({document["_id"]: document["n_turns"] async for document in found})
    rollouts = []
    for task in tasks:
        statuses = [slot["status"] for slot in task["slots"]]
        scored = [slot for slot in task["slots"] if slot["score"] is not None]
        rollouts.append(
            TaskRollouts(
                task=task["task_id"],
                scores=[slot["score"] for slot in scored],
                turns=[turns[slot["record"]] for slot in scored],
                failed=statuses.count(SlotStatus.FAILED),
                unscored=statuses.count(SlotStatus.COMPLETED)
                + statuses.count(SlotStatus.QUARANTINED)
                - len(scored),
            )
        )
    return rollouts


def print_report(console: Console, report: EvaluationReport) -> None:
    """Print the success rate in one line, and the report as a table."""
    success = report.pass_at[1]
    console.print(
        f"{report.run}, {report.checkpoint} on {report.task_file}: success {success.mean:.3f} "
        f"(95 % interval {success.interval()}; {report.tasks} tasks, "
        f"{report.rollouts} rollouts)",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    table = Table()
    table.add_column("")
    table.add_column("mean", justify="right")
    table.add_column("95 % interval", justify="right")
    for k, rate in report.pass_at.items():
        table.add_row(f"pass@{k}", *rate.cells)
    table.add_row("mean score", *report.mean_score.cells)
    table.add_row("mean turns", *report.mean_turns.cells)
    console.print(table)
    if fewer := report.of_fewer_tasks():
        console.print(fewer, highlight=False)
    if report.failed_rollouts:
        console.print(
            f"{report.failed_rollouts} of {report.all_rollouts} rollouts ended in errors and count "
            "in no rate: `error` of their records says why"
        )
    if report.unscored_rollouts:
        console.print(
            f"{report.unscored_rollouts} rollouts have no score and count in no rate: "
            "`explanations` of the records may say why"
        )


def write_report(folder: Path, report: EvaluationReport) -> Path:
    """Write the report atomically.

    Its name has the checkpoint, or model-NAME, the task file, and a hash of what identifies the
    evaluation, so that evaluations of other weights, tasks, flags or files have another one.
    """
    # Not all of a path, which a model has beside another of its name only.
    model = "_".join(Path(report.checkpoint.strip("/")).parts[-2:])
    kind = "" if model.startswith("checkpoint-") else "model-"
    identity = json.dumps([report.task_file_sha256, report.set_up], sort_keys=True)
    which = sha256(identity.encode()).hexdigest()[:8]
    path = folder / f"{kind}{model}-{Path(report.task_file).stem}-{which}.json"
    with write_whole(path) as partial:
        partial.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    return path
