"""The ledger of training: which rows a step trains, and which steps trained a row.

Rank 0 of the trainer leases rows for one optimizer step and commits them with it. Resuming from a
checkpoint rewinds the ledger to it. Along one lineage of checkpoints each row is trained
`max_trained_count` times, unless it grows too old.

    lease* -> commit      for every step, by the trainer that holds the run
           -> quarantine  of rows that cannot be trained (`quarantine.py` releases them)
    rewind                by the next trainer, to the step of its checkpoint
    release               by a trainer that stops, of the rows that it leased ahead

Every transition may be repeated, because an answer may be lost with the connection. A trainer that
was stopped or cut off may have been replaced without knowing it. It cannot change rows that its
successor leased or trained: rows carry the fencing number of their holder, and the successor takes
back the rows of lower numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DBRecordData, RowStatus
from agentrl.databases.expressions import Expression
from agentrl.databases.policies import Lineage
from agentrl.databases.row_parts import join
from agentrl.databases.trained_logprobs import KeptColumns
from agentrl.databases.transitions import change_rows


@dataclass(frozen=True)
class RowHeader:
    """The fields of a row that the planner needs, without its arrays."""

    id: str
    group_order: int
    n_tokens: int
    n_train_tokens: int
    cost: float
    prefix_hash: str
    reward: float
    prompt_len: int = 0
    n_continuations: int = 0
    n_drifts: int = 0


_HEADER_FIELDS = (
    "group_order", "n_tokens", "n_train_tokens", "cost", "prefix_hash", "reward", "prompt_len",
    "n_continuations", "n_drifts",
)  # fmt: skip
_UNHELD = {"trainer": None, "fence": None, "step": None}
_FOR_A_STEP = {"step": {"$gt": 0}}  # true of every leased row; selects the partial index `held`
_LARGEST_MARKS = 4 * 2**20  # bytes of what is kept in one command
COUNTED = 10_000  # waiting rows are counted up to this number


@dataclass(frozen=True)
class RowCounts:
    """Numbers of rows. `ready`: at most `COUNTED`. `evicted`: in the whole run."""

    ready: int
    evicted: int


class RowLedger:
    """Transitions of rows by one trainer.

    `fence`: its fencing number. `max_trained_count`: how often a row is trained.
    `retrained_interval`: steps from one training of a row to the next.
    """

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
        self._first_group = 0
        self._evicted = 0  # rows evicted at steps up to `_evicted_up_to`; does not change
        self._evicted_up_to = 0

    def begin_at(self, group_order: int) -> None:
        """Train no rows of groups before `group_order`: they belong to an earlier `DataSet`."""
        self._first_group = group_order

    async def evict(self, step: int, lineage: Lineage, max_staleness: int) -> int:
        """Evict rows that are too old for `step` (see `Lineage.too_old`); returns how many.

        `step`: the optimizer step that would train them, on weights of the previous step.
        """
        young = lineage.young_versions(step - 1, max_staleness)
        old_versions = {"$elemMatch": {"$nin": young, "$lte": lineage.newest}}
        # Each query has an index, so the cost does not grow with the number of young rows.
        old: list[tuple[dict[str, Any], str]] = [({"policy_versions": old_versions}, "versions")]
        if self._first_group:
            old.append(({"group_order": {"$lt": self._first_group}}, "lease"))
        by = {"step": step, "fence": self._fence}
        return sum(
            [
                await change_rows(self._rows, rows, RowStatus.EVICTED, by, index=index)
                for rows, index in old
            ]
        )

    async def lease(
        self,
        step: int,
        count: int,
        lineage: Lineage,
        max_staleness: int,
        *,
        waive_interval: bool = False,
    ) -> list[RowHeader]:
        """Lease ready rows for `step`, oldest first, up to `count`; returns all rows of the step.

        No token of them is more than `max_staleness` steps old by `lineage`. `waive_interval`: also
        lease rows whose `retrained_interval` is not over.
        """
        # rows that a replaced trainer leased after our `rewind`
        await self._return(self._held_before())
        held = await self._rows.count_documents(self._held(step), hint="held")
        young = lineage.young_versions(step - 1, max_staleness)
        trainable: dict[str, Any] = {
            **self._ready(),
            "policy_versions": {"$not": {"$elemMatch": {"$nin": young}}},
        }
        if not waive_interval:
            trainable["not_before"] = {"$lte": step}
        if held < count:
            oldest = self._rows.find(trainable, {"_id": 1}, hint="lease").sort(
                [("status", 1), ("group_order", 1)]
            )
            ids = [document["_id"] async for document in oldest.limit(count - held)]
            holder = {"trainer": {"$literal": self._trainer}, "fence": self._fence, "step": step}
            await change_rows(
                self._rows, {"_id": {"$in": ids}}, RowStatus.LEASED, holder, index="_id_"
            )
        return await self._headers(self._held(step))

    async def returning(self, step: int) -> bool:
        """Whether a row that is leased now will be ready again for `step` or a later step."""
        again: list[dict[str, Any]] = [self._held_before()]
        if self._max_trained_count > 1:
            again.append({**self._held({"$lt": step}), **self._training_is(last=False)})
        for held in again:
            if await self._rows.find_one(held, {"_id": 1}, hint="held") is not None:
                return True
        return False

    async def commit(
        self, step: int, ids: Sequence[str], kept: Mapping[str, KeptColumns] | None = None
    ) -> int:
        """Mark the rows of a done step as trained, or as ready to be trained again.

        `ids`: the rows of the step. `kept`: what the trainer says of their trained tokens, by row;
        it is part of the mark, so a row has that of the steps that trained it and no other. Returns
        how many were committed by this trainer; fewer if a successor has taken some.
        """
        if self._max_trained_count > 1:
            await self._mark(
                step, ids, kept, RowStatus.READY, self._training_is(last=False),
                {"not_before": step + self._retrained_interval},
            )  # fmt: skip
        await self._mark(step, ids, kept, RowStatus.TRAINED, self._training_is(last=True), {})
        by_this_step = {"$elemMatch": {"step": step, "fence": self._fence}}
        return await self._rows.count_documents(
            {"_id": {"$in": list(ids)}, "trained": by_this_step}, hint="_id_"
        )

    async def _mark(
        self,
        step: int,
        ids: Sequence[str],
        kept: Mapping[str, KeptColumns] | None,
        to: RowStatus,
        training: dict[str, Any],
        fields: dict[str, Any],
    ) -> None:
        """Add the mark of a done step to the rows of `ids` whose training is such, and free them.

        One command for all rows, or one for each few megabytes of what is kept.
        """
        by = {"step": step, "trainer": {"$literal": self._trainer}, "fence": self._fence}
        for part, mark in _marks(ids, kept or {}, by):
            leaves = {"trained": {"$concatArrays": ["$trained", [mark]]}, **_UNHELD, **fields}
            held = {"_id": {"$in": part}, **self._held(step), **training}
            await change_rows(
                self._rows, held, to, leaves, expected=[RowStatus.LEASED], index="_id_"
            )

    async def ready(self, limit: int) -> int:
        """The number of ready rows of this data set, at most `limit`."""
        return await self._rows.count_documents(self._ready(), limit=limit, hint="lease")

    async def counts(self, step: int) -> RowCounts:
        """Numbers of rows after `step` was committed.

        Evictions of earlier steps are counted once and remembered, so the cost does not grow with
        the run.
        """
        evicted = {"status": RowStatus.EVICTED}
        if step > self._evicted_up_to:
            span = {"$gt": self._evicted_up_to, "$lte": step}
            self._evicted += await self._rows.count_documents(
                {**evicted, "step": span}, hint="held"
            )
            self._evicted_up_to = step
        ready = await self.ready(COUNTED)
        ahead = await self._rows.count_documents(
            {**evicted, "step": {"$gt": self._evicted_up_to}}, hint="held"
        )
        return RowCounts(ready, self._evicted + ahead)

    async def quarantine(self, step: int, faults: Mapping[str, str]) -> int:
        """Quarantine rows of `step` that cannot be trained; `faults`: reason by row id.

        Returns how many were quarantined; a successor's rows are not.
        """
        taken = 0
        for row, error in faults.items():
            taken += await change_rows(
                self._rows,
                {"_id": row, **self._held(step)},
                RowStatus.QUARANTINED,
                {**_UNHELD, "error": {"$literal": error}},
            )
        return taken

    async def rewind(self, step: int) -> int:
        """Undo what earlier trainers did after `step`; returns the number of changed rows.

        Rows that they leased, and rows trained or evicted after `step`, become ready.
        """
        undone_by = {"step": {"$gt": step}, "fence": {"$lt": self._fence}}
        trained_later = {"trained": {"$elemMatch": undone_by}}
        # Each query has an index: a resume does not read all trained rows.
        undone: list[tuple[dict[str, Any], RowStatus, str]] = [
            (self._held_before(), RowStatus.LEASED, "held"),
            (trained_later, RowStatus.TRAINED, "trained"),
            (undone_by, RowStatus.EVICTED, "held"),
        ]
        later = {"$and": [{"$gt": ["$$this.step", step]}, {"$lt": ["$$this.fence", self._fence]}]}
        kept = {"$filter": {"input": "$trained", "cond": {"$not": [later]}}}
        next_time = {"$add": [{"$max": "$$kept.step"}, self._retrained_interval]}
        not_before = {"$cond": [{"$eq": ["$$kept", []]}, 0, next_time]}
        state = {
            "trained": kept,
            "not_before": {"$let": {"vars": {"kept": kept}, "in": not_before}},
            **_UNHELD,
        }
        rewound = 0
        while True:
            changed = 0
            for rows, status, index in undone:
                changed += await change_rows(
                    self._rows, rows, RowStatus.READY, state, expected=[status], index=index
                )
            staying = {"$in": [RowStatus.READY, RowStatus.QUARANTINED]}
            waiting = await self._rows.update_many(
                {"status": staying, **trained_later}, [{"$set": state}], hint="trained"
            )
            changed += waiting.modified_count
            if changed == 0:
                return rewound
            # Repeat: a commit of a dying trainer may have moved a row between the queries.
            rewound += changed

    async def release(self) -> int:
        """Return this trainer's leased rows to ready; returns how many."""
        return await self._return({"fence": self._fence, **_FOR_A_STEP})

    async def _return(self, held: dict[str, Any]) -> int:
        return await change_rows(
            self._rows, held, RowStatus.READY, _UNHELD, expected=[RowStatus.LEASED], index="held"
        )

    def _ready(self) -> dict[str, Any]:
        of_this_data = {"group_order": {"$gte": self._first_group}} if self._first_group else {}
        return {"status": RowStatus.READY, **of_this_data}

    def _held(self, step: int | dict[str, int]) -> dict[str, Any]:
        return {
            "status": RowStatus.LEASED,
            "trainer": self._trainer,
            "fence": self._fence,
            "step": step,
        }

    def _held_before(self) -> dict[str, Any]:
        return {"status": RowStatus.LEASED, "fence": {"$lt": self._fence}, **_FOR_A_STEP}

    def _training_is(self, *, last: bool) -> dict[str, Any]:
        """The filter for rows whose current training is their last one, or is not."""
        if self._max_trained_count == 1:
            assert last, "a row that is trained once has no training before its last"
            return {}
        return {f"trained.{self._max_trained_count - 2}": {"$exists": last}}

    async def _headers(self, query: dict[str, Any]) -> list[RowHeader]:
        cursor = self._rows.find(query, dict.fromkeys(_HEADER_FIELDS, 1), hint="held").sort(
            [("group_order", 1), ("_id", 1)]
        )
        return [
            RowHeader(
                id=document["_id"],
                **{name: document[name] for name in _HEADER_FIELDS if name in document},
            )
            async for document in cursor
        ]


def _marks(
    ids: Sequence[str], kept: Mapping[str, KeptColumns], by: Mapping[str, Expression]
) -> Iterator[tuple[list[str], Expression]]:
    """The mark of a step as an expression over each row, for some of the rows at a time.

    It finds what is kept of the row by its place: a command for each row would cost mongod three
    times as much.
    """
    without = [row for row in ids if row not in kept]
    if without:
        yield without, dict(by)
    part: list[str] = []
    size = 0
    for row in sorted(kept.keys() & set(ids)):
        of_row = sum(map(len, kept[row].values()))
        if part and size + of_row > _LARGEST_MARKS:
            yield part, _mark_with(part, kept, by)
            part, size = [], 0
        part.append(row)
        size += of_row
    if part:
        yield part, _mark_with(part, kept, by)


def _mark_with(
    rows: list[str], kept: Mapping[str, KeptColumns], by: Mapping[str, Expression]
) -> Expression:
    place = {"$indexOfArray": [{"$literal": rows}, "$_id"]}
    columns = {
        name: {"$arrayElemAt": [{"$literal": [kept[row][name] for row in rows]}, place]}
        for name in kept[rows[0]]  # a step keeps the same of all its rows
    }
    return {**by, **columns}


@dataclass(frozen=True)
class FetchedRows:
    """Rows in the order of the request. `faults`: by id, why the others cannot be read."""

    rows: Sequence[DBRecordData]
    faults: Mapping[str, str]


async def fetch_rows(database: RunDatabase, ids: Sequence[str]) -> FetchedRows:
    """Read rows with their arrays."""
    faults = dict.fromkeys(ids, "it is not in the database any more")
    rows: dict[str, DBRecordData] = {}
    async for document in database.rows.find({"_id": {"$in": list(ids)}}):
        row = document["_id"]
        try:
            rows[row] = DBRecordData.from_mongo(await join(database, document))
        except (ValueError, TypeError) as error:  # a damaged row does not affect the others
            faults[row] = f"it cannot be read: {error}"
        else:
            del faults[row]
    return FetchedRows([rows[row] for row in ids if row in rows], faults)


async def count_rows(database: RunDatabase) -> dict[RowStatus, int]:
    """The number of rows in each state. Reads a whole index: too slow for every step."""
    return {
        status: await database.rows.count_documents({"status": status}, hint="lease")
        for status in RowStatus
    }


async def count_waiting(database: RunDatabase, limit: int = COUNTED) -> int:
    """The number of ready and leased rows, at most `limit`."""
    return await database.rows.count_documents(
        {"status": {"$in": [RowStatus.READY, RowStatus.LEASED]}}, limit=limit, hint="lease"
    )
