"""The lease on a group's finalisation, and the states after a failure.

    hold* -> keep -> finalised           `TaskLedger` gives the lease and ends it
    leave | put_off                      anyone may retry: at once, or after a pause
    quarantine                           it failed too often; waits for a person

A finalisation may take minutes, if a scorer compares the Records of the group or there are many
turns. So its lease is extended meanwhile. A scorer may return other scores the next time, so the
first ones are stored on the Task in one atomic update. A sampler that takes over uses them.
"""

from collections.abc import Sequence
from typing import Any

from agentrl.databases.connection import RunDatabase, retry_through_outages
from agentrl.databases.documents import Finalisation, GroupScore, Task, TaskStatus
from agentrl.databases.expressions import in_milliseconds, told
from agentrl.databases.retries import FailureLimit, pause_after
from agentrl.databases.tasks import LeaseLost
from agentrl.databases.transitions import task_status


def finalisation_of(task: Task) -> Finalisation:
    """The finalisation of a group, which must have one."""
    assert task.finalisation is not None, f"nobody finalises {task.id}"
    return task.finalisation


class Finalisations:
    """Transitions of the finalisations that `owner` holds. Leases last `lease_seconds`."""

    def __init__(
        self, database: RunDatabase, owner: str, lease_seconds: float, max_failures: int
    ) -> None:
        self.lease_seconds = lease_seconds
        self._tasks = database.tasks
        self._owner = owner
        self.limit = FailureLimit(max_failures)

    async def hold(self, task: Task) -> None:
        """Extend our lease on the group's finalisation. Raises `LeaseLost`."""
        expires = in_milliseconds(int(self.lease_seconds * 1000))
        await self._update(task, {}, {"finalisation.lease_expires": expires})

    async def leave(self, task: Task) -> None:
        """Give up the finalisation: anyone may claim it at once. Raises `LeaseLost`."""
        left = {"finalisation.lease_expires": "$$NOW", "finalisation.owner": None}
        await self._update(task, {}, left)

    async def put_off(self, task: Task, error: str, *, counts: bool) -> None:
        """Give up the finalisation: anyone may claim it after a pause.

        `counts`: whether this failure counts against the limit. Raises `LeaseLost`.
        """
        state = finalisation_of(task)
        pause_s = pause_after(state.tries + 1)
        values = {
            "owner": None,
            "lease_expires": in_milliseconds(int(pause_s * 1000)),
            "tries": state.tries + 1,
            "failures": state.failures + counts,
            "error": told(error),
        }
        await self._update(task, {}, {f"finalisation.{name}": v for name, v in values.items()})

    async def quarantine(self, task: Task, error: str) -> None:
        """Quarantine the group. Its Records stay as they are. Raises `LeaseLost`."""
        values = {
            "status": task_status(TaskStatus.QUARANTINED),
            "finalisation": None,
            "error": told(error),
            "completed_at": "$$NOW",
        }
        await self._update(task, {}, values)

    async def keep(self, task: Task, scores: Sequence[GroupScore]) -> list[GroupScore]:
        """Store the group's scores unless it has some; returns the stored ones.

        Raises `LeaseLost` if another holds the finalisation and none are stored.
        """
        documents = [score.model_dump() for score in scores]
        try:
            await self._update(
                task, {"group_scores": None}, {"group_scores": {"$literal": documents}}
            )
        except LeaseLost:
            found = await retry_through_outages(
                lambda: self._tasks.find_one({"_id": task.id}), "a read"
            )
            stored = Task.from_mongo(found).group_scores if found else None
            if stored is None:
                raise
            return stored
        return list(scores)

    async def _update(self, task: Task, expected: dict[str, Any], values: dict[str, Any]) -> None:
        ours = {
            "_id": task.id, "status": TaskStatus.FINALISING, "finalisation.owner": self._owner,
            **expected,
        }  # fmt: skip
        result = await retry_through_outages(
            lambda: self._tasks.update_one(ours, [{"$set": values}]),
            f"the finalisation of {task.id}",
        )
        if not result.matched_count:
            raise LeaseLost(f"another sampler has taken over the finalisation of {task.id}")
