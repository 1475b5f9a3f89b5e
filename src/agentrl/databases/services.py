"""The inference services of a run: URLs, weight versions and heartbeats."""

from collections.abc import Iterable

from pymongo.write_concern import WriteConcern

from agentrl.databases import policies
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import InferenceService

SILENT_S = 30.0  # a registered service that sent no heartbeat for so long is taken for gone


async def register(
    database: RunDatabase, url: str, model: str, capacity: int, weight_version: int = -1
) -> None:
    """Announce a service that was just started, with the weights it came with.

    `weight_version` -1: weights that are no publication of this run; samplers do not use it until
    the trainer has brought it up to date.
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
    """Services that the user gave by URL: they send no heartbeats, so none are expected."""
    for url in urls:
        given = InferenceService(
            id=url, url=url, model="", weight_version=-1, capacity=0, heartbeat=None
        ).to_mongo()
        given.pop("_id")
        await database.services.update_one({"_id": url}, {"$setOnInsert": given}, upsert=True)


async def heartbeat(database: RunDatabase, url: str) -> None:
    """The service is alive. The primary's word is enough: another one comes soon."""
    await database.services.with_options(write_concern=WriteConcern(1)).update_one(
        {"_id": url}, [{"$set": {"heartbeat": "$$NOW"}}]
    )


async def unregister(database: RunDatabase, url: str) -> None:
    """The service goes away in order."""
    await database.services.delete_one({"_id": url})


async def acknowledge(database: RunDatabase, url: str, version: int) -> None:
    """The service now answers with the weights of `version`."""
    await database.services.update_one({"_id": url}, {"$set": {"weight_version": version}})


async def serving(database: RunDatabase, timeout_s: float = SILENT_S) -> list[InferenceService]:
    """Live services that may get work: those with the newest weights that were brought to all.

    A service that the last publication did not reach gets none until it has caught up.
    """
    newest = await policies.newest_served(database)
    live = await live_services(database, timeout_s)
    return [service for service in live if service.weight_version >= newest]


async def record_memory(database: RunDatabase, url: str, memory: str) -> None:
    """Who has the service's GPU memory, by `inference.memory.MemoryState`."""
    await database.services.update_one({"_id": url}, {"$set": {"memory": memory}})


async def live_services(
    database: RunDatabase, timeout_s: float = SILENT_S
) -> list[InferenceService]:
    """Services heard of within `timeout_s` seconds, and those given by URL; sorted by URL."""
    recent = {"$gt": ["$heartbeat", {"$subtract": ["$$NOW", int(timeout_s * 1000)]}]}
    given = {"$eq": ["$heartbeat", None]}
    cursor = database.services.find({"$expr": {"$or": [recent, given]}}).sort("_id", 1)
    return [InferenceService.from_mongo(document) async for document in cursor]
