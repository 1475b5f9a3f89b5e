"""The load of services and samplers as it was last seen, for people. Nothing else reads it.

Samplers look at their services every second to adapt. Some of these looks are stored, by whichever
sampler comes first, and with them what the sampler says of itself.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta

from pymongo import UpdateOne
from pymongo.write_concern import WriteConcern

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import SamplerLoad

STORE_S = 10.0  # time between two stored loads of a sampler
STALE = timedelta(seconds=3 * STORE_S)  # an older load says nothing about now
_AGAIN_MS = int(STORE_S * 500)  # of a service, so that many samplers store little more than one


@dataclass(frozen=True, slots=True)
class OwnLoad:
    """What a sampler says of itself: fields of a `SamplerLoad`."""

    sampling: int
    limit: int
    late_s: float
    cpu: float


async def store_loads(
    database: RunDatabase, sampler: str, own: OwnLoad, services: Mapping[str, Mapping[str, int]]
) -> None:
    """Store a sampler's load and those of services, by URL: fields of a `StoredLoad` but `at`.

    Only the primary acknowledges them: the next ones come soon.
    """
    soon = WriteConcern(1)
    samplers = database.samplers.with_options(write_concern=soon)
    await samplers.update_one(
        {"_id": sampler}, [{"$set": {**asdict(own), "at": "$$NOW"}}], upsert=True
    )
    # Most of them another sampler has stored just now: one look for all costs mongod less than as
    # many updates that change nothing.
    is_old = {"$lt": ["$load.at", {"$subtract": ["$$NOW", _AGAIN_MS]}]}  # or there is none
    listed = database.services.find({"_id": {"$in": list(services)}, "$expr": is_old}, {"_id": 1})
    updates = [
        UpdateOne(
            {"_id": url, "$expr": is_old},
            [{"$set": {"load": {**services[url], "at": "$$NOW"}}}],
        )
        for url in [service["_id"] async for service in listed]
    ]
    if updates:
        await database.services.with_options(write_concern=soon).bulk_write(updates, ordered=False)


async def sampler_loads(database: RunDatabase, now: datetime) -> dict[str, SamplerLoad]:
    """The loads of samplers that are at work, by owner. `now`: the server's time."""
    found = database.samplers.find({"at": {"$gt": now - STALE}})
    loads = [SamplerLoad.from_mongo(document) async for document in found]
    return {load.id: load for load in loads}
