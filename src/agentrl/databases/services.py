"""The inference services of a run: URLs, weight versions and heartbeats."""

from collections.abc import Iterable

from pymongo.write_concern import WriteConcern

from agentrl.databases import policies
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import InferenceService

SILENT_S = 30.0  # a service without a heartbeat for this long is considered dead


async def register(
    database: RunDatabase, url: str, model: str, capacity: int, weight_version: int = -1
) -> None:
    """Register a service that was just started.

    `capacity`: concurrent requests. `weight_version` -1: weights that this run did not publish;
    samplers do not use the service until the trainer has updated it.
    """
    await database.services.update_one(
        {"_id": url},
        [
            {
                "$set": {
                    "url": url,
                    "model": {"$literal": model},
                    "weight_version": weight_version,
                    "capacity": capacity,
                    "heartbeat": "$$NOW",
                    "memory": "held",
                }
            }
        ],
        upsert=True,
    )


async def register_urls(database: RunDatabase, urls: Iterable[str]) -> None:
    """Register services that the user gave by URL. They send no heartbeats."""
    for url in urls:
        given = InferenceService(
            id=url, url=url, model="", weight_version=-1, capacity=0, heartbeat=None
        ).to_mongo()
        given.pop("_id")
        await database.services.update_one({"_id": url}, {"$setOnInsert": given}, upsert=True)


async def heartbeat(database: RunDatabase, url: str) -> None:
    """Store a heartbeat. Only the primary acknowledges it: the next one comes soon."""
    await database.services.with_options(write_concern=WriteConcern(1)).update_one(
        {"_id": url}, [{"$set": {"heartbeat": "$$NOW"}}]
    )


async def unregister(database: RunDatabase, url: str) -> None:
    """Remove a service that stops."""
    await database.services.delete_one({"_id": url})


async def acknowledge(database: RunDatabase, url: str, version: int) -> None:
    """Record that the service now answers with the weights of `version`."""
    await database.services.update_one({"_id": url}, {"$set": {"weight_version": version}})


async def serving(database: RunDatabase, timeout_s: float = SILENT_S) -> list[InferenceService]:
    """Live services that may get work: those with the newest served weights, or newer ones.

    A service that missed the last publication gets no work until it is updated.
    """
    newest = await policies.newest_served(database)
    live = await live_services(database, timeout_s)
    return [service for service in live if service.weight_version >= newest]


async def record_memory(database: RunDatabase, url: str, memory: str) -> None:
    """Store the state of the service's GPU memory, an `inference.memory.MemoryState`."""
    await database.services.update_one({"_id": url}, {"$set": {"memory": memory}})


async def live_services(
    database: RunDatabase, timeout_s: float = SILENT_S
) -> list[InferenceService]:
    """Services with a heartbeat in the last `timeout_s` seconds or given by URL, sorted by URL."""
    recent = {"$gt": ["$heartbeat", {"$subtract": ["$$NOW", int(timeout_s * 1000)]}]}
    given = {"$eq": ["$heartbeat", None]}
    cursor = database.services.find({"$expr": {"$or": [recent, given]}}).sort("_id", 1)
    return [InferenceService.from_mongo(document) async for document in cursor]
