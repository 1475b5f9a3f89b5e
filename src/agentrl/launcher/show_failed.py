"""`agentrl show RUN --failed`: the tasks with failures, and what is in quarantine."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from agentrl.databases.connection import RunDatabase
from agentrl.databases.failed_tasks import COUNTED, FailedTask, count_failed_tasks, failed_tasks
from agentrl.databases.quarantine import QuarantinedItem, count_quarantined, list_quarantined

_SHOWN = 100  # largest number of tasks, and of items of each kind in quarantine


@dataclass(frozen=True)
class Failures:
    """What failed in a run. `n_tasks`, `n_quarantined`: of all, of which the lists have some."""

    n_tasks: int
    tasks: list[FailedTask]
    n_quarantined: int
    quarantined: list[QuarantinedItem]


async def read_failures(database: RunDatabase) -> Failures:
    """The last tasks with failures, and items in quarantine."""
    return Failures(
        n_tasks=await count_failed_tasks(database),
        tasks=await failed_tasks(database, _SHOWN),
        n_quarantined=(await count_quarantined(database)).total,
        quarantined=await list_quarantined(database, _SHOWN),
    )


def counted(n_failed: int) -> str:
    """The number of tasks with failures, which are counted only up to a limit."""
    return f"{n_failed} or more" if n_failed == COUNTED else str(n_failed)


def print_failed_tasks(console: Console, tasks: Sequence[FailedTask], n_failed: int) -> None:
    """Print two lines for each task: how many of its rollouts failed, and the last error.

    `n_failed`: number of all tasks with failures, of which `tasks` are the last ones.
    """
    if not tasks:
        console.print("no rollout and no group of this run failed")
    elif n_failed > len(tasks):
        console.print(f"the last {len(tasks)} of {counted(n_failed)} tasks with failures:")
    for task in tasks:
        failed = [
            f"{task.failed} of {task.rollouts} given up" if task.failed else "",
            f"{task.quarantined} of {task.rollouts} not scored" if task.quarantined else "",
            f"{task.again} of {task.rollouts} tried again" if task.again else "",
            "group not finalised" if task.group else "",
        ]
        head = f"task {task.task_id}, {task.split} epoch {task.epoch}: "
        head += ", ".join(filter(None, failed))
        head += f"; last record {task.record}" if task.record else ""
        # Not cut, because an error ends with its place in a file.
        console.print(Text(head), soft_wrap=True)
        console.print(Text(f"    {task.error}", "red"), soft_wrap=True)


def print_quarantined(
    console: Console, run: str, items: Sequence[QuarantinedItem], in_quarantine: int
) -> None:
    """Print two lines for each item in quarantine, and the command that releases them.

    `in_quarantine`: number of all items in quarantine, of which `items` are some.
    """
    if in_quarantine > len(items):
        console.print(f"{len(items)} of {in_quarantine} in quarantine:")
    for item in items:
        console.print(Text(f"{item.kind} {item.id} is in quarantine"), soft_wrap=True)
        console.print(Text(f"    {item.error}", "red"), soft_wrap=True)
    if items:
        console.print(Text(f"`agentrl release {run}` puts back what is in quarantine"))
