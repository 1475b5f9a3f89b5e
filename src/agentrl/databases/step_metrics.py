"""The trainer's figures of each step, beside the lines of `metrics.jsonl`: for readers elsewhere.

A trainer that resumes from an earlier step repeats the later ones. Its figures then take the place
of those of the trainer before, which stay in the collection.
"""

from collections.abc import Mapping
from typing import Any

from agentrl.databases.connection import RunDatabase
from agentrl.databases.runs import in_lineage, load_run


async def keep_metrics(
    database: RunDatabase, fence: int, step: int, values: Mapping[str, Any]
) -> None:
    """Store the figures of a step of trainer `fence`. Idempotent."""
    place = {"_id": f"{step:09}-{fence}"}
    document = {**place, "step": step, "fence": fence, "values": dict(values)}
    await database.step_metrics.replace_one(place, document, upsert=True)


async def stored_metrics(database: RunDatabase) -> list[dict[str, Any]]:
    """The figures of the steps that belong to the run's weights, in order."""
    run = await load_run(database)
    starts = run.starts if run else []
    found: dict[int, dict[str, Any]] = {}
    async for document in database.step_metrics.find().sort("_id", 1):
        # Of a step that was begun again from its own checkpoint, the last trainer's.
        if in_lineage(document["step"], document["fence"], starts):
            found[document["step"]] = document["values"]
    return list(found.values())
