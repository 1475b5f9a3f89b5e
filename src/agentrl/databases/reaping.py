"""Taking slots away from samplers that went silent.

Anyone may do it at any time, several at once too: a slot is taken away by an update that names the
lease it ends. An expired lease costs its slot one of `max_attempts` where the attempt had begun,
that is, where its Record is stored. A claim whose answer was lost, or whose sampler died before it
could begin, says nothing against the task.
"""

from collections.abc import Sequence
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
    failed: int = 0  # slots given up after `max_attempts`


async def reap_expired(database: RunDatabase, owner: str, max_attempts: int) -> Reaped:
    """End all leases that have run out, as `owner`."""
    returned = failed = 0
    overdue = await database.tasks.aggregate(
        [
            {"$match": {"status": TaskStatus.RUNNING, "$expr": any_slot(EXPIRED)}},
            {"$project": {"slots": slots_where(EXPIRED)}},
        ]
    )
    for task, slots in [(task["_id"], task["slots"]) async for task in overdue]:
        expired = {slot["record"]: slot["lease_expires"] for slot in slots}
        begun = await database.records.distinct("_id", {"_id": {"$in": list(expired)}})
        before = await _take_away(database, owner, max_attempts, task, sorted(expired), begun)
        lost = [
            slot
            for slot in before
            if slot.status == SlotStatus.LEASED
            and slot.record is not None
            # One that its owner extended meanwhile was left to it.
            and expired.get(slot.record) == slot.lease_expires
        ]
        await close_lost_records(database, {"_id": {"$in": [slot.record for slot in lost]}})
        for slot in lost:
            if slot.failures + (slot.record in begun) >= max_attempts:
                failed += 1
            else:
                returned += 1
    return Reaped(returned, failed)


async def close_lost_records(database: RunDatabase, selection: dict[str, Any]) -> None:
    """Say of Records of leases that ran out that they have ended."""
    await change_records(
        database.records, selection, RecordStatus.FAILED, {"error": "its sampler went silent"}
    )


async def _take_away(
    database: RunDatabase,
    owner: str,
    max_attempts: int,
    task: str,
    records: Sequence[str],
    begun: Sequence[str],
) -> list[Slot]:
    """End the expired leases among those of `records`; returns all slots as they were."""
    is_lost = all_of(EXPIRED, {"$in": ["$$slot.record", literal(records)]})
    has_begun = {"$in": ["$$slot.record", literal(begun)]}
    failures = {"$add": ["$$slot.failures", {"$cond": [has_begun, 1, 0]}]}
    lost = {
        "failures": failures,
        "error": {"$concat": ["lease expired: sampler ", "$$slot.owner", " went silent"]},
        "owner": None,
        "lease_expires": None,
    }
    is_spent = {"$gte": [failures, max_attempts]}
    given_up = slots_changed(all_of(is_lost, is_spent), SlotStatus.FAILED, lost)
    returned = slots_changed(
        is_lost, SlotStatus.PENDING, {**lost, "attempt": {"$add": ["$$slot.attempt", 1]}}
    )
    # If the last slot is given up here, the next `claim_finalisation` is to find the group.
    ended_at_once = {"owner": literal(owner), "lease_expires": "$$NOW"}
    before = await database.tasks.find_one_and_update(
        {"_id": task, "status": TaskStatus.RUNNING},
        [
            {"$set": {"slots": given_up}},
            {"$set": {"slots": returned}},
            *group_settled(ended_at_once),
        ],
    )
    return Task.from_mongo(before).slots if before else []
