"""How the latest attempts and groups of a run ended: small reads by indexes, newest first."""

from datetime import datetime
from typing import Any

from agentrl.databases.connection import RunDatabase
from agentrl.databases.diagnosis import AttemptEnd, GroupEnd
from agentrl.databases.documents import HANDED_BACK, SlotStatus, Split, TaskStatus


async def latest_attempts(
    database: RunDatabase, limit: int, after: datetime | None = None
) -> list[AttemptEnd]:
    """Attempts that ended with a score or an error of their own; those handed back did not."""
    wanted: dict[str, Any] = {
        "split": {"$in": list(Split)},  # named so that the index serves
        "finished_at": {"$ne": None} if after is None else {"$gt": after},
        "error": {"$not": {"$regex": f"^{HANDED_BACK}"}},
    }
    cursor = database.records.find(wanted, {"finished_at": 1, "error": 1})
    newest = cursor.sort("finished_at", -1).limit(limit)
    return [AttemptEnd(document["finished_at"], document["error"]) async for document in newest]


async def latest_groups(
    database: RunDatabase, limit: int, after: datetime | None = None
) -> list[GroupEnd]:
    """Training groups that were finalised."""
    wanted: dict[str, Any] = {"split": Split.TRAIN, "status": TaskStatus.COMPLETED}
    if after is not None:
        wanted["completed_at"] = {"$gt": after}
    shown = {
        "completed_at": 1, "outcome": 1, "slots.status": 1, "slots.score": 1, "slots.error": 1,
        "group_scores.error": 1,
    }  # fmt: skip
    cursor = database.tasks.find(wanted, shown).sort([("split", -1), ("completed_at", -1)])
    return [_group_end(document) async for document in cursor.limit(limit).hint("completed")]


def _group_end(task: dict[str, Any]) -> GroupEnd:
    outcome = task.get("outcome")  # of an earlier version's groups there is none
    said = task.get("group_scores") or []
    return GroupEnd(
        at=task["completed_at"],
        rows=outcome["rows"] if outcome else None,
        left_out=outcome["left_out"] if outcome else {},
        scores=[slot["score"] for slot in task["slots"] if slot["score"] is not None],
        given_up=[slot["error"] for slot in task["slots"] if slot["status"] == SlotStatus.FAILED],
        scorer_error=next((s["error"] for s in said if s.get("error")), None),
    )
