"""Tasks with failures: rollouts given up after `max_failures` errors, rollouts that are sampled or
scored again after an error, and groups that could not be finalised so far.

They stay in the ledger with their last error. Groups are finalised with the rollouts that have a
score. What is in quarantine is `quarantine.py`'s. This file only reads.
"""

from dataclasses import dataclass
from typing import Any

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Slot, SlotStatus, Split, Task, TaskStatus
from agentrl.databases.tasks import record_id

_TEXT = {"$type": "string"}
_NO_SLOT = {"slots.error": {"$not": _TEXT}}
# Each by an index that holds them in their order: a run may have a million other tasks.
_FAILURES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"slots.error": _TEXT}, "failed"),
    ({"status": TaskStatus.FINALISING, "finalisation.error": _TEXT, **_NO_SLOT}, "state"),
    ({"status": TaskStatus.QUARANTINED, **_NO_SLOT}, "state"),
)
COUNTED = 10_000  # of more failures it is not asked how many


@dataclass(frozen=True)
class FailedTask:
    """A Task with failures.

    Of its `rollouts` slots, `failed` were given up, `quarantined` could not be scored, and `again`
    are being sampled or scored again. `group`: its group could not be finalised.
    """

    id: str  # the Task's, which is the group's
    task_id: str  # the line's own id
    split: Split
    epoch: int
    failed: int
    quarantined: int
    again: int
    group: bool
    rollouts: int
    error: str  # the last error
    record: str | None  # the Record that the error ended; None for an error of the group


async def count_failed_tasks(database: RunDatabase) -> int:
    """The number of Tasks with failures, `COUNTED` at the most."""
    counts = [
        await database.tasks.count_documents(failures, limit=COUNTED, hint=index)
        for failures, index in _FAILURES
    ]
    return min(sum(counts), COUNTED)


async def failed_tasks(database: RunDatabase, limit: int = COUNTED) -> list[FailedTask]:
    """The last `limit` Tasks with failures: evaluations first, then in group order."""
    found: list[Task] = []
    for failures, index in _FAILURES:
        newest = database.tasks.find(failures, hint=index, limit=limit)
        newest = newest.sort([("split", -1), ("group_order", -1)])
        found += [Task.from_mongo(document) async for document in newest]
    found.sort(key=lambda task: (task.split, task.group_order))
    return [_read(task) for task in found[-limit:]]


def _read(task: Task) -> FailedTask:
    of_status = {
        status: [slot for slot in task.slots if slot.status == status]
        for status in (SlotStatus.FAILED, SlotStatus.QUARANTINED)
    }
    failed, quarantined = of_status.values()
    again = [
        slot for slot in task.slots if slot.error is not None and slot not in failed + quarantined
    ]
    error = task.error or (task.finalisation.error if task.finalisation else None)
    record: str | None = None
    group = error is not None
    if not group:
        last = (failed or quarantined or again)[-1]
        error, record = last.error, _failed_record(task, last)
    assert error is not None, f"{task.id} lost its error"
    return FailedTask(
        id=task.id,
        task_id=task.task_id,
        split=Split(task.split),
        epoch=task.epoch,
        failed=len(failed),
        quarantined=len(quarantined),
        again=len(again),
        group=group,
        rollouts=len(task.slots),
        error=error,
        record=record,
    )


def _failed_record(task: Task, slot: Slot) -> str | None:
    """The Record of a slot's last ended attempt.

    A leased slot names the Record of the current attempt, unless it is being scored again.
    """
    if slot.status != SlotStatus.LEASED or slot.scorings:
        return slot.record
    return record_id(task.id, slot.rollout, slot.attempt - 1)
