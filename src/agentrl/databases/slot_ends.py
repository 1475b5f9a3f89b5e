"""The ends of leases on slots. Those that end for good at the same time share one command.

A slot that becomes terminal keeps its Record, so a look at the Task tells whether its end was
stored. A slot that becomes free may be claimed again at once, so its end is a command of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pymongo import UpdateMany

from agentrl.databases.batches import Batches, Pace, Waiter
from agentrl.databases.connection import Documents, retry_through_outages
from agentrl.databases.documents import Slot, SlotStatus, Task, TaskStatus
from agentrl.databases.expressions import Expression, all_of, literal
from agentrl.databases.transitions import (
    SLOTS_AT_ONCE,
    TERMINAL_SLOTS,
    TransitionRefused,
    group_settled,
    slots_changed,
    slots_forked,
)


@dataclass(frozen=True, slots=True)
class SlotEnd:
    """A slot becomes `status` with `fields`. The other fields identify the lease that ends.

    `forks`: turns at which its rollout is forked: a slot is added for each.
    """

    task: str
    rollout: int
    attempt: int
    scorings: int
    record: str
    status: SlotStatus
    fields: Mapping[str, Expression]
    forks: tuple[int, ...] = ()

    def slot_in(self, task: Mapping[str, Any]) -> Slot:
        """The slot that ends, as the document of its Task has it."""
        return next(Slot(**slot) for slot in task["slots"] if slot["rollout"] == self.rollout)

    def is_stored(self, task: Mapping[str, Any]) -> bool:
        """Whether the Task's document shows this end of a terminal slot."""
        slot = self.slot_in(task)
        return (slot.status, slot.record) == (self.status, self.record)


_Waiter = Waiter[SlotEnd, Task | None]


class SlotEnds:
    """The ends of the leases of `owner`.

    `finalisation`: its lease on the finalisation of a group whose last slot it ends. `pace`: when
    to send; None: at once.
    """

    def __init__(
        self, tasks: Documents, owner: str, finalisation: Expression, pace: Pace | None = None
    ) -> None:
        self._tasks = tasks
        self._owner = owner
        self._finalisation = finalisation
        # Those of one group stay together, because one of their callers gets its Task.
        self._terminal = Batches[SlotEnd, Task | None](
            self._end_for_good, "ends of slots", pace, part_of=lambda end: end.task
        )

    async def end(self, end: SlotEnd) -> Task | None:
        """End a lease. Returns the Task if this ended the group's last slot.

        The same update then leases the group's finalisation to us. Raises `TransitionRefused` if
        the lease is lost, also for an end of a free slot whose answer was lost: it cannot be
        distinguished.
        """
        if end.status in TERMINAL_SLOTS:
            return await self._terminal.ask(end)
        what = f"the end of {end.record}"
        query, stages = self._update([end])
        result = await retry_through_outages(lambda: self._tasks.update_one(query, stages), what)
        if not result.matched_count:
            found = await retry_through_outages(lambda: self._read([end.task]), what)
            raise self._refusal(end, found[end.task])
        return None

    async def _end_for_good(self, batch: Sequence[_Waiter]) -> None:
        """End slots. Only one batch is under way, so that one caller gets the Task of a group."""
        of_group: dict[str, list[_Waiter]] = {}
        for waiter in batch:
            of_group.setdefault(waiter.request.task, []).append(waiter)
        for start in range(0, max(map(len, of_group.values())), SLOTS_AT_ONCE):
            parts = {g: waiters[start : start + SLOTS_AT_ONCE] for g, waiters in of_group.items()}
            await self._end_groups({g: waiters for g, waiters in parts.items() if waiters})

    async def _end_groups(self, of_group: Mapping[str, list[_Waiter]]) -> None:
        """End slots, with one update for each of their groups, and answer the callers."""
        updates = [  # not `UpdateOne`, as in `group_commit.py`
            UpdateMany(*self._update([waiter.request for waiter in waiters]))
            for waiters in of_group.values()
        ]

        async def end() -> dict[str, dict[str, Any]]:
            await self._tasks.bulk_write(updates, ordered=False)
            return await self._read(list(of_group))

        count = sum(map(len, of_group.values()))
        found = await retry_through_outages(end, f"the end of {count} rollouts")
        for group, waiters in of_group.items():
            task = found[group]
            ended = Task.from_mongo(task) if self._finalises(task) else None
            for waiter in waiters:
                if waiter.done.done():
                    continue  # its caller was cancelled
                if waiter.request.is_stored(task):
                    waiter.answer(ended)
                    ended = None
                else:
                    waiter.refuse(self._refusal(waiter.request, task))

    def _update(self, ends: Sequence[SlotEnd]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The update of one group: filter and stages.

        It changes the slots that are still ours, and matches if any is.
        """
        leases = [
            {
                "rollout": end.rollout,
                "attempt": end.attempt,
                "scorings": end.scorings,
                "owner": self._owner,
            }
            for end in ends
        ]
        held = [{"$elemMatch": {**lease, "status": SlotStatus.LEASED}} for lease in leases]
        left = [
            slots_changed(
                all_of(*({"$eq": [f"$$slot.{name}", literal(v)]} for name, v in lease.items())),
                end.status,
                {"owner": None, "lease_expires": None, **end.fields},
            )
            for end, lease in zip(ends, leases, strict=True)
        ]
        query = {"_id": ends[0].task, "$or": [{"slots": slot} for slot in held]}
        forked = [slots_forked(end.record, end.status, end.forks) for end in ends if end.forks]
        return query, [
            *({"$set": {"slots": slots}} for slots in [*left, *forked]),
            *group_settled(self._finalisation),
        ]

    async def _read(self, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The documents of Tasks, by id."""
        found = {task["_id"]: task async for task in self._tasks.find({"_id": {"$in": tasks}})}
        missing = set(tasks) - found.keys()
        assert not missing, f"{missing} are gone, and the pipeline deletes nothing"
        return found

    def _finalises(self, task: Mapping[str, Any]) -> bool:
        """Whether the group has ended and its finalisation is ours."""
        if task["status"] != TaskStatus.FINALISING:
            return False
        return bool(task["finalisation"]["owner"] == self._owner)

    def _refusal(self, end: SlotEnd, task: Mapping[str, Any]) -> TransitionRefused:
        slot = end.slot_in(task)
        return TransitionRefused(
            f"slot {end.rollout} of {end.task}, attempt {slot.attempt}",
            slot.status if slot.owner is None else f"{slot.status} by {slot.owner}",
            f"{end.status} by attempt {end.attempt} of {self._owner}",
        )
