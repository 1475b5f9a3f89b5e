"""Taking slots away from samplers that went silent.

Anyone may do it at any time, several at once too: a slot is taken away by an update that names the
lease it ends. How far the attempt came, its Record says, and `_end_of` says what follows from it:

* there is none: a claim whose answer was lost, or whose sampler died before it could begin. That
  says nothing against the task, and the slot is pending again at no cost.
* it is scored: the sampler died before it could complete the slot, which is done here.
* else the attempt has failed, and the slot is tried again, or given up after `max_failures`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import RecordStatus, Slot, SlotStatus, Task, TaskStatus
from agentrl.databases.expressions import EXPIRED, all_of, any_slot, literal, slots_where
from agentrl.databases.transitions import change_records, group_settled, slots_changed


@dataclass(frozen=True)
class Reaped:
    """What one pass of the reaper did."""

    returned: int = 0  # slots that went back to pending
    failed: int = 0  # slots given up after `max_failures`
    completed: int = 0  # slots whose Record had its score


@dataclass(frozen=True)
class _End:
    """What becomes of a slot whose lease has run out. `fields`: values, beside the status."""

    slot: Slot  # as it was read
    status: SlotStatus
    fields: Mapping[str, Any]


async def reap_expired(database: RunDatabase, owner: str, max_failures: int) -> Reaped:
    """End all leases that have run out, as `owner`."""
    outcomes: list[SlotStatus] = []
    overdue = await database.tasks.aggregate(
        [
            {"$match": {"status": TaskStatus.RUNNING, "$expr": any_slot(EXPIRED)}},
            {"$project": {"slots": slots_where(EXPIRED)}},
        ]
    )
    async for task in overdue:
        slots = [Slot.model_validate(slot) for slot in task["slots"]]
        found = database.records.find(
            {"_id": {"$in": [slot.record for slot in slots]}}, {"status": 1, "score": 1}
        )
        records = {record["_id"]: record async for record in found}
        ends = [_end_of(slot, records.get(slot.record), max_failures) for slot in slots]
        ended = await _end_leases(database, owner, task["_id"], ends)
        lost = [end.slot.record for end in ended if end.status != SlotStatus.COMPLETED]
        await close_lost_records(database, {"_id": {"$in": lost}})
        outcomes += [end.status for end in ended]
    return Reaped(
        returned=outcomes.count(SlotStatus.PENDING),
        failed=outcomes.count(SlotStatus.FAILED),
        completed=outcomes.count(SlotStatus.COMPLETED),
    )


async def close_lost_records(database: RunDatabase, selection: dict[str, Any]) -> None:
    """Say of Records of leases that ran out that they have failed.

    One may even be scored, if its score was held up on its way until after the reaper had looked.
    """
    await change_records(
        database.records, selection, RecordStatus.FAILED, {"error": "its sampler went silent"}
    )


def _end_of(slot: Slot, record: Mapping[str, Any] | None, max_failures: int) -> _End:
    """The rules. `record`: status and score of the Record that the lease was for, if there is one.

    What is read of the slot holds as long as its `record` does: every lease has one of its own.
    """
    unheld = {"owner": None, "lease_expires": None}
    if record is not None and record["status"] == RecordStatus.SCORED:
        scored = {**unheld, "score": record["score"], "error": None}
        return _End(slot, SlotStatus.COMPLETED, scored)
    failures = slot.failures + (record is not None)
    silent = {
        **unheld,
        "failures": failures,
        "error": f"lease expired: sampler {slot.owner} went silent",
    }
    if record is not None and failures >= max_failures:
        return _End(slot, SlotStatus.FAILED, silent)
    return _End(slot, SlotStatus.PENDING, {**silent, "attempt": slot.attempt + 1})


async def _end_leases(
    database: RunDatabase, owner: str, task: str, ends: Sequence[_End]
) -> list[_End]:
    """End leases of a Task; returns those that were ended."""
    # If this ends the group's last slot, the next `claim_finalisation` is to find the group.
    ended_at_once = {"owner": literal(owner), "lease_expires": "$$NOW"}
    stages = [
        slots_changed(
            all_of(EXPIRED, {"$eq": ["$$slot.record", literal(end.slot.record)]}),
            end.status,
            {name: literal(value) for name, value in end.fields.items()},
        )
        for end in ends
    ]
    before = await database.tasks.find_one_and_update(
        {"_id": task, "status": TaskStatus.RUNNING},
        [*({"$set": {"slots": slots}} for slots in stages), *group_settled(ended_at_once)],
    )
    held = {
        (slot.record, slot.lease_expires)
        for slot in (Task.from_mongo(before).slots if before else [])
        if slot.status == SlotStatus.LEASED
    }
    # One that its owner extended meanwhile was left to it.
    return [end for end in ends if (end.slot.record, end.slot.lease_expires) in held]
