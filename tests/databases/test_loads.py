"""The loads of services and samplers that are stored for people, on a real mongod."""

from datetime import timedelta

from agentrl.databases import services
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import InferenceService
from agentrl.databases.loads import STALE, OwnLoad, sampler_loads, store_loads
from agentrl.databases.server_time import server_time

URL = "http://service"
OWN = OwnLoad(sampling=3, limit=8, late_s=0.25, cpu=0.5)


def load(running: int) -> dict[str, int]:
    return {
        "running": running, "waiting": 2, "used_tokens": 30, "total_tokens": 40, "retractions": 0,
    }  # fmt: skip


async def running_at(database: RunDatabase) -> int | None:
    document = await database.services.find_one({"_id": URL})
    assert document is not None
    found = InferenceService.from_mongo(document).load
    return None if found is None else found.running


async def test_many_samplers_store_the_load_of_a_service_as_often_as_one(
    database: RunDatabase,
) -> None:
    await services.register_urls(database, [URL])
    assert await running_at(database) is None
    for number in range(1, 4):
        await store_loads(database, f"sampler {number}", OWN, {URL: load(number)})
    assert await running_at(database) == 1
    before = await server_time(database.client) - timedelta(seconds=6)
    await database.services.update_one({"_id": URL}, {"$set": {"load.at": before}})
    await store_loads(database, "sampler 2", OWN, {URL: load(9), "http://gone": load(7)})
    assert await running_at(database) == 9
    assert await database.services.count_documents({}) == 1, "a service that left stays away"


async def test_a_sampler_that_says_nothing_any_more_is_at_work_no_more(
    database: RunDatabase,
) -> None:
    await store_loads(database, "one", OWN, {})
    await store_loads(database, "other", OWN, {})
    now = await server_time(database.client)
    found = await sampler_loads(database, now)
    assert sorted(found) == ["one", "other"]
    assert (found["one"].sampling, found["one"].limit, found["one"].cpu) == (3, 8, 0.5)
    assert await sampler_loads(database, now + STALE + timedelta(seconds=1)) == {}
