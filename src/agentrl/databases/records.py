"""What samplers write of their work: Records, their turns, and the rows made of them.

    start -> add_turn* -> finish        while the slot's lease is ours
    add_rows -> settle                  when the group is finalised

A turn is durable before its Record is finished, and a Record before its slot is terminal. All
writes go through group commit (`group_commit.py`), so that what a record costs the database gets
less the more of them a process works on. Slots and leases are in `tasks.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

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
    }
)


@dataclass(frozen=True, slots=True)
class Settlement:
    """What becomes of a Record when its group is finalised.

    `advantage` is None for one that was not scored; `left_out` says why one is abandoned.
    """

    status: RecordStatus
    advantage: float | None
    left_out: str | None


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

    async def start(self, records: Sequence[Record], claimed_at: float) -> None:
        """Store Records that are about to be sampled; `claimed_at`: see `HeldLeases`."""
        ids = [record.id for record in records]
        self.leases.begin(ids, claimed_at)
        await self._write_held(ids, self._records, _insertions(records))

    async def add_turn(self, turn: DispatchedSamplingTask) -> None:
        """Store a turn. It stays if the Record fails later."""
        await self._write_held([turn.record_id], self._turns, _insertions([turn]))

    async def add_tool_result(self, result: ToolResult) -> None:
        """Store a tool's result whole. It stays if the Record fails later."""
        await self._write_held([result.record_id], self._tool_results, _insertions([result]))

    async def finish(self, record: Record) -> None:
        """Store a Record as it ended: scored, or failed with its error.

        Raises `TransitionRefused` if it has ended already, in another way.
        """
        status = RecordStatus(record.status)
        fields = record.model_dump(exclude={*_FIXED, "status"})
        ended = {**fields, "finished_at": datetime.now(UTC)}
        change = record_change(record.id, status, ended, expected=[RecordStatus.SAMPLING])
        found = await self._write_held([record.id], self._records, [change])
        self.leases.end(record.id)
        if not found:
            states = await self._states([record.id])
            if states.get(record.id) != status:
                raise TransitionRefused(f"record {record.id}", states.get(record.id), status)

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
            turns: dict[str, list[DispatchedSamplingTask]] = {record: [] for record in records}
            cursor = self._database.turns.find({"record_id": {"$in": list(records)}}).sort(
                [("record_id", 1), ("turn", 1)]
            )
            async for document in cursor:
                turns[document["record_id"]].append(DispatchedSamplingTask.from_mongo(document))
            return turns

        return await retry_through_outages(read, f"the turns of {len(records)} Records")

    async def add_rows(self, rows: Sequence[DBRecordData]) -> None:
        """Store training rows; those that are there already stay as they are."""
        await self._rows.write(_insertions(rows))

    async def add_scores(self, records: Sequence[Record]) -> None:
        """Store what scorers of the whole group added to its Records, which stay scored."""
        await self._records.write(
            [
                UpdateOne(
                    {"_id": record.id, "status": RecordStatus.SCORED},
                    {"$set": record.model_dump(include={"score", "scores", "explanations"})},
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
            scored = [RecordStatus.SCORED]
            changes.append(record_change(record, status, fields, expected=scored))
        if await self._records.write(changes):
            return
        states = await self._states(list(settlements))
        for record, settlement in settlements.items():
            if states.get(record) not in (RecordStatus.READY, RecordStatus.ABANDONED):
                raise TransitionRefused(f"record {record}", states.get(record), settlement.status)

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


def _insertions(documents: Sequence[Document]) -> list[Write]:
    return [InsertOne(document.to_mongo()) for document in documents]
