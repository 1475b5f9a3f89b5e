"""Taking slots away from samplers that went silent.

Anyone may do it at any time, several at once too: a slot is taken away by an update that names the
lease it ends. How far the attempt came, its Record says:

* there is none: a claim whose answer was lost, or whose sampler died before it could begin. That
  says nothing against the task, and the slot is pending again at no cost.
* it is scored: the sampler died before it could complete the slot, which is done here.
* else the attempt has failed, and the slot is tried again, or given up after `max_failures`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import RecordStatus, Slot, SlotStatus, Task, TaskStatus
from agentrl.databases.expressions import (
    EXPIRED,
    Expression,
    all_of,
    any_slot,
    literal,
    slots_where,
)
from agentrl.databases.transitions import change_records, group_settled, slots_changed

_UNHELD = {"owner": None, "lease_expires": None}


@dataclass(frozen=True)
class Reaped:
    """What one pass of the reaper did."""

    returned: int = 0  # slots that went back to pending
    failed: int = 0  # slots given up after `max_failures`
    completed: int = 0  # slots whose Record had its score


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
        expired = {slot["record"]: slot["lease_expires"] for slot in task["slots"]}
        begun: set[str] = set()
        scored: dict[str, float | None] = {}
        async for record in database.records.find(
            {"_id": {"$in": list(expired)}}, {"status": 1, "score": 1}
        ):
            begun.add(record["_id"])
            if record["status"] == RecordStatus.SCORED:
                scored[record["_id"]] = record["score"]
        stages = _ends_of(expired, begun, scored, max_failures)
        lost = await _take_away(database, owner, task["_id"], expired, stages)
        ends = {str(slot.record): _outcome(slot, begun, scored, max_failures) for slot in lost}
        ended = [record for record, end in ends.items() if end != SlotStatus.COMPLETED]
        await close_lost_records(database, {"_id": {"$in": ended}})
        outcomes += ends.values()
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


def _ends_of(
    expired: Mapping[str, datetime],
    begun: Collection[str],
    scored: Mapping[str, float | None],
    max_failures: int,
) -> list[Expression]:
    """The `slots` of a Task after its expired leases ended, step after step.

    `expired`: ends of leases by Record. `begun`: those of the Records that are stored. `scored`:
    the scores of those that were scored.
    """
    is_lost = all_of(EXPIRED, {"$in": ["$$slot.record", literal(sorted(expired))]})
    has_begun = {"$in": ["$$slot.record", literal(sorted(begun))]}
    failures = {"$add": ["$$slot.failures", {"$cond": [has_begun, 1, 0]}]}
    silent = {
        "failures": failures,
        "error": {"$concat": ["lease expired: sampler ", "$$slot.owner", " went silent"]},
        **_UNHELD,
    }
    is_spent = {"$gte": [failures, max_failures]}
    again = {**silent, "attempt": {"$add": ["$$slot.attempt", 1]}}
    return [
        *(
            slots_changed(
                all_of(is_lost, {"$eq": ["$$slot.record", literal(record)]}),
                SlotStatus.COMPLETED,
                {"score": literal(score), "error": None, **_UNHELD},
            )
            for record, score in scored.items()
        ),
        slots_changed(all_of(is_lost, has_begun, is_spent), SlotStatus.FAILED, silent),
        slots_changed(is_lost, SlotStatus.PENDING, again),
    ]


def _outcome(
    slot: Slot, begun: Collection[str], scored: Collection[str], max_failures: int
) -> SlotStatus:
    """What became of an expired slot: the same rules for one that was read."""
    assert slot.record is not None
    if slot.record not in begun:
        return SlotStatus.PENDING
    if slot.record in scored:
        return SlotStatus.COMPLETED
    return SlotStatus.FAILED if slot.failures + 1 >= max_failures else SlotStatus.PENDING


async def _take_away(
    database: RunDatabase,
    owner: str,
    task: str,
    expired: Mapping[str, datetime],
    ends: list[Expression],
) -> list[Slot]:
    """End the leases; returns the slots that were taken away, as they were."""
    # If this ends the group's last slot, the next `claim_finalisation` is to find the group.
    ended_at_once = {"owner": literal(owner), "lease_expires": "$$NOW"}
    before = await database.tasks.find_one_and_update(
        {"_id": task, "status": TaskStatus.RUNNING},
        [*({"$set": {"slots": slots}} for slots in ends), *group_settled(ended_at_once)],
    )
    return [
        slot
        for slot in (Task.from_mongo(before).slots if before else [])
        if slot.status == SlotStatus.LEASED
        and slot.record is not None
        # One that its owner extended meanwhile was left to it.
        and expired.get(slot.record) == slot.lease_expires
    ]
