"""Groups, Records and rows in quarantine, and their release by a person.

    group     its finalisation failed; it has no rows
    Record    it cannot be scored, or no row can be built from it; its group continued without it
    row       the trainer cannot read it, or its gradient is not finite

Each has the status `quarantined` and an `error`, and does not count in the staleness bound. A
release puts it back to the step at which it failed and resets its failures. Every update names the
state that it expects, so an interrupted release can be repeated.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import RecordStatus, RowStatus, SlotStatus, Split, TaskStatus
from agentrl.databases.expressions import (
    Expression,
    all_of,
    in_milliseconds,
    literal,
    next_scoring,
)
from agentrl.databases.tasks import task_of
from agentrl.databases.transitions import change_records, change_rows, slots_changed, task_status

_ENDED = [TaskStatus.RUNNING, TaskStatus.COMPLETED, TaskStatus.QUARANTINED]  # not FINALISING


@dataclass(frozen=True)
class Quarantined:
    """Numbers of groups, Records and rows in quarantine, or released from it."""

    groups: int = 0
    records: int = 0
    rows: int = 0

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return self.groups + self.records + self.rows


@dataclass(frozen=True)
class QuarantinedItem:
    """One item in quarantine. `kind`: group, record or row. `id`: of the Task or the Record."""

    kind: str
    id: str
    error: str


async def count_quarantined(database: RunDatabase) -> Quarantined:
    """How much is in quarantine, by three indexed counts."""
    return Quarantined(
        await database.tasks.count_documents(
            {"status": TaskStatus.QUARANTINED, "split": {"$in": list(Split)}}
        ),
        await database.records.count_documents({"status": RecordStatus.QUARANTINED}),
        await database.rows.count_documents({"status": RowStatus.QUARANTINED}),
    )


async def list_quarantined(database: RunDatabase, limit: int = 0) -> list[QuarantinedItem]:
    """The items in quarantine, by kind: the first `limit` of each kind, or all if that is 0."""
    items = []
    for kind, collection, index in (
        ("group", database.tasks, "state"),
        ("record", database.records, "quarantined"),
        ("row", database.rows, "lease"),
    ):
        cursor = collection.find({"status": "quarantined"}, {"error": 1}, hint=index, limit=limit)
        items += [QuarantinedItem(kind, item["_id"], str(item["error"])) async for item in cursor]
    return items


async def release(database: RunDatabase, ids: Collection[str] | None = None) -> Quarantined:
    """Release what is in quarantine: everything, or the items with these ids. Returns how much.

    Samplers then score and finalise the Records and groups, and the trainer leases the rows. Rows
    that are too old by then are evicted.
    """
    chosen: dict[str, Any] = {} if ids is None else {"_id": {"$in": list(ids)}}
    rows = await change_rows(
        database.rows, chosen, RowStatus.READY, {"error": None}, expected=[RowStatus.QUARANTINED]
    )
    records = 0
    quarantined = {**chosen, "status": RecordStatus.QUARANTINED}
    for record in [found["_id"] async for found in database.records.find(quarantined, {"_id": 1})]:
        records += await _release_record(database, record)
    # Finish releases that were interrupted between a Record and its slot.
    broken_off: dict[str, Any] = {"slots.status": SlotStatus.QUARANTINED}
    if ids is not None:
        broken_off["_id"] = {"$in": sorted({task_of(name) for name in ids})}
    async for task in database.tasks.find(broken_off, {"slots": 1}):
        for slot in task["slots"]:
            asked = ids is None or slot["record"] in ids
            if slot["status"] == SlotStatus.QUARANTINED and asked:
                records += await _release_record(database, slot["record"])
    # After the Records: a group with a Record to score again is finalised after that scoring.
    return Quarantined(await _release_groups(database, chosen), records, rows)


async def _release_groups(database: RunDatabase, chosen: dict[str, Any]) -> int:
    result = await database.tasks.update_many(
        {"$and": [{"status": TaskStatus.QUARANTINED}, chosen]},
        [{"$set": {"status": task_status(TaskStatus.FINALISING), **_to_finalise("$$NOW")}}],
    )
    return result.modified_count


async def _release_record(database: RunDatabase, record: str) -> bool:
    """Release a Record: to be scored again if scoring failed, else its group is finalised again.

    Returns whether it was released; it is not while its group is being finalised.
    """
    own = {"_id": record}
    again = {"error": None, "finished_at": None}
    slots = {"$elemMatch": {"record": record, "status": SlotStatus.QUARANTINED}}
    unscored = {"_id": task_of(record), "status": {"$in": _ENDED}, "slots": slots}
    if await database.tasks.find_one(unscored, {"_id": 1}) is not None:
        await change_records(database.records, own, RecordStatus.SAMPLED, again)
        is_own = all_of(
            {"$eq": ["$$slot.record", literal(record)]},
            {"$eq": ["$$slot.status", SlotStatus.QUARANTINED]},
        )
        to_score = slots_changed(
            is_own,
            SlotStatus.SAMPLED,
            {
                "not_before": "$$NOW",
                "scorings": {"$add": ["$$slot.scorings", 1]},
                "scoring_failures": 0,
                "error": None,
            },
        )
        reopened = {
            "status": task_status(TaskStatus.RUNNING),
            "score_at": next_scoring(),
            **_UNFINISHED,
            **_SAID_WITHOUT_IT,
        }
        result = await database.tasks.update_one(
            unscored, [{"$set": {"slots": to_score}}, {"$set": reopened}]
        )
        return bool(result.modified_count)
    scored = {"record": record, "status": SlotStatus.COMPLETED}
    # A group that waits for its finalisation: another Record of it was released before.
    waiting = {"status": TaskStatus.FINALISING, "finalisation.owner": None}
    ended = {
        "_id": task_of(record), "slots": {"$elemMatch": scored},
        "$or": [{"status": TaskStatus.COMPLETED}, waiting],
    }  # fmt: skip
    # The Task first, with a delay in which the Record follows. If the release is interrupted in
    # between, nothing changes.
    finalising = {
        "status": task_status(TaskStatus.FINALISING), **_SAID_WITHOUT_IT,
        **_to_finalise(in_milliseconds(_MEANWHILE_MS)),
    }  # fmt: skip
    result = await database.tasks.update_one(ended, [{"$set": finalising}])
    if not result.matched_count:
        return False
    return bool(await change_records(database.records, own, RecordStatus.SCORED, {"error": None}))


_UNFINISHED: dict[str, Expression] = {"finalisation": None, "error": None, "completed_at": None}
_SAID_WITHOUT_IT: dict[str, Expression] = {"group_scores": None}  # given without this Record
_MEANWHILE_MS = 3000


def _to_finalise(when: Expression) -> dict[str, Expression]:
    """The fields of a Task that any sampler may finalise from `when` on."""
    free = {"owner": None, "lease_expires": when, "tries": 0, "failures": 0, "error": None}
    return {**_UNFINISHED, "finalisation": free}
