"""The evaluations of `agentrl eval` in a run's database: which there are, and how far each is.

Training numbers its evaluations by step, so these have negative numbers.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from agentrl.databases.connection import RunDatabase
from agentrl.databases.diagnosis import shown_error
from agentrl.databases.documents import HANDED_BACK, Evaluation, Split, epoch_places
from agentrl.databases.feeder import make_tasks
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import TaskLedger
from agentrl.databases.transitions import OPEN_TASKS, TERMINAL_SLOTS


async def begin_evaluation(
    database: RunDatabase,
    lines: Sequence[TaskLine],
    *,
    model: str,
    model_digest: str,
    task_digest: str,
    rollouts: int,
    flags: Mapping[str, Any],
    digests: Mapping[str, str],
    again: bool,
) -> int:
    """The number of the evaluation, with its tasks in the ledger.

    It is the latest one of the same model, tasks, flags and files, and a new one if there is none.
    `again`: whether it is a new one in any case, unless the latest has not ended.
    """
    same = {
        "model_digest": model_digest,
        "task_digest": task_digest,
        "rollouts": rollouts,
        "flags": dict(flags),
        "digests": dict(digests),
    }
    known = await database.evaluations.find_one(same, sort=[("epoch", 1)])
    if known is not None and again and not await open_tasks(database, known["epoch"]):
        known = None
    if known is None:
        epoch = await _next(database)
        new = Evaluation(
            id=str(epoch), epoch=epoch, model=model, created_at=datetime.now(UTC), **same
        )
        await database.evaluations.insert_one(new.to_mongo())
    else:
        epoch = known["epoch"]
    # Also for a known one: its command may have been killed before.
    ledger = TaskLedger(database, owner="evaluation", lease_seconds=60, max_failures=1)
    await ledger.add(make_tasks(lines, Split.EVAL, epoch, rollouts, range(len(lines))))
    return epoch


async def _next(database: RunDatabase) -> int:
    oldest = await database.tasks.find_one(
        {"split": Split.EVAL}, {"epoch": 1}, sort=[("group_order", 1)], hint="order"
    )
    begun = await database.evaluations.find_one({}, {"epoch": 1}, sort=[("epoch", 1)])
    known = [int(found["epoch"]) for found in (oldest, begun) if found is not None]
    return min([0, *known]) - 1


async def open_tasks(database: RunDatabase, epoch: int) -> int:
    """How many tasks of the evaluation are not finished."""
    return await database.tasks.count_documents(
        {
            "split": Split.EVAL,
            "group_order": epoch_places(epoch),
            "status": {"$in": OPEN_TASKS},
        },
        hint="state",
    )


async def handed_back(database: RunDatabase, epoch: int) -> str | None:
    """How many open tasks of the evaluation were handed back, and why the last was; None if none.

    Only for outages, which may be too short or too rare for a sampler to wait for the dependency.
    """
    waiting = {"outages": {"$gt": 0}, "status": {"$nin": sorted(TERMINAL_SLOTS)}}
    tasks = await database.tasks.find(
        {
            "split": Split.EVAL,
            "group_order": epoch_places(epoch),
            "status": {"$in": OPEN_TASKS},
            "slots": {"$elemMatch": waiting},
        },
        {"_id": 1},
        hint="state",
    ).to_list()
    last = await database.records.find_one(
        {
            "task": {"$in": [task["_id"] for task in tasks]},
            "error": {"$regex": f"^{HANDED_BACK}"},
        },
        {"error": 1},
        sort=[("finished_at", -1)],
        hint="task",
    )
    if last is None:
        return None
    return f"{len(tasks)} begun again after an outage: {shown_error(last['error'])}"
