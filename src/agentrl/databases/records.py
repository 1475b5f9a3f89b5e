"""What samplers write of their work: Records, their turns, and the rows made of them.

    start -> add_turn* -> sampled -> finish      while the sampler holds the slot's lease
                          resume  -> finish      by another, which scores it again
    add_rows -> settle                           when the group is finalised

A turn is durable before its Record is finished, and a Record before its slot is terminal. All
writes go through group commit (`group_commit.py`), so a record costs the database less if a process
works on many: a write then waits a moment for others (`batches.py`). Slots and leases are in
`tasks.py`.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from pymongo import InsertOne, UpdateMany

from agentrl.databases.batches import Pace
from agentrl.databases.connection import RunDatabase, retry_through_outages
from agentrl.databases.documents import (
    DBRecordData,
    DispatchedSamplingTask,
    Document,
    Record,
    RecordStatus,
    SlotStatus,
    Stretch,
    Task,
    ToolResult,
)
from agentrl.databases.earlier_attempts import earlier_turns
from agentrl.databases.group_commit import GroupCommit, NotSent, Write
from agentrl.databases.held_leases import HeldLeases
from agentrl.databases.row_parts import divide
from agentrl.databases.storable import LARGEST_BYTES, brief, made_storable
from agentrl.databases.tasks import Claim
from agentrl.databases.transitions import TransitionRefused, change_records, record_change

# Fields of a Record that never change after its start.
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
        "fork",
        "query",
        "started_at",
        "sampled_at",
    }
)
_NOTED = {"scores", "agent_rewards", "explanations", "meta_infos", "tools_offered", "tool_list"}
# The states from which `finish` may change a Record.
_BEFORE_END = {
    RecordStatus.FAILED: [RecordStatus.SAMPLING],
    RecordStatus.SCORED: [RecordStatus.SAMPLED],
    RecordStatus.QUARANTINED: [RecordStatus.SAMPLED],
}
# Each command is made durable by itself, and turns that programs wait for are written meanwhile.
_DELIVERIES_APART = 5
# In one reply. It is decoded in one step of the event loop: 10 ms for turns of 30 kB.
_TURNS_AT_ONCE = 32
_SETTLED = (RecordStatus.READY, RecordStatus.ABANDONED, RecordStatus.QUARANTINED)


@dataclass(frozen=True, slots=True)
class Settlement:
    """The new state of a Record when its group is finalised.

    `advantage`: None without a score. `left_out`: why it is abandoned. `error`: why it is
    quarantined. `stretches`: advantages of its turns, in a group with forks. `agent_advantages`: of
    agents with rewards of their own.
    """

    status: RecordStatus
    advantage: float | None
    left_out: str | None
    error: str | None = None
    stretches: Sequence[Stretch] = ()
    agent_advantages: Mapping[str, float] = field(default_factory=dict)


class RecordLedger:
    """The trajectories of one sampler process.

    `leases`: the Records that this process may write; claims and heartbeats update it. Methods that
    need a lease raise `LeaseLost` and write nothing if the lease is gone. `pace`: of its writes.
    """

    def __init__(self, database: RunDatabase, lease_seconds: float) -> None:
        self.leases = HeldLeases(lease_seconds)
        self._database = database
        self.pace = Pace(self.leases.count)
        self._records = GroupCommit(database.records, self.pace)
        self._turns = GroupCommit(database.turns, self.pace)
        # Apart from the turns: a command inserts or updates, and a turn would wait for both.
        self._deliveries = GroupCommit(database.turns, Pace(self.leases.count, _DELIVERIES_APART))
        self._tool_results = GroupCommit(database.tool_results, self.pace)
        self._kept_tools: set[str] = set()
        # Not at its moments: the rows of a group are written one step after the other.
        self._rows = GroupCommit(database.rows)
        self._parts = GroupCommit(database.parts)

    async def start(self, records: Sequence[Record], claimed_at: float) -> None:
        """Store Records before they are sampled; `claimed_at`: `asked` of `HeldLeases`."""
        ids = [record.id for record in records]
        self.leases.begin(ids, claimed_at)
        await self._write_held(ids, self._records, await _storable_insertions(records))

    async def add_turn(self, turn: DispatchedSamplingTask) -> None:
        """Store a turn; at once, if a program waits for it. It stays if the Record fails later.

        Content that MongoDB cannot store is converted or cut (`storable.py`).
        """
        writes = await _storable_insertions([turn])
        awaited = turn.request is not None
        await self._write_held([turn.record_id], self._turns, writes, at_once=awaited)

    async def keep_tools(self, tool_list: str, schemas: str) -> None:
        """Store a list of tools, once. `schemas`: as `ToolList` has them."""
        if tool_list in self._kept_tools:
            return
        kept = {"$setOnInsert": {"schemas": schemas}}
        await retry_through_outages(
            lambda: self._database.tool_lists.update_one({"_id": tool_list}, kept, upsert=True),
            "a list of tools",
        )
        self._kept_tools.add(tool_list)

    async def add_tool_result(self, result: ToolResult) -> None:
        """Store a tool's result whole. It stays if the Record fails later."""
        document = await made_storable(result.to_mongo(), LARGEST_BYTES)
        await self._write_held([result.record_id], self._tool_results, [InsertOne(document)])

    async def delivered(self, record: str, turns: Sequence[int]) -> None:
        """Note in turns of a program that their answers have left for it."""
        noted = {"$set": {"request.delivered": True}}
        writes = [UpdateMany({"_id": turn_id(record, turn)}, noted) for turn in turns]
        await self._write_held([record], self._deliveries, writes)

    def deliver_now(self) -> None:
        """Let no noted delivery wait for others: somebody waits for it."""
        self._deliveries.hurry()

    async def note(self, record: Record) -> None:
        """Store what a Record that is being sampled knows beside its turns, for who takes it up.

        At once: a program waits for it.
        Raises `TransitionRefused` if it has ended.
        """
        fields = await made_storable(record.model_dump(include=_NOTED))
        still_open = {"_id": record.id, "status": RecordStatus.SAMPLING}
        change = UpdateMany(still_open, {"$set": fields})
        if await self._write_held([record.id], self._records, [change], at_once=True):
            return
        states = await self._states([record.id])
        if states.get(record.id) != RecordStatus.SAMPLING:
            raise TransitionRefused(f"record {record.id}", states.get(record.id), "noted")

    async def sampled(self, record: Record) -> Record:
        """Store a Record whose conversation is over: from now on any sampler can score it.

        Returns it with the time. Raises `TransitionRefused` if it has ended in another way.
        """
        before = [RecordStatus.SAMPLING]
        return await self._end(record, RecordStatus.SAMPLED, before, "sampled_at")

    async def resume(self, record: str, claimed_at: float) -> Record:
        """Read a Record that is to be scored; `claimed_at`: `asked` of `HeldLeases`."""
        self.leases.begin([record], claimed_at)

        async def read() -> Record:
            document = await self._database.records.find_one({"_id": record})
            assert document is not None, f"{record} is gone, and the pipeline deletes nothing"
            return Record.from_mongo(document)

        return await retry_through_outages(read, f"Record {record}")

    async def taken_over(self, records: Sequence[str], claimed_at: float) -> dict[str, Record]:
        """The Records of slots that were taken over, by id, where they exist.

        `claimed_at`: `asked` of `HeldLeases`.
        """
        self.leases.begin(records, claimed_at)

        async def read() -> dict[str, Record]:
            cursor = self._database.records.find({"_id": {"$in": list(records)}})
            return {document["_id"]: Record.from_mongo(document) async for document in cursor}

        return await retry_through_outages(read, "the Records of an earlier process")

    async def tool_list(self, record: Record) -> list[dict[str, Any]]:
        """The tools of a Record's first prompt with tools."""
        if record.tool_list is None:
            return []
        wanted = {"_id": record.tool_list}
        document = await retry_through_outages(
            lambda: self._database.tool_lists.find_one(wanted), "a list of tools"
        )
        schemas: list[dict[str, Any]] = json.loads(document["schemas"]) if document else []
        return schemas

    async def finish(self, record: Record) -> Record:
        """Store the end of a Record: scored, failed or quarantined.

        Returns it with the time. Raises `TransitionRefused` if it has ended in another way.
        """
        status = RecordStatus(record.status)
        ended = await self._end(record, status, _BEFORE_END[status], "finished_at")
        self.leases.end(record.id)
        return ended

    async def disown(self, record: str) -> None:
        """Mark a Record as failed after its slot was lost, unless it has ended. Needs no lease.

        The reaper cannot do it if the Record was stored after the slot was reaped.
        """
        ended = {"error": "its slot was lost before it was stored"}
        still_open = {"_id": record, "status": RecordStatus.SAMPLING}
        await retry_through_outages(
            lambda: change_records(self._database.records, still_open, RecordStatus.FAILED, ended),
            f"the end of Record {record}",
        )

    async def scored(self, task: Task) -> list[Record]:
        """The scored Records of a group's completed slots, sorted by rollout."""
        ids = [slot.record for slot in task.slots if slot.status == SlotStatus.COMPLETED]

        async def read() -> list[Record]:
            cursor = self._database.records.find({"_id": {"$in": ids}}).sort("rollout", 1)
            return [Record.from_mongo(document) async for document in cursor]

        return await retry_through_outages(read, f"the Records of {task.id}")

    async def turns(self, records: Sequence[str]) -> dict[str, list[DispatchedSamplingTask]]:
        """The turns of Records, in order, by Record id."""

        async def read() -> dict[str, list[DispatchedSamplingTask]]:
            cursor = self._database.turns.find(
                {"record_id": {"$in": list(records)}},
                sort=[("record_id", 1), ("turn", 1)],
                batch_size=_TURNS_AT_ONCE,
            )
            # In a thread: validating hundreds of turns would delay heartbeats.
            return await asyncio.to_thread(_turns_by_record, records, await cursor.to_list())

        return await retry_through_outages(read, f"the turns of {len(records)} Records")

    async def earlier_turns(self, claim: Claim, max_age: int) -> list[list[DispatchedSamplingTask]]:
        """The turns of earlier attempts that the claim's attempt may use again, newest first.

        See `earlier_attempts.py`.
        """
        return await retry_through_outages(
            lambda: earlier_turns(self._database, claim, self.turns, max_age),
            f"the attempts before {claim.record_id}",
        )

    async def add_rows(self, rows: Sequence[DBRecordData]) -> None:
        """Store training rows; existing ones stay as they are."""
        # In a thread: heartbeats would wait for long rows.
        divided = await asyncio.to_thread(lambda: [divide(row) for row in rows])
        await self._parts.write([InsertOne(part) for _, parts in divided for part in parts])
        await self._rows.write([InsertOne(document) for document, _ in divided])

    async def add_scores(self, records: Sequence[Record]) -> None:
        """Store the scores that scorers of the whole group added; the Records stay scored."""
        await self._records.write(
            [
                UpdateMany(
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
        """Store the new states of a finalised group's Records.

        Records that are settled already stay as they are: a previous owner died after that. Raises
        `TransitionRefused` for a Record in any other state than scored.
        """
        if not settlements:
            return
        changes = []
        for record, settlement in settlements.items():
            fields = asdict(settlement)
            status = fields.pop("status")
            fields["stretches"] = [stretch.model_dump() for stretch in settlement.stretches]
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
    ) -> Record:
        """Change a Record to `to` with all its fields; `time`: the field for the current time."""
        now = datetime.now(UTC)
        fields = record.model_dump(exclude={*_FIXED, "status"})
        if record.error is not None:
            fields["error"] = brief(record.error)
        ended = await made_storable({**fields, time: now})
        change = record_change(record.id, to, ended, expected=expected)
        if not await self._write_held([record.id], self._records, [change]):
            states = await self._states([record.id])
            if states.get(record.id) != to:
                raise TransitionRefused(f"record {record.id}", states.get(record.id), to)
        return record.model_copy(update={time: now})

    async def _states(self, records: Sequence[str]) -> dict[str, str]:
        """The states of Records, by id.

        They tell a refused change from one that the server made before its answer was lost.
        """

        async def read() -> dict[str, str]:
            cursor = self._database.records.find({"_id": {"$in": list(records)}}, {"status": 1})
            return {document["_id"]: document["status"] async for document in cursor}

        return await retry_through_outages(read, "the states of Records")

    async def _write_held(
        self,
        records: Sequence[str],
        commit: GroupCommit,
        writes: Sequence[Write],
        *,
        at_once: bool = False,
    ) -> bool:
        """Write while we hold the leases of `records`. Raises `LeaseLost`."""

        def held() -> bool:
            return all(self.leases.holds(record) for record in records)

        while True:
            for record in records:
                await self.leases.assured(record)
            try:
                return await commit.write(writes, held, at_once=at_once)
            except NotSent:
                continue  # a lease expired while the writes waited


def new_record(claim: Claim, owner: str, default_agent: str) -> Record:
    """The Record of an attempt that begins now. `default_agent`: for tasks without an agent."""
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
        fork=claim.fork,
        query=claim.task.query,
        started_at=datetime.now(UTC),
    )


def turn_id(record: str, turn: int) -> str:
    """The `_id` of a turn."""
    return f"{record}-{turn}"


def record_of_turn(turn: str) -> str:
    """The `_id` of the Record of a turn. `turn`: its `_id`."""
    return turn.rpartition("-")[0]


def _turns_by_record(
    records: Sequence[str], documents: Sequence[dict[str, Any]]
) -> dict[str, list[DispatchedSamplingTask]]:
    turns: dict[str, list[DispatchedSamplingTask]] = {record: [] for record in records}
    for document in documents:
        turns[document["record_id"]].append(DispatchedSamplingTask.from_mongo(document))
    return turns


async def _storable_insertions(documents: Sequence[Document]) -> list[Write]:
    return [InsertOne(await made_storable(document.to_mongo())) for document in documents]
