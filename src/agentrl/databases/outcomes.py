"""How the latest attempts and groups of a run ended: small reads by indexes, newest first."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from agentrl.databases.connection import BEFORE_ALL, RunDatabase
from agentrl.databases.diagnosis import AttemptEnd, GroupEnd
from agentrl.databases.documents import HANDED_BACK, SlotStatus, Split, TaskStatus


async def latest_attempts(
    database: RunDatabase, limit: int, after: datetime | None = None
) -> list[AttemptEnd]:
    """The latest `limit` attempts that ended with a score or an error, newest first.

    Attempts that were handed back are left out, and those at forks: a program that does not do the
    same again fails all of its forks, and its rollouts are trained nevertheless. `after`: only
    those that ended later.
    """
    wanted: dict[str, Any] = {
        "split": {"$in": list(Split)},  # all splits: the index begins with it
        "finished_at": {"$ne": None} if after is None else {"$gt": after},
        "error": {"$not": {"$regex": f"^{HANDED_BACK}"}},
        "fork": None,
    }
    shown = {"finished_at": 1, "error": 1, "task": 1, "rollout": 1}
    newest = database.records.find(wanted, shown).sort("finished_at", -1).limit(limit)
    return [attempt_end(document) async for document in newest]


def attempt_end(record: Mapping[str, Any]) -> AttemptEnd:
    """How the attempt of a stored Record ended."""
    rollout = f"{record['task']}-{record['rollout']}"
    return AttemptEnd(record["finished_at"], record["error"], rollout)


async def latest_groups(
    database: RunDatabase, limit: int, after: datetime | None = None
) -> list[GroupEnd]:
    """The latest `limit` training groups that were completed or quarantined, newest first."""
    wanted: dict[str, Any] = {
        "split": Split.TRAIN,
        "status": {"$in": [TaskStatus.COMPLETED, TaskStatus.QUARANTINED]},
        "completed_at": {"$gt": after or BEFORE_ALL},
    }
    shown = {
        "completed_at": 1, "outcome": 1, "slots.status": 1, "slots.score": 1, "slots.error": 1,
        "slots.fork": 1, "error": 1,
    }  # fmt: skip
    cursor = database.tasks.find(wanted, shown).sort([("split", -1), ("completed_at", -1)])
    return [_group_end(document) async for document in cursor.limit(limit).hint("completed")]


def _group_end(task: dict[str, Any]) -> GroupEnd:
    error = task.get("error")
    outcome = task.get("outcome")  # groups of earlier versions have none
    return GroupEnd(
        at=task["completed_at"],
        rows=outcome["rows"] if outcome else 0 if error else None,
        left_out=outcome["left_out"] if outcome else {},
        scores=[slot["score"] for slot in task["slots"] if slot["score"] is not None],
        given_up=[
            slot["error"]
            for slot in task["slots"]
            if slot["status"] == SlotStatus.FAILED and slot.get("fork") is None
        ],
        scorer_error=error,
    )
