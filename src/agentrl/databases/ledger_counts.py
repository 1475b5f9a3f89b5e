"""How much of everything the ledger of a run holds: counts by indexes, for figures over time."""

from dataclasses import dataclass

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import RecordStatus, Split, TaskStatus
from agentrl.databases.expressions import Expression
from agentrl.databases.row_ledger import count_rows

ENDED = "ended"  # Records that are scored, ready or abandoned: no index tells these apart
_BEGUN = [TaskStatus.RUNNING, TaskStatus.FINALISING]


@dataclass(frozen=True)
class LedgerCounts:
    """Counts of one moment.

    `tasks`: by split and status. `slots`: of groups in progress, by status. `expired`: leased slots
    whose lease has ended and that nobody has reaped. `records`, `rows`: by status; `ENDED` is one
    of the Records'. `last_step`: when the present trainer last changed the weights, in seconds
    since 1970.
    """

    tasks: dict[tuple[str, str], int]
    slots: dict[str, int]
    expired: int
    records: dict[str, int]
    rows: dict[str, int]
    last_step: float | None


async def count_ledger(database: RunDatabase, fence: int) -> LedgerCounts:
    """Count. The time grows with the number of documents, by about a second for a million rows.

    `fence`: of the present trainer.
    """
    tasks = {
        (str(split), str(status)): await database.tasks.count_documents(
            {"status": status, "split": split}, hint="state"
        )
        for split in Split
        for status in TaskStatus
    }
    slots, expired = await _count_slots(database)
    rows = {str(status): count for status, count in (await count_rows(database)).items()}
    records = await _count_records(database)
    return LedgerCounts(tasks, slots, expired, records, rows, await _last_step(database, fence))


async def _count_slots(database: RunDatabase) -> tuple[dict[str, int], int]:
    is_expired: Expression = {
        "$and": [
            {"$eq": ["$slots.status", "leased"]},
            {"$lt": ["$slots.lease_expires", "$$NOW"]},
        ]
    }
    cursor = await database.tasks.aggregate(
        [
            {"$match": {"status": {"$in": _BEGUN}}},
            {"$project": {"slots.status": 1, "slots.lease_expires": 1}},
            {"$unwind": "$slots"},
            {
                "$group": {
                    "_id": "$slots.status",
                    "n": {"$sum": 1},
                    "expired": {"$sum": {"$cond": [is_expired, 1, 0]}},
                }
            },
        ],
        hint="state",
    )
    groups = [group async for group in cursor]
    return {group["_id"]: group["n"] for group in groups}, sum(each["expired"] for each in groups)


async def _count_records(database: RunDatabase) -> dict[str, int]:
    records, splits = database.records, {"$in": list(Split)}  # all: the indexes begin with it
    open_ones = await records.aggregate(
        [
            {"$match": {"split": splits, "finished_at": None}},
            {"$group": {"_id": "$status", "n": {"$sum": 1}}},
        ],
        hint="recent",
    )
    counts = dict.fromkeys([RecordStatus.SAMPLING.value, RecordStatus.SAMPLED.value], 0)
    async for group in open_ones:
        counts[group["_id"]] = group["n"]
    counts[RecordStatus.FAILED.value] = await records.count_documents(
        {"split": splits, "status": RecordStatus.FAILED}, hint="failed"
    )
    counts[RecordStatus.QUARANTINED.value] = await records.count_documents(
        {"status": RecordStatus.QUARANTINED}, hint="quarantined"
    )
    others = await records.estimated_document_count() - sum(counts.values())
    return {**counts, ENDED: max(0, others)}  # they are counted one after the other


async def _last_step(database: RunDatabase, fence: int) -> float | None:
    newest = database.step_metrics.find({"fence": fence}, {"values.time": 1})
    async for document in newest.sort("_id", -1).limit(1):
        return float(document["values"]["time"])
    return None
