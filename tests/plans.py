"""What operations cost a real mongod: its profiler's notes of their plans."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from agentrl.databases.connection import RunDatabase

_GROWING = ("tasks", "records", "record_data", "dispatched_sampling_tasks")


@dataclass
class Plans:
    """The operations of a block, without insertions."""

    operations: list[dict[str, Any]] = field(default_factory=list)

    @property
    def documents(self) -> int:
        """The most documents that one of them examined."""
        return max(each.get("docsExamined", 0) for each in self.operations)

    @property
    def keys(self) -> int:
        """The most index keys that one of them examined."""
        return max(each.get("keysExamined", 0) for each in self.operations)

    @property
    def commands(self) -> list[str]:
        """What they were."""
        return [next(iter(each["command"])) for each in self.operations]


@asynccontextmanager
async def noted_plans(database: RunDatabase) -> AsyncIterator[Plans]:
    """Note what the block asks of the collections that grow with a run. None of them is scanned,
    and nothing is sorted in memory."""
    plans = Plans()
    await database.database.command("profile", 2)
    try:
        yield plans
    finally:
        await database.database.command("profile", 0)
    noted = database.database["system.profile"].find({"op": {"$ne": "insert"}})
    async for each in noted:
        if each["ns"].partition(".")[2] not in _GROWING or "planSummary" not in each:
            continue
        plans.operations.append(each)
        assert "COLLSCAN" not in each["planSummary"], each
        is_aggregate = "aggregate" in each["command"]  # which may sort what it has grouped
        assert is_aggregate or not each.get("hasSortStage"), each
    await database.database.drop_collection("system.profile")
