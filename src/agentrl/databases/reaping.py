"""Taking slots away from samplers that went silent.

Any process may do it at any time, also concurrently: each update names the lease that it ends. The
new state of the slot depends on the attempt's Record (`_end_of`):

* no Record: the claim's answer was lost, or the sampler died before it began. The slot becomes
  pending, and this is no failure.
* scored or quarantined: the sampler died before it updated the slot. The slot gets that status.
* sampled: the trajectory is kept and scored again. This counts against `max_scoring_failures`,
  because a scorer may kill its process; the next claim of the scoring checks the limit.
* else the attempt is lost: the slot becomes pending. Samplers die for other reasons too, so the
  first `FREE_LOSSES` of a slot do not count. An agent may kill its process, so each further loss is
  a failure, and the slot is given up after `max_failures`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from agentrl.databases.transitions import (
    SLOTS_AT_ONCE,
    change_records,
    group_settled,
    slots_changed,
)

FREE_LOSSES = 3
_WITHOUT_RECORD = frozenset({SlotStatus.PENDING, SlotStatus.FAILED})  # the lease's Record is lost


@dataclass(frozen=True)
class Reaped:
    """Numbers of slots that one pass of the reaper changed."""

    returned: int = 0  # pending again
    failed: int = 0  # given up after `max_failures`
    sampled: int = 0  # to be scored again
    completed: int = 0  # the Record was scored already
    quarantined: int = 0  # the Record was in quarantine already


@dataclass(frozen=True)
class _End:
    """The new status of a slot whose lease has expired. `fields`: further changes."""

    slot: Slot  # as it was read
    status: SlotStatus
    fields: Mapping[str, Expression]


async def reap_expired(database: RunDatabase, max_failures: int) -> Reaped:
    """End all expired leases of rollouts."""
    outcomes: list[SlotStatus] = []
    overdue = await database.tasks.aggregate(
        [
            {"$match": {"status": TaskStatus.RUNNING, "$expr": any_slot(EXPIRED)}},
            {"$project": {"slots": slots_where(EXPIRED)}},
        ]
    )
    async for task in overdue:
        # The others are ended by the next call.
        slots = [Slot.model_validate(slot) for slot in task["slots"][:SLOTS_AT_ONCE]]
        found = database.records.find(
            {"_id": {"$in": [slot.record for slot in slots]}}, {"status": 1, "score": 1, "error": 1}
        )
        records = {record["_id"]: record async for record in found}
        ends = [_end_of(slot, records.get(slot.record), max_failures) for slot in slots]
        ended = await _end_leases(database, task["_id"], ends)
        lost = [end.slot.record for end in ended if end.status in _WITHOUT_RECORD]
        await close_lost_records(database, {"_id": {"$in": lost}})
        outcomes += [end.status for end in ended]
    return Reaped(
        returned=outcomes.count(SlotStatus.PENDING),
        failed=outcomes.count(SlotStatus.FAILED),
        sampled=outcomes.count(SlotStatus.SAMPLED),
        quarantined=outcomes.count(SlotStatus.QUARANTINED),
        completed=outcomes.count(SlotStatus.COMPLETED),
    )


async def close_lost_records(database: RunDatabase, selection: dict[str, Any]) -> None:
    """Mark Records of expired leases as failed.

    A Record may be scored by now, if its score arrived after the reaper had read it.
    """
    await change_records(
        database.records, selection, RecordStatus.FAILED, {"error": "its sampler went silent"}
    )


def _end_of(slot: Slot, record: Mapping[str, Any] | None, max_failures: int) -> _End:
    """What follows from an expired lease, by the rules in the module docstring.

    `record`: status, score and error of the lease's Record, if it exists. The update names the
    slot's `record` and `scorings`, which number the leases of one Record, so it cannot end a later
    one.
    """
    unheld: dict[str, Expression] = {"owner": None, "lease_expires": None}
    silent = {
        **unheld, "error": literal(f"lease expired: sampler {slot.owner} went silent")
    }  # fmt: skip
    state = None if record is None else record["status"]
    if record is not None and state == RecordStatus.SCORED:
        scored = {**unheld, "score": literal(record["score"]), "error": None}
        return _End(slot, SlotStatus.COMPLETED, scored)
    if record is not None and state == RecordStatus.QUARANTINED:
        kept = {**unheld, "error": literal(record["error"])}
        return _End(slot, SlotStatus.QUARANTINED, kept)
    if state == RecordStatus.SAMPLED:
        again = {
            "scorings": slot.scorings + 1,
            "scoring_failures": slot.scoring_failures + 1,
            "not_before": "$$NOW",
        }
        return _End(slot, SlotStatus.SAMPLED, {**silent, **again})
    losses = slot.losses + (state is not None)
    counts = state is not None and losses > FREE_LOSSES
    lost = {**silent, "losses": losses, "failures": slot.failures + counts}
    if counts and lost["failures"] >= max_failures:
        return _End(slot, SlotStatus.FAILED, lost)
    return _End(slot, SlotStatus.PENDING, {**lost, "attempt": slot.attempt + 1})


async def _end_leases(database: RunDatabase, task: str, ends: Sequence[_End]) -> list[_End]:
    """End leases of a Task; returns the ones that were ended."""
    # If this was the group's last slot, the next `claim_finalisation` finds the group.
    ended_at_once = {
        "owner": None, "lease_expires": "$$NOW", "tries": 0, "failures": 0, "error": None,
    }  # fmt: skip
    stages = [
        slots_changed(
            all_of(
                EXPIRED,
                {"$eq": ["$$slot.record", literal(end.slot.record)]},
                {"$eq": ["$$slot.scorings", end.slot.scorings]},
            ),
            end.status,
            end.fields,
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
    # A lease that its owner has extended meanwhile was not ended.
    return [end for end in ends if (end.slot.record, end.slot.lease_expires) in held]
