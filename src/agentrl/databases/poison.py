"""Tasks with attempts that were given up: `max_attempts` Records of a slot ended in an error.

They stay in the ledger with their last error. Their groups are finalised with the attempts that
have a score; nothing here changes them.
"""

from dataclasses import dataclass

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import SlotStatus, Split, Task


@dataclass(frozen=True)
class PoisonTask:
    """A Task of which `failed` out of `attempts` slots were given up."""

    task_id: str  # the line's own id
    split: Split
    epoch: int
    failed: int
    attempts: int
    error: str  # of the last slot that was given up
    record: str  # the Record of that slot's last attempt


async def poison_tasks(database: RunDatabase) -> list[PoisonTask]:
    """All of them, in the order in which their groups were begun; evaluations first."""
    poisoned = []
    # No index: a person asks, now and then.
    cursor = database.tasks.find({"slots.status": SlotStatus.FAILED}).sort(
        [("split", 1), ("place", 1)]
    )
    async for document in cursor:
        task = Task.from_mongo(document)
        failed = [slot for slot in task.slots if slot.status == SlotStatus.FAILED]
        last = failed[-1]
        assert last.error is not None and last.record is not None, f"{task.id} lost its error"
        poisoned.append(
            PoisonTask(
                task_id=task.task_id,
                split=Split(task.split),
                epoch=task.epoch,
                failed=len(failed),
                attempts=len(task.slots),
                error=last.error,
                record=last.record,
            )
        )
    return poisoned
