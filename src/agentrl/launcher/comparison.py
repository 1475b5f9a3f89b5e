"""Several evaluations side by side: a table, and paired comparisons task by task.

Two models are compared on the tasks that both have scores for. What differs between tasks then
cancels, so that the interval of the difference is narrower than two intervals suggest (Miller 2024,
"Adding Error Bars to Evals", arXiv 2411.00640, section 4).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from agentrl.databases.success import SUCCESS_SCORE
from agentrl.launcher.evaluation import EvaluationReport
from agentrl.launcher.statistics import Estimate, mean_over_tasks, sign_flip
from agentrl.whole_file import write_whole

_SHOWN = 5  # tasks of each direction


@dataclass(frozen=True)
class Comparison:
    """`other` minus `base` on one task file.

    `success`, `score`: difference of the means over tasks, with its paired interval over tasks.
    `p`: of the sign-flip test on success. `changes`: difference in success of each task that
    has one, the largest gain first.
    """

    task_file: str
    base: str
    other: str
    tasks: int  # with scores in both
    success: Estimate
    score: Estimate
    p: float
    better: int  # tasks with more success
    worse: int
    changes: dict[str, float]


def compare(base: EvaluationReport, other: EvaluationReport) -> Comparison | None:
    """Compare two evaluations on the same tasks; None if no task has scores in both."""
    tasks = [task for task, scores in base.scores.items() if scores and other.scores.get(task)]
    if not tasks:
        return None
    success = [_success(other.scores[task]) - _success(base.scores[task]) for task in tasks]
    score = [mean(other.scores[task]) - mean(base.scores[task]) for task in tasks]
    changed = [(task, float(change)) for task, change in zip(tasks, success, strict=True) if change]
    return Comparison(
        task_file=base.task_file,
        base=base.checkpoint,
        other=other.checkpoint,
        tasks=len(tasks),
        success=mean_over_tasks([float(change) for change in success], largest=1.0),
        score=mean_over_tasks(score),
        p=sign_flip(success),
        better=sum(change > 0 for change in success),
        worse=sum(change < 0 for change in success),
        changes=dict(sorted(changed, key=lambda change: (-change[1], change[0]))),
    )


def _success(scores: Sequence[float]) -> Fraction:
    return Fraction(sum(score >= SUCCESS_SCORE for score in scores), len(scores))


def compare_all(reports: Sequence[EvaluationReport]) -> list[Comparison]:
    """Compare the first model with each other one, on each task file that both have."""
    found = []
    for base in reports:
        if base.checkpoint != reports[0].checkpoint:
            continue
        for other in reports:
            same = other.task_file_sha256 == base.task_file_sha256
            if same and other.checkpoint != base.checkpoint:
                compared = compare(base, other)
                found += [compared] if compared else []
    return found


def print_table(console: Console, reports: Sequence[EvaluationReport]) -> None:
    """Print a table for each task file, with the models below each other for each measure."""
    for file in dict.fromkeys(report.task_file for report in reports):
        some = [report for report in reports if report.task_file == file]
        rollouts = max(report.all_rollouts for report in some)
        table = Table(title=f"{Path(file).name}: {some[0].tasks} tasks, {rollouts} rollouts")
        for title in ("", "model", "mean", "95 % interval"):
            table.add_column(title, justify="left" if title in ("", "model") else "right")
        ks = sorted({k for report in some for k in report.pass_at})
        measures: list[tuple[str, Sequence[Estimate | None]]]
        measures = [(f"pass@{k}", [report.pass_at.get(k) for report in some]) for k in ks]
        measures.append(("mean score", [report.mean_score for report in some]))
        measures.append(("mean turns", [report.mean_turns for report in some]))
        for measure, estimates in measures:
            for number, (report, estimate) in enumerate(zip(some, estimates, strict=True)):
                last = number == len(some) - 1
                cells = ("-", "-") if estimate is None else estimate.cells
                table.add_row(
                    "" if number else measure, report.checkpoint, *cells, end_section=last
                )
        console.print(table)
        for report in some:
            if fewer := report.of_fewer_tasks():
                told = f"{report.checkpoint}: {fewer}"
                console.print(told, highlight=False, markup=False, soft_wrap=True)
            if report.failed_rollouts or report.unscored_rollouts:
                console.print(
                    f"{report.checkpoint}: {report.failed_rollouts} of {report.all_rollouts} "
                    f"rollouts ended in errors and {report.unscored_rollouts} have no score; they "
                    "count in no rate",
                    highlight=False, markup=False, soft_wrap=True,
                )  # fmt: skip


def comparison_lines(comparisons: Sequence[Comparison]) -> list[str]:
    """The comparisons in words."""
    lines = []
    for c in comparisons:
        where = Path(c.task_file).name
        lines.append(
            f"{c.other} against {c.base} on {where}: success {c.success.mean:+.3f} "
            f"({_interval(c.success)}), p = {_p(c.p)} by the sign-flip test; "
            f"better on {c.better} of {c.tasks} tasks, worse on {c.worse}"
        )
        changes = list(c.changes.items())
        for title, some in (
            ("better", [change for change in changes if change[1] > 0][:_SHOWN]),
            ("worse", [change for change in reversed(changes) if change[1] < 0][:_SHOWN]),
        ):
            if some:
                told = ", ".join(f"{task} {change:+.2f}" for task, change in some)
                lines.append(f"  most {title} on {told}")
    return lines


def _interval(difference: Estimate) -> str:
    if difference.low is None:
        return "no interval, because all differences are equal"
    return f"95 % interval {difference.interval('+.3f')}"


def _p(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else f"{p:.1e}"


def write_comparison(
    folder: Path, reports: Sequence[EvaluationReport], comparisons: Sequence[Comparison]
) -> Path:
    """Write all reports and comparisons of one command to `comparison.json`, atomically."""
    path = folder / "comparison.json"
    content: dict[str, Any] = {
        "evaluations": [asdict(report) for report in reports],
        "comparisons": [asdict(comparison) for comparison in comparisons],
    }
    with write_whole(path) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path
