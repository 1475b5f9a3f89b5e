"""The ledger of training: which rows a step trains, and which steps trained a row.

Rank 0 of the trainer leases rows for one optimizer step and commits them with it. Resuming from a
checkpoint rewinds the ledger to it: along one lineage of checkpoints each row is trained
`max_trained_count` times, unless it grows too old.

    lease* -> commit      for every step, by the trainer that holds the run
    rewind                by the next trainer, to the step of its checkpoint
    release               by a trainer that stops, of what it leased ahead

Every transition may be done twice, so that an answer lost with the connection can be asked for
again. A trainer that was replaced and does not know it yet (it was stopped, or cut off) cannot
touch what its successor leased or trained: rows carry the fencing number of whoever holds them,
and the successor takes back what lower numbers hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import ROW_TRANSITIONS, DBRecordData, RowStatus
from agentrl.databases.policies import Lineage


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


_HEADER_FIELDS = ("seq", "n_tokens", "n_train_tokens", "cost", "prefix_hash", "reward")
_UNHELD = {"trainer": None, "fence": None, "step": None}


class RowLedger:
    """Transitions of rows, as the trainer with the run's fencing number `fence` makes them."""

    def __init__(
        self,
        database: RunDatabase,
        trainer: str,
        fence: int,
        max_trained_count: int = 1,
        retrained_interval: int = 1,
    ) -> None:
        self._rows = database.rows
        self._trainer = trainer
        self._fence = fence
        self._max_trained_count = max_trained_count
        self._retrained_interval = retrained_interval

    async def evict(self, step: int, lineage: Lineage, max_staleness: int) -> int:
        """Take rows out that are too old for `step` (see `Lineage.too_old`); returns how many.

        `step` is the optimizer step that would train them, by weights of the step before.
        """
        _check(RowStatus.READY, RowStatus.EVICTED)
        young = lineage.young_versions(step - 1, max_staleness)
        old = {"$elemMatch": {"$nin": young, "$lte": lineage.newest}}
        result = await self._rows.update_many(
            {"status": RowStatus.READY, "policy_versions": old},
            {"$set": {"status": RowStatus.EVICTED, "step": step, "fence": self._fence}},
        )
        return result.modified_count

    async def lease(
        self,
        step: int,
        count: int,
        lineage: Lineage,
        max_staleness: int,
        *,
        waive_interval: bool = False,
    ) -> list[RowHeader]:
        """Lease ready rows for `step`, oldest first, until it has `count`; returns all it has.

        No row has a token of more than `max_staleness` steps of age by `lineage`, whatever `evict`
        has seen. `waive_interval`: also rows whose `retrained_interval` is not over.
        """
        await self._take_back()
        held = await self._rows.count_documents(self._held(step))
        young = lineage.young_versions(step - 1, max_staleness)
        trainable: dict[str, Any] = {
            "status": RowStatus.READY,
            "policy_versions": {"$not": {"$elemMatch": {"$nin": young}}},
        }
        if not waive_interval:
            trainable["not_before"] = {"$lte": step}
        if held < count:
            oldest = self._rows.find(trainable, {"_id": 1}).sort([("status", 1), ("seq", 1)])
            ids = [document["_id"] async for document in oldest.limit(count - held)]
            _check(RowStatus.READY, RowStatus.LEASED)
            await self._rows.update_many(
                {"_id": {"$in": ids}, "status": RowStatus.READY}, {"$set": self._held(step)}
            )
        return await self._headers(self._held(step))

    async def returning(self, step: int) -> bool:
        """Whether a row that is leased now will be ready later, for `step` or a step after it."""
        again: list[dict[str, Any]] = [self._held_before()]
        if self._max_trained_count > 1:
            # its lease makes it one more than `trained` holds
            once_more = {f"trained.{self._max_trained_count - 2}": {"$exists": False}}
            again.append({**self._held({"$lt": step}), **once_more})
        return await self._rows.find_one({"$or": again}, {"_id": 1}) is not None

    async def commit(self, step: int, ids: Sequence[str]) -> int:
        """The step is done: its rows are trained, or ready for another time.

        `ids`: the rows that it trained. Returns how many of them this trainer's step has, which is
        fewer if a successor took some.
        """
        _check(RowStatus.LEASED, RowStatus.TRAINED)
        _check(RowStatus.LEASED, RowStatus.READY)
        mine = {"step": step, "trainer": {"$literal": self._trainer}, "fence": self._fence}
        again = {"$lt": [{"$size": "$trained"}, self._max_trained_count]}
        next_time = step + self._retrained_interval
        await self._rows.update_many(
            {"_id": {"$in": list(ids)}, **self._held(step)},
            [
                {"$set": {"trained": {"$concatArrays": ["$trained", [mine]]}, **_UNHELD}},
                {
                    "$set": {
                        "status": {"$cond": [again, RowStatus.READY, RowStatus.TRAINED]},
                        "not_before": {"$cond": [again, next_time, "$not_before"]},
                    }
                },
            ],
        )
        by_this_step = {"$elemMatch": {"step": step, "fence": self._fence}}
        return await self._rows.count_documents(
            {"_id": {"$in": list(ids)}, "trained": by_this_step}
        )

    async def rewind(self, step: int) -> int:
        """Go back to the state after `step`, as earlier trainers left it.

        What they leased, or trained or evicted later, is ready again. Returns how many rows.
        """
        _check(RowStatus.LEASED, RowStatus.READY)
        _check(RowStatus.TRAINED, RowStatus.READY)
        _check(RowStatus.EVICTED, RowStatus.READY)
        undone = {"$and": [{"$gt": ["$$this.step", step]}, {"$lt": ["$$this.fence", self._fence]}]}
        kept = {"$filter": {"input": "$trained", "cond": {"$not": [undone]}}}
        not_before = {"$add": [{"$max": "$trained.step"}, self._retrained_interval]}
        undone_by = {"step": {"$gt": step}, "fence": {"$lt": self._fence}}
        rewound = 0
        while True:
            result = await self._rows.update_many(
                {
                    "$or": [
                        self._held_before(),
                        {"trained": {"$elemMatch": undone_by}},
                        {"status": RowStatus.EVICTED, **undone_by},
                    ]
                },
                [
                    {"$set": {"trained": kept, "status": RowStatus.READY, **_UNHELD}},
                    {"$set": {"not_before": {"$cond": [{"$eq": ["$trained", []]}, 0, not_before]}}},
                ],
            )
            if result.modified_count == 0:
                return rewound
            # Once more: a row that a dying trainer's commit moved meanwhile may have been missed.
            rewound += result.modified_count

    async def release(self) -> int:
        """Give back what this trainer leased and did not train. Returns how many rows."""
        return await self._make_ready({"status": RowStatus.LEASED, "fence": self._fence})

    async def _take_back(self) -> int:
        """What a replaced trainer leased after our `rewind`, because it did not know yet."""
        return await self._make_ready(self._held_before())

    async def _make_ready(self, query: dict[str, Any]) -> int:
        _check(RowStatus.LEASED, RowStatus.READY)
        result = await self._rows.update_many(
            query, {"$set": {"status": RowStatus.READY, **_UNHELD}}
        )
        return result.modified_count

    def _held(self, step: int | dict[str, int]) -> dict[str, Any]:
        return {
            "status": RowStatus.LEASED,
            "trainer": self._trainer,
            "fence": self._fence,
            "step": step,
        }

    def _held_before(self) -> dict[str, Any]:
        return {"status": RowStatus.LEASED, "fence": {"$lt": self._fence}}

    async def _headers(self, query: dict[str, Any]) -> list[RowHeader]:
        cursor = self._rows.find(query, dict.fromkeys(_HEADER_FIELDS, 1)).sort(
            [("seq", 1), ("_id", 1)]
        )
        return [
            RowHeader(id=document["_id"], **{name: document[name] for name in _HEADER_FIELDS})
            async for document in cursor
        ]


async def fetch_rows(database: RunDatabase, ids: Sequence[str]) -> list[DBRecordData]:
    """The rows themselves, in the order of `ids`. Raises KeyError if one is not there."""
    cursor = database.rows.find({"_id": {"$in": list(ids)}})
    rows = {document["_id"]: DBRecordData.from_mongo(document) async for document in cursor}
    return [rows[row] for row in ids]


async def count_rows(database: RunDatabase) -> dict[RowStatus, int]:
    """How many rows are in each state."""
    counts = dict.fromkeys(RowStatus, 0)
    async for group in await database.rows.aggregate(
        [{"$group": {"_id": "$status", "n": {"$sum": 1}}}]
    ):
        counts[RowStatus(group["_id"])] = group["n"]
    return counts


async def count_waiting(database: RunDatabase) -> int:
    """Rows that are accepted and not trained yet: ready or leased."""
    return await database.rows.count_documents(
        {"status": {"$in": [RowStatus.READY, RowStatus.LEASED]}}
    )


def _check(old: RowStatus, new: RowStatus) -> None:
    assert new in ROW_TRANSITIONS[old], f"a row cannot go from {old} to {new}"
