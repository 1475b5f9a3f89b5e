"""The ledger of training: which rows a step trains, and which steps trained a row.

Rank 0 of the trainer leases rows for one optimizer step and commits them with it. Resuming from a
checkpoint rewinds: along one lineage of checkpoints no row is lost and none is trained twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DBRecordData, RowStatus
from agentrl.databases.transitions import ROW_TRANSITIONS


@dataclass(frozen=True)
class RowHeader:
    """What the planner needs of a row; its arrays stay in the database."""

    id: str
    seq: int
    n_tokens: int
    n_train_tokens: int
    cost: float
    prefix_hash: str
    reward: float
    min_version: int
    max_version: int


_HEADER_FIELDS = (
    "seq", "n_tokens", "n_train_tokens", "cost", "prefix_hash", "reward", "min_version",
    "max_version",
)  # fmt: skip


class RowLedger:
    """Transitions of rows, as the trainer makes them."""

    def __init__(
        self,
        database: RunDatabase,
        trainer: str,
        max_trained_count: int = 1,
        retrained_interval: int = 1,
    ) -> None:
        self._rows = database.rows
        self._trainer = trainer
        self._max_trained_count = max_trained_count
        self._retrained_interval = retrained_interval

    async def lease(self, step: int, count: int, oldest_version: int) -> list[RowHeader]:
        """Lease up to `count` ready rows for `step`, oldest first; returns the new ones.

        Rows with a token older than `oldest_version` are evicted first, and never leased: one that
        is finalised between the two is left for the next eviction.
        """
        _check(RowStatus.READY, RowStatus.EVICTED)
        await self._rows.update_many(
            {"status": RowStatus.READY, "min_version": {"$lt": oldest_version}},
            {"$set": {"status": RowStatus.EVICTED}},
        )
        if count <= 0:
            return []
        young = {
            "status": RowStatus.READY,
            "not_before": {"$lte": step},
            "min_version": {"$gte": oldest_version},
        }
        candidates = (
            self._rows.find(young, {"_id": 1}).sort([("status", 1), ("seq", 1)]).limit(count)
        )
        ids = [document["_id"] async for document in candidates]
        _check(RowStatus.READY, RowStatus.LEASED)
        await self._rows.update_many(
            {"_id": {"$in": ids}, "status": RowStatus.READY},
            {"$set": {"status": RowStatus.LEASED, "trainer": self._trainer, "step": step}},
        )
        return await self._headers({"_id": {"$in": ids}, **self._held(step)})

    async def fetch(self, ids: Sequence[str]) -> list[DBRecordData]:
        """The rows themselves, in the order of `ids`. Raises KeyError if one is not there."""
        cursor = self._rows.find({"_id": {"$in": list(ids)}})
        rows = {document["_id"]: DBRecordData.from_mongo(document) async for document in cursor}
        return [rows[row] for row in ids]

    async def commit(self, step: int) -> int:
        """The step is done: its rows are trained, or ready for another time. Returns how many."""
        _check(RowStatus.LEASED, RowStatus.TRAINED)
        trained = {"$concatArrays": ["$trained", [{"step": step, "trainer": self._trainer}]]}
        again = {"$lt": [{"$size": "$trained"}, self._max_trained_count]}
        result = await self._rows.update_many(
            self._held(step),
            [
                {"$set": {"trained": trained, "trainer": None, "step": None}},
                {
                    "$set": {
                        "status": {"$cond": [again, RowStatus.READY, RowStatus.TRAINED]},
                        "not_before": {
                            "$cond": [again, step + self._retrained_interval, "$not_before"]
                        },
                    }
                },
            ],
        )
        return result.modified_count

    async def rewind(self, step: int) -> int:
        """Go back to the state after `step`: what was leased, or trained later, is ready again.

        Evicted rows stay so: their tokens only get older. Returns how many rows are ready again.
        """
        _check(RowStatus.LEASED, RowStatus.READY)
        _check(RowStatus.TRAINED, RowStatus.READY)
        later = {"$filter": {"input": "$trained", "cond": {"$lte": ["$$this.step", step]}}}
        result = await self._rows.update_many(
            {"$or": [{"status": RowStatus.LEASED}, {"trained.step": {"$gt": step}}]},
            [
                {
                    "$set": {
                        "trained": later,
                        "status": RowStatus.READY,
                        "trainer": None,
                        "step": None,
                        "not_before": 0,
                    }
                }
            ],
        )
        return result.modified_count

    async def counts(self) -> dict[RowStatus, int]:
        """How many rows are in each state."""
        counts = dict.fromkeys(RowStatus, 0)
        async for group in await self._rows.aggregate(
            [{"$group": {"_id": "$status", "n": {"$sum": 1}}}]
        ):
            counts[RowStatus(group["_id"])] = group["n"]
        return counts

    def _held(self, step: int) -> dict[str, Any]:
        return {"status": RowStatus.LEASED, "trainer": self._trainer, "step": step}

    async def _headers(self, query: dict[str, Any]) -> list[RowHeader]:
        cursor = self._rows.find(query, dict.fromkeys(_HEADER_FIELDS, 1)).sort(
            [("seq", 1), ("_id", 1)]
        )
        return [
            RowHeader(id=document["_id"], **{name: document[name] for name in _HEADER_FIELDS})
            async for document in cursor
        ]


async def count_waiting(database: RunDatabase) -> int:
    """Rows that are accepted and not trained yet: ready or leased."""
    return await database.rows.count_documents(
        {"status": {"$in": [RowStatus.READY, RowStatus.LEASED]}}
    )


def _check(old: RowStatus, new: RowStatus) -> None:
    assert new in ROW_TRANSITIONS[old], f"a row cannot go from {old} to {new}"
