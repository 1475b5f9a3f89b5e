"""What samplers take up when it is due: finalisations and scorings that were put off, or whose
samplers died.

They are looked for every second, and there are mostly none. So one query asks for all of them
before anything is claimed: a claim that finds nothing costs mongod several times as much.
"""

from collections.abc import Collection
from typing import Any

from agentrl.databases.connection import RunDatabase, retry_through_outages
from agentrl.databases.documents import Split, TaskStatus
from agentrl.databases.task_choice import NO_TASKS, TaskChoice

Query = dict[str, Any]


def finalisations_due(without: Collection[str] = ()) -> Query:
    """Groups to finalise whose lease has expired; none with these ids."""
    query: Query = {
        "status": TaskStatus.FINALISING,
        "$expr": {"$lte": ["$finalisation.lease_expires", "$$NOW"]},
    }
    return {**query, "_id": {"$nin": sorted(without)}} if without else query


def scorings_due(evaluation: int | None = None, without: TaskChoice = NO_TASKS) -> Query:
    """Groups with a trajectory to score. `evaluation`: only of this one. `without`: none of tasks
    with these scorers."""
    query: Query = {
        "score_at": {"$type": "date"},
        "$expr": {"$lte": ["$score_at", "$$NOW"]},
        **without.unscored(),
    }
    return query if evaluation is None else {**query, "split": Split.EVAL, "epoch": evaluation}


async def anything_due(database: RunDatabase, *any_of: Query) -> bool:
    """Whether there is something of one of these queries."""
    found = await retry_through_outages(
        lambda: database.tasks.find_one({"$or": list(any_of)}, {"_id": 1}),
        "the look for what is due",
    )
    return found is not None
