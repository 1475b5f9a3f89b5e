"""The scoring of stored trajectories without a score, a separate step.

    claim -> heartbeat* -> complete           `TaskLedger`'s, as of any leased slot
                         | put_off            to be retried after a growing pause
                         | quarantine         it failed too often; waits for a person

The sampler of a trajectory also scores it, under the same lease. If that fails, or the sampler
dies, the slot becomes `sampled`: any sampler may claim the scoring when it is due, and nothing is
sampled again. The reaper (`reaping.py`) returns a dead sampler's scoring.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from agentrl.databases.connection import RunDatabase, retry_through_outages
from agentrl.databases.documents import SlotStatus, Task
from agentrl.databases.due import scorings_due
from agentrl.databases.expressions import (
    first_to_score,
    in_milliseconds,
    literal,
    next_scoring,
    told,
)
from agentrl.databases.retries import FailureLimit, pause_after
from agentrl.databases.task_choice import NO_TASKS, TaskChoice
from agentrl.databases.tasks import Claim, TaskLedger
from agentrl.databases.transitions import slots_changed


class ScoringLedger:
    """Transitions of slots whose trajectory is to be scored, by the owner of `tasks`."""

    def __init__(self, database: RunDatabase, tasks: TaskLedger, max_failures: int) -> None:
        self._tasks = tasks
        self._documents = database.tasks
        self.limit = FailureLimit(max_failures)

    async def claim(
        self, *, evaluation: int | None = None, without: TaskChoice = NO_TASKS
    ) -> Claim | None:
        """Lease the scoring that has been due longest; None if none is due.

        `evaluation`: only scorings of the evaluation at this step. `without`: skip tasks with these
        scorers.
        """
        due = scorings_due(evaluation, without)
        leased = slots_changed(
            {"$eq": ["$$slot.rollout", "$$chosen"]},
            SlotStatus.LEASED,
            {
                "owner": literal(self._tasks.owner),
                "lease_expires": in_milliseconds(self._tasks.lease_ms),
            },
        )
        update = [
            {"$set": {"slots": {"$let": {"vars": {"chosen": first_to_score()}, "in": leased}}}},
            {"$set": {"score_at": next_scoring()}},
        ]
        before = await retry_through_outages(
            lambda: self._documents.find_one_and_update(
                due, update, sort=[("score_at", 1)], hint="to_score"
            ),
            "a claim of a scoring",
        )
        if before is None:
            return None
        chosen = next(slot for slot in before["slots"] if _is_first(slot, before["score_at"]))
        task = Task.from_mongo({**before, "slots": [chosen]})
        (slot,) = task.slots
        return Claim(
            task,
            slot.rollout,
            slot.attempt,
            slot.failures,
            slot.scorings,
            slot.scoring_failures,
            to_score=True,
        )

    async def put_off(self, claim: Claim, error: str, *, counts: bool) -> None:
        """Give up the scoring: any sampler may claim it after a pause.

        `counts`: whether this failure counts against the limit. Raises `LeaseLost`.
        """
        pause_s = pause_after(claim.scorings + 1)
        await self._tasks.leave(
            claim,
            SlotStatus.SAMPLED,
            {
                "scorings": claim.scorings + 1,
                "scoring_failures": claim.scoring_failures + counts,
                "not_before": in_milliseconds(int(pause_s * 1000)),
                "error": told(error),
            },
        )

    async def hand_back(self, claim: Claim) -> None:
        """Give up the scoring: any sampler may claim it at once. This is no failure.

        Raises `LeaseLost`.
        """
        again = {"scorings": claim.scorings + 1, "not_before": "$$NOW"}
        await self._tasks.leave(claim, SlotStatus.SAMPLED, again)

    async def quarantine(self, claim: Claim, error: str) -> Task | None:
        """Quarantine the slot: its Record cannot be scored.

        Returns the Task if this ended the group's last slot (see `TaskLedger.leave`). Raises
        `LeaseLost`.
        """
        return await self._tasks.leave(claim, SlotStatus.QUARANTINED, {"error": told(error)})


def _is_first(slot: Mapping[str, Any], score_at: datetime) -> bool:
    """The condition of `first_to_score`, for a slot that was read."""
    return bool(slot["status"] == SlotStatus.SAMPLED and slot["not_before"] == score_at)
