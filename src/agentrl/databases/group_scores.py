"""Scoring a whole group at once, while its finalisation is held.

    hold*  ->  keep        or, if we stop before the scores are there:  leave

A scorer that compares the Records of a group may take minutes and need not say the same twice. So
the finalisation's lease is extended meanwhile, and what was said first is kept on the Task, in one
atomic update: whoever takes over goes on from that.
"""

from collections.abc import Sequence
from typing import Any

from agentrl.databases.connection import RunDatabase, retry_through_outages
from agentrl.databases.documents import GroupScore, Task, TaskStatus
from agentrl.databases.expressions import in_milliseconds
from agentrl.databases.tasks import LeaseLost


class GroupScores:
    """Transitions of finalisations that `owner` holds."""

    def __init__(self, database: RunDatabase, owner: str, lease_seconds: float) -> None:
        self.lease_seconds = lease_seconds
        self._tasks = database.tasks
        self._owner = owner

    async def hold(self, task: Task) -> None:
        """Extend our lease on the group's finalisation. Raises `LeaseLost`."""
        expires = in_milliseconds(int(self.lease_seconds * 1000))
        await self._update(task, {}, {"finalisation.lease_expires": expires})

    async def leave(self, task: Task) -> None:
        """Give up the finalisation at once, to whoever asks next. Raises `LeaseLost`."""
        await self._update(task, {}, {"finalisation.lease_expires": "$$NOW"})

    async def keep(self, task: Task, scores: Sequence[GroupScore]) -> list[GroupScore]:
        """Store the group's scores if it has none; returns those that are stored then.

        Raises `LeaseLost` if the finalisation is another's and there are none.
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
            raise LeaseLost(f"the finalisation of {task.id} is another's by now")
