"""`agentrl show RUN --failed`: errors of tasks, and what is in quarantine."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from agentrl.databases.connection import RunDatabase
from agentrl.databases.diagnosis import kind_of
from agentrl.databases.failed_tasks import COUNTED, FailedTask, count_failed_tasks, failed_tasks
from agentrl.databases.quarantine import QuarantinedItem, count_quarantined, list_quarantined

_READ = 1000  # largest number of tasks, and of items of each kind in quarantine
_NAMED = 3  # tasks and items with the same error
T = TypeVar("T")


@dataclass(frozen=True)
class Failures:
    """What failed in a run. `n_tasks`, `n_quarantined`: of all, of which the lists have some."""

    n_tasks: int
    tasks: list[FailedTask]
    n_quarantined: int
    quarantined: list[QuarantinedItem]


async def read_failures(database: RunDatabase, count: int = _READ) -> Failures:
    """The last tasks with failures, and items in quarantine; `count` of each kind at the most."""
    return Failures(
        n_tasks=await count_failed_tasks(database),
        tasks=await failed_tasks(database, count),
        n_quarantined=(await count_quarantined(database)).total,
        quarantined=await list_quarantined(database, count),
    )


def counted(n_failed: int) -> str:
    """The number of tasks with failures, which are counted only up to a limit."""
    return f"{n_failed} or more" if n_failed == COUNTED else str(n_failed)


def print_failed_tasks(
    console: Console, tasks: Sequence[FailedTask], n_failed: int, count: int
) -> None:
    """Print the tasks' last errors, `count` of them, the most frequent first: how many tasks and
    rollouts had one, the last of these tasks, and the error.

    `n_failed`: number of all tasks with failures, of which `tasks` are the last ones.
    """
    if not tasks:
        console.print("no rollout and no group of this run failed")
    elif n_failed > len(tasks):
        console.print(f"the last {len(tasks)} of {counted(n_failed)} tasks with failures:")
    # The newest first.
    kinds = _by_kind((task, task.error) for task in reversed(tasks))
    for alike in kinds[:count]:
        of_all = sum(task.rollouts for task in alike)
        ends = {
            "given up": sum(task.failed for task in alike),
            "not scored": sum(task.quarantined for task in alike),
            "tried again": sum(task.again for task in alike),
        }
        parts = [f"{number} of {of_all} rollouts {what}" for what, number in ends.items() if number]
        groups = sum(task.group for task in alike)
        if groups:
            parts.append(
                "its group not finalised" if len(alike) == 1 else f"{groups} groups not finalised"
            )
        failed = ", ".join(parts)
        named = [
            f"{task.task_id} ({task.split} epoch {task.epoch}"
            + (f", record {task.record})" if task.record else ")")
            for task in alike[:_NAMED]
        ]
        tasks_said = "1 task" if len(alike) == 1 else f"{len(alike)} tasks"
        _print_error(
            console, f"{tasks_said}, {failed}: {_listed(named, len(alike))}", alike[0].error
        )
    _print_rest(console, len(kinds) - count)


def print_quarantined(
    console: Console, run: str, items: Sequence[QuarantinedItem], in_quarantine: int, count: int
) -> None:
    """Print the errors of items in quarantine, `count` of them, and the command that releases the
    items.

    `in_quarantine`: number of all items in quarantine, of which `items` are some.
    """
    if in_quarantine > len(items):
        console.print(f"{len(items)} of {in_quarantine} in quarantine:")
    kinds = _by_kind((item, item.error) for item in items)
    for alike in kinds[:count]:
        named = _listed([f"{item.kind} {item.id}" for item in alike[:_NAMED]], len(alike))
        are = "is" if len(alike) == 1 else "are"
        _print_error(console, f"{named} {are} in quarantine", alike[0].error)
    _print_rest(console, len(kinds) - count)
    if items:
        console.print(Text(f"`agentrl release {run}` puts back what is in quarantine"))


def _by_kind(failures: Iterable[tuple[T, str]]) -> list[list[T]]:
    """What failed, by the kind of its error, the most frequent kind first."""
    kinds: dict[tuple[str, str], list[T]] = {}
    for failed, error in failures:
        kinds.setdefault(kind_of(error), []).append(failed)
    return sorted(kinds.values(), key=len, reverse=True)


def _listed(named: Sequence[str], among: int) -> str:
    others = among - len(named)
    return ", ".join(named) + (f" and {others} more" if others else "")


def _print_error(console: Console, head: str, error: str) -> None:
    # Not cut, because an error ends with its place in a file.
    console.print(Text(head), soft_wrap=True)
    console.print(Text(f"    {error}", "red"), soft_wrap=True)


def _print_rest(console: Console, others: int) -> None:
    if others > 0:
        console.print(f"and {others} other error{'s' * (others > 1)} (--count)")
