"""Unreachable dependencies that the samplers of a run wait for.

Each sampler updates its own document while it waits. A document without a heartbeat for `SILENT_S`
is ignored: its sampler is considered dead. The server removes what it
left after ten minutes (the index `silent`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from agentrl.databases.connection import RunDatabase
from agentrl.databases.services import SILENT_S
from agentrl.databases.storable import brief

_ERROR_BYTES = 2000  # an error is shown on one line


@dataclass(frozen=True, slots=True)
class Outage:
    """A dependency that samplers wait for.

    `since`: when the first of them began to wait, by the server's clock. `error`: the last error of
    that sampler. `samplers`: how many wait.
    """

    dependency: str
    since: datetime
    error: str
    samplers: int = 1

    def sentence(self, now: datetime) -> str:
        """A sentence for the user, with local time. `now`: the server's time."""
        waited = (now - self.since).total_seconds()
        return (
            f"waiting for {self.dependency} since {self.since.astimezone():%H:%M:%S} "
            f"({waited:.0f} s), last error: {self.error}"
        )


@dataclass(frozen=True, slots=True)
class OpenBreaker:
    """A dependency that one sampler has waited for since `seconds` seconds."""

    dependency: str
    seconds: float
    error: str


async def report(database: RunDatabase, sampler: str, waited_for: Sequence[OpenBreaker]) -> None:
    """Store what a sampler waits for now. An empty `waited_for` removes its document."""
    if not waited_for:
        await database.outages.delete_one({"_id": sampler})
        return
    told = [
        {
            "dependency": {"$literal": brief(breaker.dependency, _ERROR_BYTES)},
            "since": {"$subtract": ["$$NOW", int(breaker.seconds * 1000)]},
            "error": {"$literal": brief(breaker.error, _ERROR_BYTES)},
        }
        for breaker in waited_for
    ]
    changes = {"heartbeat": "$$NOW", "waits_for": told}
    await database.outages.update_one({"_id": sampler}, [{"$set": changes}], upsert=True)


async def current(database: RunDatabase) -> list[Outage]:
    """What live samplers wait for, longest outage first."""
    cursor = await database.outages.aggregate(
        [
            {"$match": {"$expr": {"$gt": ["$heartbeat", _silent_since()]}}},
            {"$unwind": "$waits_for"},
            {"$replaceRoot": {"newRoot": "$waits_for"}},
            {"$sort": {"since": 1}},
            {
                "$group": {
                    "_id": "$dependency",
                    "since": {"$first": "$since"},
                    "error": {"$first": "$error"},
                    "samplers": {"$sum": 1},
                }
            },
            {"$sort": {"since": 1, "_id": 1}},
        ]
    )
    return [_read(document) async for document in cursor]


def _silent_since() -> dict[str, Any]:
    return {"$subtract": ["$$NOW", int(SILENT_S * 1000)]}


def _read(document: dict[str, Any]) -> Outage:
    return Outage(document["_id"], document["since"], document["error"], document["samplers"])
