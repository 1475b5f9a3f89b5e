"""Tasks with failures: rollouts given up after `max_failures` errors, rollouts that are sampled or
scored again after an error, and groups that could not be finalised so far.

They stay in the ledger with their last error. Groups are finalised with the rollouts that have a
score. What is in quarantine is `quarantine.py`'s. This file only reads.
"""

from dataclasses import dataclass

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Slot, SlotStatus, Split, Task
from agentrl.databases.tasks import record_id

# No index: this is read only on a user's request.
_FAILURES = {
    "$or": [{name: {"$type": "string"}} for name in ("slots.error", "finalisation.error", "error")]
}


@dataclass(frozen=True)
class FailedTask:
    """A Task with failures.

    Of its `rollouts` slots, `failed` were given up, `quarantined` could not be scored, and `again`
    are being sampled or scored again. `group`: its group could not be finalised.
    """

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
    """The number of Tasks with failures."""
    return await database.tasks.count_documents(_FAILURES)


async def failed_tasks(database: RunDatabase) -> list[FailedTask]:
    """All Tasks with failures, evaluations first, then in group order."""
    cursor = database.tasks.find(_FAILURES).sort([("split", 1), ("group_order", 1)])
    return [_read(Task.from_mongo(document)) async for document in cursor]


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
