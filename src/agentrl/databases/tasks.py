"""The ledger of sampling: who works on which rollout, in one document per group.

Every transition is one atomic update whose filter names the state it expects. So no transaction is
needed, and any process may die between any two transitions. Times are the server's (`$$NOW`); the
clocks of samplers do not matter.

    claim -> heartbeat* -> complete | fail | release | lose
                                                           by the sampler that holds the lease,
                                                           or as `scorings.py` says
    take_over                                              by the process in its holder's place
    reap                                                   by anyone, now and then
    claim_finalisation                                     by anyone, when its holder died
    finalised                                              by who made the last slot terminal

Every method retries through an outage of the database, and may be repeated when its answer was
lost. Slots that the lost call had leased are then worked on by nobody, and their leases expire.

Not in here: which states may follow which (`transitions.py`), how the ends of slots are sent
(`slot_ends.py`), and the documents of the work itself (`records.py`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pymongo import ReturnDocument, UpdateOne

from agentrl.databases.batches import Pace
from agentrl.databases.connection import RunDatabase, retry_through_outages
from agentrl.databases.documents import (
    Fork,
    GroupOutcome,
    SlotStatus,
    Split,
    Task,
    TaskStatus,
    epoch_places,
)
from agentrl.databases.due import finalisations_due
from agentrl.databases.expressions import (
    SLOT_RECORD,
    Expression,
    all_of,
    first_pending,
    in_milliseconds,
    literal,
    slots_scored,
    slots_updated,
    told,
)
from agentrl.databases.free_groups import Query, free_groups, kinds_without
from agentrl.databases.reaping import FREE_LOSSES, Reaped, close_lost_records, reap_expired
from agentrl.databases.slot_ends import SlotEnd, SlotEnds
from agentrl.databases.task_choice import NO_TASKS, TaskChoice
from agentrl.databases.transitions import (
    TransitionRefused,
    slots_changed,
    task_status,
)

UNBOUNDED = 2**63 - 1  # an admission limit that admits every group


class LeaseLost(RuntimeError):
    """Our lease expired, and another process has the work."""


@dataclass(frozen=True)
class Claim:
    """A leased slot. Task, rollout and attempt determine its Record's id.

    The first lease of a trajectory samples and scores it. Each further one (`to_score`) only scores
    it; `scorings` distinguishes them.
    """

    task: Task  # as it was before the claim, with the claimed slots only
    rollout: int
    attempt: int
    failures: int  # of earlier attempts
    scorings: int = 0  # earlier scorings of this trajectory
    scoring_failures: int = 0  # those that count against the limit
    to_score: bool = False
    outages: int = 0  # earlier attempts that an outage ended
    losses: int = 0  # earlier attempts whose sampler, or client, went silent
    taken_over: bool = False  # from a process that had begun it

    @property
    def record_id(self) -> str:
        """The `_id` of this attempt's Record."""
        return record_id(self.task.id, self.rollout, self.attempt)

    @property
    def fork(self) -> Fork | None:
        """Where the rollout branches off another one; None if it begins with the prompt."""
        slots = (slot for slot in self.task.slots if slot.rollout == self.rollout)
        return next((slot.fork for slot in slots), None)


def task_key(split: Split, epoch: int, task_id: str) -> str:
    """The `_id` of the Task of line `task_id` in one epoch of one split."""
    return f"{split}-{epoch}-{task_id}"


def record_id(task: str, rollout: int, attempt: int) -> str:
    """The `_id` of a Record."""
    return f"{task}-t{rollout}-a{attempt}"


def task_of(record: str) -> str:
    """The `_id` of a Record's Task, from the Record's id."""
    return record.rsplit("-t", 1)[0]


class TaskLedger:
    """Transitions of Tasks and slots by one sampler (`owner`).

    `pace`: when to send the ends of slots; None: at once.
    """

    def __init__(
        self,
        database: RunDatabase,
        owner: str,
        lease_seconds: float,
        max_failures: int,
        pace: Pace | None = None,
    ) -> None:
        self.owner = owner
        self.lease_ms = int(lease_seconds * 1000)
        self._database = database
        self._tasks = database.tasks
        self._max_failures = max_failures
        self._ends = SlotEnds(database.tasks, owner, self._finalisation(), pace)

    async def add(self, tasks: Sequence[Task]) -> int:
        """Store new Tasks; existing ones stay as they are. Returns how many are new."""
        if not tasks:
            return 0
        writes = [
            UpdateOne({"_id": task.id}, {"$setOnInsert": _without_id(task.to_mongo())}, upsert=True)
            for task in tasks
        ]
        # In order: if a later group were stored first, an admission limit could be computed without
        # the earlier one.
        result = await retry_through_outages(
            lambda: self._tasks.bulk_write(writes), "the storing of new tasks"
        )
        return result.upserted_count

    async def leave_out(self, data: int) -> int:
        """Leave out unclaimed Tasks of data sets before `data`, so that they cannot be claimed.

        Returns how many.
        """
        unbegun = {"status": TaskStatus.CREATED, "data": {"$not": {"$gte": data}}}
        left = [{"$set": {"status": task_status(TaskStatus.LEFT_OUT), "pending": 0}}]
        result = await retry_through_outages(
            lambda: self._tasks.update_many(unbegun, left), "the tasks of other data"
        )
        return result.modified_count

    async def claim(
        self,
        split: Split,
        *,
        count: int = 1,
        admission_limit: int | None = UNBOUNDED,
        epoch: int | None = None,
        without: TaskChoice = NO_TASKS,
        line: str | None = None,
    ) -> list[Claim]:
        """Lease up to `count` free slots of the oldest group that has any; [] if none has.

        `admission_limit`: the highest group order at which a new group may be begun; None: begin no
        group. Groups already begun are always allowed. `epoch`: only groups of this epoch.
        `without`: skip these tasks. `line`: only groups of the line with this id.
        """
        if without.everything:
            return []
        kinds = None
        if without != NO_TASKS:
            kinds = await retry_through_outages(
                lambda: kinds_without(self._tasks, split, without), "a claim"
            )
        places = {} if epoch is None else epoch_places(epoch)
        groups: list[tuple[Query, str]] = []
        if admission_limit is not None:
            admitted = {**places, "$lte": admission_limit}
            groups += free_groups(split, admitted, kinds, begun=False)
        if admission_limit != UNBOUNDED:
            groups += free_groups(split, places, kinds, begun=True)
        before = None
        for query, index in groups:
            if line is not None:
                query = {"$and": [query, {"task_id": line}]}
            before = before or await self._lease_slots(query, count, index)
        if before is None:
            return []
        pending = [slot for slot in before["slots"] if slot["status"] == SlotStatus.PENDING]
        # Only the claimed slots: validating slots is most of the time of reading a Task.
        task = Task.from_mongo({**before, "slots": pending[:count]})
        return [
            Claim(
                task, slot.rollout, slot.attempt, slot.failures, outages=slot.outages,
                losses=slot.losses,
            )
            for slot in task.slots
        ]  # fmt: skip

    async def take_over(self, owners: str) -> list[Claim]:
        """Take the leases of processes that are gone and in whose place this one is.

        `owners`: a regular expression for their names. Should one of them still run, it loses its
        leases by this.
        """
        held = {"slots": {"$elemMatch": {"owner": {"$regex": owners}, "status": SlotStatus.LEASED}}}
        is_theirs = all_of(
            {"$eq": ["$$slot.status", SlotStatus.LEASED]},
            {"$regexMatch": {"input": {"$ifNull": ["$$slot.owner", ""]}, "regex": literal(owners)}},
        )
        ours = {"owner": literal(self.owner), "lease_expires": in_milliseconds(self.lease_ms)}
        taken = slots_updated(is_theirs, ours)
        running = {"status": TaskStatus.RUNNING}

        async def take() -> list[Task]:
            await self._tasks.update_many({**running, **held}, [{"$set": {"slots": taken}}])
            mine = {**running, "slots.owner": self.owner}
            return [Task.from_mongo(document) async for document in self._tasks.find(mine)]

        return [
            Claim(
                task.model_copy(update={"slots": [slot]}), slot.rollout, slot.attempt,
                slot.failures, slot.scorings, slot.scoring_failures, outages=slot.outages,
                losses=slot.losses, taken_over=True,
            )
            for task in await retry_through_outages(take, "the leases of an earlier process")
            for slot in task.slots
            if slot.owner == self.owner and slot.status == SlotStatus.LEASED
        ]  # fmt: skip

    async def heartbeat(self, records: Collection[str]) -> set[str]:
        """Extend our leases on the slots of `records`; returns the Records that we still hold.

        Leases of Records that are not named expire.
        """
        wanted = sorted(records)
        ours = {"owner": self.owner, "status": SlotStatus.LEASED, "record": {"$in": wanted}}
        held = {
            "_id": {"$in": sorted({task_of(record) for record in wanted})},
            "slots": {"$elemMatch": ours},
        }
        is_ours = all_of(
            {"$eq": ["$$slot.owner", literal(self.owner)]},
            {"$eq": ["$$slot.status", SlotStatus.LEASED]},
            {"$in": ["$$slot.record", literal(wanted)]},
        )
        extended = slots_updated(is_ours, {"lease_expires": in_milliseconds(self.lease_ms)})

        async def extend() -> set[str]:
            await self._tasks.update_many(held, [{"$set": {"slots": extended}}])
            documents = self._tasks.find(held, {"slots": 1})
            return {
                slot["record"]
                async for document in documents
                for slot in document["slots"]
                if slot["owner"] == self.owner and slot["status"] == SlotStatus.LEASED
            }.intersection(wanted)

        return await retry_through_outages(extend, "a heartbeat") if wanted else set()

    async def complete(
        self, claim: Claim, score: float | None, forks: Sequence[int] = ()
    ) -> Task | None:
        """Complete the slot with its score (None: no score, or not yet).

        `forks`: turns at which the rollout is sampled anew, each as a further slot of the group.
        Returns the Task if this ended the group's last slot: the caller then holds the group's
        finalisation. Raises `LeaseLost`.
        """
        fields = {"score": score, "error": None}
        return await self.leave(claim, SlotStatus.COMPLETED, fields, forks)

    async def fail(self, claim: Claim, error: str, *, retry: bool = True) -> Task | None:
        """The attempt ended in an error: retry the slot, or give it up after `max_failures`.

        Returns the Task if this ended the group's last slot (see `leave`). Raises `LeaseLost`.
        """
        failed = {"error": told(error), "failures": claim.failures + 1}
        if retry and claim.failures + 1 < self._max_failures:
            again = {**failed, "attempt": claim.attempt + 1}
            return await self.leave(claim, SlotStatus.PENDING, again)
        return await self.leave(claim, SlotStatus.FAILED, failed)

    async def release(self, claim: Claim, *, outage: bool = False) -> None:
        """Hand the slot back; this does not count against `max_failures`. Raises `LeaseLost`.

        `outage`: whether an unreachable dependency is the reason.
        """
        again = {"attempt": claim.attempt + 1, "outages": claim.outages + outage}
        await self.leave(claim, SlotStatus.PENDING, again)

    async def lose(self, claim: Claim, error: str) -> Task | None:
        """Who made the attempt went silent: as if its sampler had (`reaping.py`).

        Returns the Task if this ended the group's last slot. Raises `LeaseLost`.
        """
        losses = claim.losses + 1
        counts = losses > FREE_LOSSES
        lost = {"error": told(error), "losses": losses, "failures": claim.failures + counts}
        if counts and claim.failures + 1 >= self._max_failures:
            return await self.leave(claim, SlotStatus.FAILED, lost)
        again = {**lost, "attempt": claim.attempt + 1}
        return await self.leave(claim, SlotStatus.PENDING, again)

    async def leave(
        self,
        claim: Claim,
        status: SlotStatus,
        fields: Mapping[str, Expression],
        forks: Sequence[int] = (),
    ) -> Task | None:
        """End our lease on a slot, which becomes `status` with `fields`. `forks`: see `complete`.

        If this ended the group's last slot, the same update leases the group's finalisation to us,
        and the Task is returned. Raises `LeaseLost`.
        """
        end = SlotEnd(
            claim.task.id,
            claim.rollout,
            claim.attempt,
            claim.scorings,
            claim.record_id,
            status,
            fields,
            tuple(forks),
        )
        try:
            return await self._ends.end(end)
        except TransitionRefused as refused:
            raise LeaseLost(str(refused)) from refused

    async def reap(self) -> Reaped:
        """End expired leases, see `reaping.py`."""
        return await retry_through_outages(
            lambda: reap_expired(self._database, self._max_failures),
            "the reaping of expired leases",
        )

    async def claim_finalisation(self, without: Collection[str] = ()) -> Task | None:
        """Lease the finalisation that has been due longest; None if none is due.

        If its holder died, this counts as a failure. `without`: skip these groups.
        """
        died = {"$cond": [{"$eq": ["$finalisation.owner", None]}, 0, 1]}
        counted = {
            name: {"$add": [f"$finalisation.{name}", died]} for name in ("tries", "failures")
        }
        taken = {"$mergeObjects": ["$finalisation", counted, self._lease()]}

        async def take() -> dict[str, Any] | None:
            return await self._tasks.find_one_and_update(
                finalisations_due(without),
                [{"$set": {"finalisation": taken}}],
                sort=[("finalisation.lease_expires", 1)],
                hint="to_finalise",
                return_document=ReturnDocument.AFTER,
            )

        document = await retry_through_outages(take, "the claim of a finalisation")
        return Task.from_mongo(document) if document else None

    async def finalised(
        self,
        task: Task,
        scores: Mapping[str, float | None] | None = None,
        outcome: GroupOutcome | None = None,
    ) -> None:
        """Complete the group, whose Records and rows are written. Raises `LeaseLost`.

        `scores`: by Record id, scores that the finalisation gave. `outcome`: of a training group.
        Other Records of the group belong to expired leases and are marked as failed. A group that
        is completed already stays as it is.
        """
        await retry_through_outages(
            lambda: self._finalised(task, scores or {}, outcome),
            f"the finalisation of {task.id}",
        )

    async def _lease_slots(
        self, groups: dict[str, Any], count: int, index: str
    ) -> dict[str, Any] | None:
        """Lease up to `count` slots of the first of `groups`; returns the Task as it was."""
        chosen = {"$in": ["$$slot.rollout", "$$chosen"]}
        leased = slots_changed(
            chosen,
            SlotStatus.LEASED,
            {
                "owner": literal(self.owner),
                "lease_expires": in_milliseconds(self.lease_ms),
                "record": SLOT_RECORD,
            },
        )
        update = [
            {
                "$set": {
                    "slots": {"$let": {"vars": {"chosen": first_pending(count)}, "in": leased}},
                    "pending": {"$max": [0, {"$subtract": ["$pending", count]}]},
                    "status": task_status(TaskStatus.RUNNING),
                }
            }
        ]
        return await retry_through_outages(
            lambda: self._tasks.find_one_and_update(
                groups, update, sort=[("group_order", 1)], hint=index
            ),
            "a claim",
        )

    async def _finalised(
        self, task: Task, scores: Mapping[str, float | None], outcome: GroupOutcome | None
    ) -> None:
        ours = {
            "_id": task.id,
            "status": TaskStatus.FINALISING,
            "finalisation.owner": self.owner,
        }
        if any(slot.attempt > 0 or slot.status == SlotStatus.FAILED for slot in task.slots):
            # Close Records that the reaper did not: it died, or read before the score arrived. Only
            # while the finalisation is ours: another may have ended it, and a release reopened it.
            if await self._tasks.find_one(ours, {"_id": 1}) is None:
                await self._finalised_already(task)
                return
            # Keep the Records of quarantined slots: they may be released at any time.
            kept = [slot.record for slot in task.slots if slot.status != SlotStatus.FAILED]
            await close_lost_records(self._database, {"task": task.id, "_id": {"$nin": kept}})
        result = await self._tasks.update_one(
            ours,
            [
                {
                    "$set": {
                        "status": task_status(TaskStatus.COMPLETED),
                        "finalisation": None,
                        "completed_at": "$$NOW",
                        "error": None,
                        "outcome": literal(outcome.model_dump() if outcome else None),
                    }
                },
                *slots_scored(scores),
            ],
        )
        if not result.matched_count:
            await self._finalised_already(task)

    async def _finalised_already(self, task: Task) -> None:
        """Raise `LeaseLost` unless the group is completed."""
        document = await self._tasks.find_one({"_id": task.id})
        assert document is not None, f"{task.id} is gone, and the pipeline deletes nothing"
        found = Task.from_mongo(document)
        if found.status == TaskStatus.COMPLETED:
            return
        holder = f" by {found.finalisation.owner}" if found.finalisation else ""
        refused = TransitionRefused(
            f"task {task.id}", f"{found.status}{holder}", f"completed by {self.owner}"
        )
        raise LeaseLost(str(refused)) from refused

    def _finalisation(self) -> Expression:
        return {**self._lease(), "tries": 0, "failures": 0, "error": None}

    def _lease(self) -> Expression:
        return {"owner": literal(self.owner), "lease_expires": in_milliseconds(self.lease_ms)}


def _without_id(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != "_id"}


async def open_groups(database: RunDatabase, split: Split) -> int:
    """The number of groups that are begun and not finalised."""
    return await database.tasks.count_documents(
        {"status": {"$in": [TaskStatus.RUNNING, TaskStatus.FINALISING]}, "split": split}
    )
