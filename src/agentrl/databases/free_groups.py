"""The groups that a claim may take, as queries that read no group in vain.

While nothing is held back these are the free groups in their order. While something is out of
reach, thousands of groups that need it may stand before those that do not. So the kinds of the free
groups are found first, a look into the index for each, and a claim names those that it may take.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bson import MaxKey, MinKey

from agentrl.databases.connection import Documents
from agentrl.databases.documents import Split, TaskStatus
from agentrl.databases.scorer_notation import parse_scorer
from agentrl.databases.task_choice import TaskChoice

Query = dict[str, Any]
KINDS_AT_ONCE = 50  # in one query: mongod merges up to 200 scans, and a kind may have four
_FREE = {"$gt": 0}


class Kind(NamedTuple):
    """What the line of a task names, as it names it."""

    agent: str | None
    scorer: str


async def kinds_without(tasks: Documents, split: Split, without: TaskChoice) -> list[Kind]:
    """The kinds of free groups that `without` does not include."""
    kinds: list[Kind] = []
    first: tuple[Any, ...] = (MinKey(), MinKey(), MinKey(), MinKey())
    while True:
        found = await tasks.find_one(
            {"split": split, "pending": _FREE},
            {"_id": 0, "agent_name": 1, "scorer": 1},
            hint="free_kinds",
            min=_key(split, *first),
            max=_key(split, *4 * (MaxKey(),)),
        )
        if found is None:
            return kinds
        kind = Kind(found["agent_name"], found["scorer"])
        first = (*kind, MaxKey(), MaxKey())  # behind all groups of this kind
        if not without.includes(kind.agent, parse_scorer(kind.scorer).keys()):
            kinds.append(kind)


def free_groups(
    split: Split, places: dict[str, int], kinds: Sequence[Kind] | None, *, begun: bool
) -> Iterator[tuple[Query, str]]:
    """Queries for the free groups at `places` of the group order, each with its index.

    `kinds`: only these, where not None. `begun`: only groups that were begun.
    """
    free: Query = {"split": split, "pending": _FREE}
    if places:
        free["group_order"] = places
    if kinds is None:
        if begun:
            free["status"] = TaskStatus.RUNNING
        yield free, "free_begun" if begun else "free"
        return
    statuses = [TaskStatus.RUNNING] if begun else [TaskStatus.CREATED, TaskStatus.RUNNING]
    for first in range(0, len(kinds), KINDS_AT_ONCE):
        some = kinds[first : first + KINDS_AT_ONCE]
        # One scan for each, in the groups' order: mongod merges them, and reads the first only.
        each = [
            {**free, "agent_name": kind.agent, "scorer": kind.scorer, "status": status}
            for kind in some
            for status in statuses
        ]
        yield {"$or": each}, "free_kinds"


def _key(split: Split, *values: Any) -> dict[str, Any]:
    """A place in the index `free_kinds`."""
    names = ("agent_name", "scorer", "status", "group_order")
    return {"split": split, **dict(zip(names, values, strict=True))}
