"""What samplers write of their work: Records, their turns, and the rows made of them.

    start -> add_turn* -> sampled -> finish      while the sampler holds the slot's lease
                          resume  -> finish      by another, which scores it again
    add_rows -> settle                           when the group is finalised

A turn is durable before its Record is finished, and a Record before its slot is terminal. All
writes go through group commit (`group_commit.py`), so a record costs the database less if a process
works on many. Slots and leases are in `tasks.py`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from pymongo import InsertOne, UpdateOne

from agentrl.databases.connection import RunDatabase, retry_through_outages
from agentrl.databases.documents import (
    DBRecordData,
    DispatchedSamplingTask,
    Document,
    Record,
    RecordStatus,
    SlotStatus,
    Task,
    ToolResult,
)
from agentrl.databases.group_commit import GroupCommit, NotSent, Write
from agentrl.databases.held_leases import HeldLeases
from agentrl.databases.row_parts import divide
from agentrl.databases.storable import LARGEST_BYTES, brief, made_storable
from agentrl.databases.tasks import Claim
from agentrl.databases.transitions import TransitionRefused, change_records, record_change

# What a Record says from its start on.
_FIXED = frozenset(
    {
        "id",
        "task",
        "task_id",
        "rollout",
        "attempt",
        "split",
        "epoch",
        "owner",
        "agent_name",
        "query",
        "started_at",
        "sampled_at",
    }
)
# From which states the end of a Record's work may be told.
_BEFORE_END = {
    RecordStatus.FAILED: [RecordStatus.SAMPLING],
    RecordStatus.SCORED: [RecordStatus.SAMPLED],
    RecordStatus.QUARANTINED: [RecordStatus.SAMPLED],
}
_SETTLED = (RecordStatus.READY, RecordStatus.ABANDONED, RecordStatus.QUARANTINED)


@dataclass(frozen=True, slots=True)
class Settlement:
    """What becomes of a Record when its group is finalised.

    `advantage` is None for one that was not scored; `left_out` says why one is abandoned, `error`
    why one is quarantined.
    """

    status: RecordStatus
    advantage: float | None
    left_out: str | None
    error: str | None = None


class RecordLedger:
    """The trajectories that one sampler process makes.

    `leases` says for which Records it may write: claims and heartbeats keep it up to date. Where a
    lease is gone, the methods that belong to it write nothing and raise `LeaseLost`.
    """

    def __init__(self, database: RunDatabase, lease_seconds: float) -> None:
        self.leases = HeldLeases(lease_seconds)
        self._database = database
        self._records = GroupCommit(database.records)
        self._turns = GroupCommit(database.turns)
        self._tool_results = GroupCommit(database.tool_results)
        self._rows = GroupCommit(database.rows)
        self._parts = GroupCommit(database.parts)

    async def start(self, records: Sequence[Record], claimed_at: float) -> None:
        """Store Records that are about to be sampled; `claimed_at`: see `HeldLeases`."""
        ids = [record.id for record in records]
        self.leases.begin(ids, claimed_at)
        await self._write_held(ids, self._records, await _storable_insertions(records))

    async def add_turn(self, turn: DispatchedSamplingTask) -> None:
        """Store a turn. It stays if the Record fails later.

        What MongoDB cannot hold of what was said is stored as far as it can be (`storable.py`).
        """
        await self._write_held([turn.record_id], self._turns, await _storable_insertions([turn]))

    async def add_tool_result(self, result: ToolResult) -> None:
        """Store a tool's result whole. It stays if the Record fails later."""
        document = await made_storable(result.to_mongo(), LARGEST_BYTES)
        await self._write_held([result.record_id], self._tool_results, [InsertOne(document)])

    async def sampled(self, record: Record) -> None:
        """Store a Record whose conversation is over: from here on it can be scored by anyone.

        Raises `TransitionRefused` if it has ended already, in another way.
        """
        await self._end(record, RecordStatus.SAMPLED, [RecordStatus.SAMPLING], "sampled_at")

    async def resume(self, record: str, claimed_at: float) -> Record:
        """A Record that is to be scored, as it is stored; `claimed_at`: see `HeldLeases`."""
        self.leases.begin([record], claimed_at)

        async def read() -> Record:
            document = await self._database.records.find_one({"_id": record})
            assert document is not None, f"{record} is gone, and the pipeline deletes nothing"
            return Record.from_mongo(document)

        return await retry_through_outages(read, f"Record {record}")

    async def finish(self, record: Record) -> None:
        """Store a Record as its work ended: scored, failed or quarantined, with its error.

        Raises `TransitionRefused` if it has ended already, in another way.
        """
        status = RecordStatus(record.status)
        await self._end(record, status, _BEFORE_END[status], "finished_at")
        self.leases.end(record.id)

    async def disown(self, record: str) -> None:
        """Close a Record whose slot was lost, if nobody has: nobody else may ever see it where it
        was held up on its way and stored after its slot was reaped. Needs no lease."""
        ended = {"error": "its slot was lost before it was stored"}
        still_open = {"_id": record, "status": RecordStatus.SAMPLING}
        await retry_through_outages(
            lambda: change_records(self._database.records, still_open, RecordStatus.FAILED, ended),
            f"the end of Record {record}",
        )

    async def scored(self, task: Task) -> list[Record]:
        """The scored Records of a group's completed slots, by trajectory."""
        ids = [slot.record for slot in task.slots if slot.status == SlotStatus.COMPLETED]

        async def read() -> list[Record]:
            cursor = self._database.records.find({"_id": {"$in": ids}}).sort("rollout", 1)
            return [Record.from_mongo(document) async for document in cursor]

        return await retry_through_outages(read, f"the Records of {task.id}")

    async def turns(self, records: Sequence[str]) -> dict[str, list[DispatchedSamplingTask]]:
        """The turns of Records, in order."""

        async def read() -> dict[str, list[DispatchedSamplingTask]]:
            cursor = self._database.turns.find({"record_id": {"$in": list(records)}}).sort(
                [("record_id", 1), ("turn", 1)]
            )
            # In a thread: a group of long records has hundreds, and heartbeats would wait for them.
            return await asyncio.to_thread(_turns_by_record, records, await cursor.to_list())

        return await retry_through_outages(read, f"the turns of {len(records)} Records")

    async def add_rows(self, rows: Sequence[DBRecordData]) -> None:
        """Store training rows; those that are there already stay as they are."""
        # In a thread: heartbeats would wait for long rows.
        divided = await asyncio.to_thread(lambda: [divide(row) for row in rows])
        await self._parts.write([InsertOne(part) for _, parts in divided for part in parts])
        await self._rows.write([InsertOne(document) for document, _ in divided])

    async def add_scores(self, records: Sequence[Record]) -> None:
        """Store what scorers of the whole group added to its Records, which stay scored."""
        await self._records.write(
            [
                UpdateOne(
                    {"_id": record.id, "status": RecordStatus.SCORED},
                    {
                        "$set": await made_storable(
                            record.model_dump(include={"score", "scores", "explanations"})
                        )
                    },
                )
                for record in records
            ]
        )

    async def settle(self, settlements: Mapping[str, Settlement]) -> None:
        """The group is finalised: what became of its Records.

        Those that are settled already stay as they are: an owner that died half way has done it.
        """
        if not settlements:
            return
        changes = []
        for record, settlement in settlements.items():
            fields = asdict(settlement)
            status = fields.pop("status")
            if settlement.error is not None:
                fields["error"] = brief(settlement.error)
            scored = [RecordStatus.SCORED]
            changes.append(record_change(record, status, fields, expected=scored))
        if await self._records.write(changes):
            return
        states = await self._states(list(settlements))
        for record, settlement in settlements.items():
            if states.get(record) not in _SETTLED:
                raise TransitionRefused(f"record {record}", states.get(record), settlement.status)

    async def _end(
        self, record: Record, to: RecordStatus, expected: Sequence[RecordStatus], time: str
    ) -> None:
        """Store all that a Record says by now, as it becomes `to`; `time`: the field of when."""
        fields = record.model_dump(exclude={*_FIXED, "status"})
        if record.error is not None:
            fields["error"] = brief(record.error)
        ended = await made_storable({**fields, time: datetime.now(UTC)})
        change = record_change(record.id, to, ended, expected=expected)
        if await self._write_held([record.id], self._records, [change]):
            return
        states = await self._states([record.id])
        if states.get(record.id) != to:
            raise TransitionRefused(f"record {record.id}", states.get(record.id), to)

    async def _states(self, records: Sequence[str]) -> dict[str, str]:
        """The states of Records. A change matches nothing also where an answer was lost in an
        outage after the server had done it."""

        async def read() -> dict[str, str]:
            cursor = self._database.records.find({"_id": {"$in": list(records)}}, {"status": 1})
            return {document["_id"]: document["status"] async for document in cursor}

        return await retry_through_outages(read, "the states of Records")

    async def _write_held(
        self, records: Sequence[str], commit: GroupCommit, writes: Sequence[Write]
    ) -> bool:
        """Write for Records whose leases are ours."""

        def held() -> bool:
            return all(self.leases.holds(record) for record in records)

        while True:
            for record in records:
                await self.leases.assured(record)
            try:
                return await commit.write(writes, held)
            except NotSent:
                continue  # a lease lapsed while the writes waited


def new_record(claim: Claim, owner: str, default_agent: str) -> Record:
    """The Record of an attempt that begins now. `default_agent`: of a task that names none."""
    return Record(
        id=claim.record_id,
        task=claim.task.id,
        task_id=claim.task.task_id,
        rollout=claim.rollout,
        attempt=claim.attempt,
        split=claim.task.split,
        epoch=claim.task.epoch,
        owner=owner,
        agent_name=claim.task.agent_name or default_agent,
        query=claim.task.query,
        started_at=datetime.now(UTC),
    )


def turn_id(record: str, turn: int) -> str:
    """The `_id` of a turn."""
    return f"{record}-{turn}"


def _turns_by_record(
    records: Sequence[str], documents: Sequence[dict[str, Any]]
) -> dict[str, list[DispatchedSamplingTask]]:
    turns: dict[str, list[DispatchedSamplingTask]] = {record: [] for record in records}
    for document in documents:
        turns[document["record_id"]].append(DispatchedSamplingTask.from_mongo(document))
    return turns


async def _storable_insertions(documents: Sequence[Document]) -> list[Write]:
    return [InsertOne(await made_storable(document.to_mongo())) for document in documents]
