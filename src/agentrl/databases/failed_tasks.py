"""Tasks with failures: rollouts given up after `max_failures` errors, rollouts that are tried again
after one, and groups whose scorer failed.

They stay in the ledger with their last error. Groups are finalised with the rollouts that have a
score; nothing here changes them.
"""

from dataclasses import dataclass

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Slot, SlotStatus, Split, Task
from agentrl.databases.tasks import record_id

# No index: a person asks, now and then.
_FAILURES = {
    "$or": [{"slots.error": {"$type": "string"}}, {"group_scores.error": {"$type": "string"}}]
}


@dataclass(frozen=True)
class FailedTask:
    """A Task with failures: of its `rollouts` slots `failed` were given up, and `again` are tried
    again. `unscored`: the scorer of its group failed."""

    task_id: str  # the line's own id
    split: Split
    epoch: int
    failed: int
    again: int
    unscored: bool
    rollouts: int
    error: str  # the last one
    record: str  # the Record that it ended; of a group one of them


async def count_failed_tasks(database: RunDatabase) -> int:
    """How many there are."""
    return await database.tasks.count_documents(_FAILURES)


async def failed_tasks(database: RunDatabase) -> list[FailedTask]:
    """All of them, in the order in which their groups were begun; evaluations first."""
    cursor = database.tasks.find(_FAILURES).sort([("split", 1), ("group_order", 1)])
    return [_read(Task.from_mongo(document)) async for document in cursor]


def _read(task: Task) -> FailedTask:
    failed = [slot for slot in task.slots if slot.status == SlotStatus.FAILED]
    again = [slot for slot in task.slots if slot.error is not None and slot not in failed]
    unscored = [said for said in task.group_scores or [] if said.error is not None]
    error: str | None
    record: str | None
    if unscored:
        error, record = unscored[-1].error, unscored[-1].record
    else:
        last = (failed or again)[-1]
        error, record = last.error, _failed_record(task, last)
    assert error is not None and record is not None, f"{task.id} lost its error"
    return FailedTask(
        task_id=task.task_id,
        split=Split(task.split),
        epoch=task.epoch,
        failed=len(failed),
        again=len(again),
        unscored=bool(unscored),
        rollouts=len(task.slots),
        error=error,
        record=record,
    )


def _failed_record(task: Task, slot: Slot) -> str | None:
    """The Record of a slot's last attempt that ended; a leased slot has that of the next."""
    if slot.status != SlotStatus.LEASED:
        return slot.record
    return record_id(task.id, slot.rollout, slot.attempt - 1)
