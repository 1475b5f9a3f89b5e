"""The ledger of sampling: who works on which attempt, in one document per group.

Every transition is one atomic `find_one_and_update` whose filter names the state it expects, so no
transaction is needed, and any process may die between any two of them. Times are the server's
(`$$NOW`): clocks of samplers do not matter.

    claim -> heartbeat* -> complete | fail | release      by the sampler that holds the lease
    reap                                                   by anyone, now and then
    finalise                                               by whoever made the last slot terminal
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pymongo import ReturnDocument, UpdateOne

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import (
    Record,
    RecordStatus,
    SlotStatus,
    Split,
    Task,
    TaskStatus,
)
from agentrl.databases.transitions import SLOT_TRANSITIONS, TERMINAL_SLOTS

Expression = Any  # a MongoDB aggregation expression


class LeaseLost(RuntimeError):
    """The slot is no longer ours: its lease expired and it was given to another sampler."""


@dataclass(frozen=True)
class Claim:
    """A leased slot. Its Record's id follows from task, trajectory and attempt."""

    task: Task
    traj: int
    attempt: int
    failures: int  # of earlier attempts

    @property
    def record_id(self) -> str:
        """The `_id` of the Record that this attempt makes."""
        return record_id(self.task.id, self.traj, self.attempt)


@dataclass(frozen=True)
class Reaped:
    """What one pass of the reaper did."""

    returned: int = 0  # slots that went back to pending
    failed: int = 0  # slots given up after `max_attempts`


def task_key(split: Split, epoch: int, task_id: str) -> str:
    """The `_id` of a task line in one epoch of one split."""
    return f"{split}-{epoch}-{task_id}"


def record_id(task: str, traj: int, attempt: int) -> str:
    """The `_id` of a Record."""
    return f"{task}-t{traj}-a{attempt}"


class TaskLedger:
    """Transitions of Tasks and slots, as one sampler (`owner`) makes them."""

    def __init__(
        self, database: RunDatabase, owner: str, lease_seconds: float, max_attempts: int
    ) -> None:
        self._database = database
        self._owner = owner
        self._lease_ms = int(lease_seconds * 1000)
        self._max_attempts = max_attempts

    async def add(self, tasks: Sequence[Task]) -> int:
        """Store new Tasks; those that exist already stay as they are. Returns how many are new."""
        if not tasks:
            return 0
        result = await self._database.tasks.bulk_write(
            [
                UpdateOne(
                    {"_id": task.id}, {"$setOnInsert": _without_id(task.to_mongo())}, upsert=True
                )
                for task in tasks
            ],
            ordered=False,
        )
        return result.upserted_count

    async def claim(
        self, split: Split, *, begun_only: bool = False, epoch: int | None = None
    ) -> Claim | None:
        """Lease the first free slot of the oldest group that has one, or None.

        `begun_only`: only in groups that somebody has begun, so that no new group is opened.
        `epoch`: only in groups of this epoch.
        """
        _check(SlotStatus.PENDING, SlotStatus.LEASED)
        record = {"$concat": ["$_id", "-t", _text("$$slot.traj"), "-a", _text("$$slot.attempt")]}
        before = await self._database.tasks.find_one_and_update(
            {
                "split": split,
                "pending": {"$gt": 0},
                **({"status": TaskStatus.RUNNING} if begun_only else {}),
                **({"epoch": epoch} if epoch is not None else {}),
            },
            [
                {
                    "$set": {
                        "slots": _change_slot(
                            {"$indexOfArray": ["$slots.status", SlotStatus.PENDING]},
                            {
                                "status": SlotStatus.LEASED,
                                "owner": _literal(self._owner),
                                "lease_expires": self._lease_end(),
                                "record": record,
                            },
                        ),
                        "pending": {"$subtract": ["$pending", 1]},
                        "status": TaskStatus.RUNNING,
                    }
                }
            ],
            sort=[("split", 1), ("epoch", 1), ("seq", 1)],
            return_document=ReturnDocument.BEFORE,
        )
        if before is None:
            return None
        task = Task.from_mongo(before)
        slot = next(slot for slot in task.slots if slot.status == SlotStatus.PENDING)
        return Claim(task, slot.traj, slot.attempt, slot.failures)

    async def heartbeat(self, records: Collection[str]) -> set[str]:
        """Extend our leases on the slots of `records`; returns those that we still hold.

        A slot that is not named runs out, though its owner lives: nobody works on it any more.
        """
        wanted = sorted(records)
        held = {
            "slots": {
                "$elemMatch": {
                    "owner": self._owner,
                    "status": SlotStatus.LEASED,
                    "record": {"$in": wanted},
                }
            }
        }
        await self._database.tasks.update_many(
            held,
            [
                {
                    "$set": {
                        "slots": _change_slots(
                            _all(
                                {"$eq": ["$$slot.owner", _literal(self._owner)]},
                                {"$eq": ["$$slot.status", SlotStatus.LEASED]},
                                {"$in": ["$$slot.record", wanted]},
                            ),
                            {"lease_expires": self._lease_end()},
                        )
                    }
                }
            ],
        )
        documents = self._database.tasks.find(held, {"slots": 1})
        return {
            slot["record"]
            async for document in documents
            for slot in document["slots"]
            if slot["owner"] == self._owner and slot["status"] == SlotStatus.LEASED
        }.intersection(wanted)

    async def complete(self, claim: Claim, score: float) -> Task | None:
        """The slot is terminal, with its score. Returns the Task if that was the group's last slot:
        the caller then holds the finalisation. Raises `LeaseLost`."""
        return await self._leave(claim, SlotStatus.COMPLETED, {"score": score, "error": None})

    async def fail(self, claim: Claim, error: str, *, retry: bool = True) -> Task | None:
        """The attempt ended in an error: the slot is tried again, or is given up after
        `max_attempts`. Returns the Task if the group is now finished. Raises `LeaseLost`."""
        failed = {"error": _literal(error), "failures": claim.failures + 1}
        if retry and claim.failures + 1 < self._max_attempts:
            again = {**failed, "attempt": claim.attempt + 1}
            return await self._leave(claim, SlotStatus.PENDING, again)
        return await self._leave(claim, SlotStatus.FAILED, failed)

    async def release(self, claim: Claim) -> None:
        """Hand the slot back; this costs none of `max_attempts`. Raises `LeaseLost`."""
        await self._leave(claim, SlotStatus.PENDING, {"attempt": claim.attempt + 1})

    async def reap(self) -> Reaped:
        """Take expired leases away from whoever held them."""
        expired = _all(
            {"$eq": ["$$slot.status", SlotStatus.LEASED]},
            {"$lt": ["$$slot.lease_expires", "$$NOW"]},
        )
        failures = {"$add": ["$$slot.failures", 1]}
        spent = {"$gte": [failures, self._max_attempts]}
        returned = failed = 0
        overdue = self._database.tasks.find(
            {
                "status": TaskStatus.RUNNING,
                "$expr": {"$anyElementTrue": {"$map": _over_slots(expired)}},
            },
            {"_id": 1},
        )
        async for document in overdue:
            before = await self._database.tasks.find_one_and_update(
                {"_id": document["_id"], "status": TaskStatus.RUNNING},
                [
                    {
                        "$set": {
                            "slots": _change_slots(
                                expired,
                                {
                                    "status": {
                                        "$cond": [spent, SlotStatus.FAILED, SlotStatus.PENDING]
                                    },
                                    "attempt": {
                                        "$cond": [
                                            spent,
                                            "$$slot.attempt",
                                            {"$add": ["$$slot.attempt", 1]},
                                        ]
                                    },
                                    "failures": failures,
                                    "error": {
                                        "$concat": [
                                            "lease expired: sampler ",
                                            "$$slot.owner",
                                            " went silent",
                                        ]
                                    },
                                    "owner": None,
                                    "lease_expires": None,
                                },
                            )
                        }
                    },
                    {"$set": {"pending": _pending_slots()}},
                ],
                return_document=ReturnDocument.BEFORE,
            )
            if before is None:
                continue
            after = Task.from_mongo(
                await self._database.tasks.find_one({"_id": document["_id"]}) or before
            )
            lost: list[str | None] = []
            for old, new in zip(Task.from_mongo(before).slots, after.slots, strict=True):
                if old.status == SlotStatus.LEASED and new.failures != old.failures:
                    returned += new.attempt != old.attempt
                    failed += new.attempt == old.attempt
                    lost.append(old.record)
            await self._database.records.update_many(
                {"_id": {"$in": lost}, "status": RecordStatus.SAMPLING},
                {"$set": {"status": RecordStatus.FAILED, "error": "its sampler went silent"}},
            )
        return Reaped(returned, failed)

    async def claim_finalisation(self) -> Task | None:
        """Take over the finalisation of a finished group whose owner died, or that has none."""
        document = await self._database.tasks.find_one_and_update(
            {
                "status": {"$in": [TaskStatus.RUNNING, TaskStatus.FINALISING]},
                "pending": 0,
                "slots.status": {"$nin": [SlotStatus.PENDING, SlotStatus.LEASED]},
                "$expr": {
                    "$or": [
                        {"$eq": ["$finalisation", None]},
                        {"$lt": ["$finalisation.lease_expires", "$$NOW"]},
                    ]
                },
            },
            [{"$set": {"status": TaskStatus.FINALISING, "finalisation": self._finalisation()}}],
            sort=[("epoch", 1), ("seq", 1)],
            return_document=ReturnDocument.AFTER,
        )
        return Task.from_mongo(document) if document else None

    async def finalised(self, task: Task) -> None:
        """The group's Records and rows are written. Raises `LeaseLost`."""
        result = await self._database.tasks.update_one(
            {
                "_id": task.id,
                "status": TaskStatus.FINALISING,
                "finalisation.owner": self._owner,
            },
            {
                "$set": {"status": TaskStatus.COMPLETED, "finalisation": None},
                "$currentDate": {"completed_at": True},
            },
        )
        if result.matched_count == 0:
            raise LeaseLost(f"the finalisation of {task.id} was taken over by another sampler")

    async def records_of(self, task: Task) -> list[Record]:
        """The scored Records of a group's completed slots, by trajectory."""
        ids = [slot.record for slot in task.slots if slot.status == SlotStatus.COMPLETED]
        cursor = self._database.records.find({"_id": {"$in": ids}}).sort("traj", 1)
        return [Record.from_mongo(document) async for document in cursor]

    async def start_record(self, record: Record) -> None:
        """Store a Record that is about to be sampled."""
        await self._database.records.update_one(
            {"_id": record.id}, {"$set": _without_id(record.to_mongo())}, upsert=True
        )

    async def finish_record(self, record: Record) -> None:
        """Store a Record as it ended: scored, or failed with its error."""
        assert record.status in (RecordStatus.SCORED, RecordStatus.FAILED)
        await self._database.records.update_one(
            {"_id": record.id, "status": RecordStatus.SAMPLING},
            {
                "$set": _without_id(record.to_mongo(), "finished_at"),
                "$currentDate": {"finished_at": True},
            },
        )

    async def _leave(
        self, claim: Claim, status: SlotStatus, changes: dict[str, Expression]
    ) -> Task | None:
        """Give up our lease on a slot; lease the finalisation with it if it was the last."""
        _check(SlotStatus.LEASED, status)
        document = await self._database.tasks.find_one_and_update(
            {
                "_id": claim.task.id,
                "slots": {
                    "$elemMatch": {
                        "traj": claim.traj,
                        "attempt": claim.attempt,
                        "owner": self._owner,
                        "status": SlotStatus.LEASED,
                    }
                },
            },
            [
                {
                    "$set": {
                        "slots": _change_slot(
                            claim.traj,
                            {"status": status, "owner": None, "lease_expires": None, **changes},
                        )
                    }
                },
                {"$set": {"pending": _pending_slots()}},
                {
                    "$set": {
                        "status": {"$cond": [_finished(), TaskStatus.FINALISING, "$status"]},
                        "finalisation": {
                            "$cond": [_finished(), self._finalisation(), "$finalisation"]
                        },
                    }
                },
            ],
            return_document=ReturnDocument.AFTER,
        )
        if document is None:
            raise LeaseLost(f"slot {claim.traj} of {claim.task.id} is no longer ours")
        task = Task.from_mongo(document)
        return task if task.status == TaskStatus.FINALISING else None

    def _lease_end(self) -> Expression:
        return {"$add": ["$$NOW", self._lease_ms]}

    def _finalisation(self) -> Expression:
        return {"owner": _literal(self._owner), "lease_expires": self._lease_end()}


def _check(old: SlotStatus, new: SlotStatus) -> None:
    assert new in SLOT_TRANSITIONS[old], f"a slot cannot go from {old} to {new}"


def _literal(value: str) -> Expression:
    """A string that must not be read as an expression (one that begins with `$`)."""
    return {"$literal": value}


def _text(number: Expression) -> Expression:
    return {"$toString": number}


def _all(*conditions: Expression) -> Expression:
    return {"$and": list(conditions)}


def _over_slots(result: Expression) -> Expression:
    return {"input": "$slots", "as": "slot", "in": result}


def _change_slots(condition: Expression, changes: dict[str, Expression]) -> Expression:
    """The `slots` array with `changes` merged into every slot that `condition` holds for."""
    merged = {"$mergeObjects": ["$$slot", changes]}
    return {"$map": _over_slots({"$cond": [condition, merged, "$$slot"]})}


def _change_slot(traj: Expression, changes: dict[str, Expression]) -> Expression:
    """The `slots` array with `changes` merged into slot number `traj`."""
    return _change_slots({"$eq": ["$$slot.traj", traj]}, changes)


def _pending_slots() -> Expression:
    """How many slots nobody holds."""
    is_pending = {"$eq": ["$$slot.status", SlotStatus.PENDING]}
    return {"$sum": {"$map": _over_slots({"$cond": [is_pending, 1, 0]})}}


def _finished() -> Expression:
    """Whether all slots are terminal."""
    return {
        "$allElementsTrue": {
            "$map": _over_slots({"$in": ["$$slot.status", sorted(TERMINAL_SLOTS)]})
        }
    }


def _without_id(document: dict[str, Any], *also: str) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != "_id" and key not in also}


async def open_groups(database: RunDatabase, split: Split) -> int:
    """Groups that were begun and are not finalised."""
    return await database.tasks.count_documents(
        {"status": {"$in": [TaskStatus.RUNNING, TaskStatus.FINALISING]}, "split": split}
    )
