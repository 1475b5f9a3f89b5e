"""The run's lease, its services and publications, on a real mongod."""

import asyncio

import pytest
from ports import free_port
from pymongo.errors import DuplicateKeyError

from agentrl.databases import policies, services
from agentrl.databases.connection import DatabaseUnreachable, RunDatabase, connect
from agentrl.databases.runs import (
    TRAINING,
    RunLease,
    TrainerAlive,
    TrainerReplaced,
    load_run,
    reopen,
)


async def test_a_run_has_one_trainer_until_it_goes(database: RunDatabase) -> None:
    first = RunLease(database, "first", "here", lease_seconds=30)
    second = RunLease(database, "second", "there", lease_seconds=30)
    await first.acquire(8)
    with pytest.raises(TrainerAlive, match=r"live trainer .first on here"):
        await second.acquire(8)
    await first.progress(step=3, max_steps=9, version=4, status=TRAINING)
    await first.release()
    run = await second.acquire(8)
    assert (run.step, run.version, run.trainer) == (3, 4, "second")


async def test_a_trainer_that_was_replaced_is_told_so(database: RunDatabase) -> None:
    silent = RunLease(database, "silent", "here", lease_seconds=0.05)
    await silent.acquire(8)
    await asyncio.sleep(0.1)
    await RunLease(database, "next", "here", lease_seconds=30).acquire(8)
    with pytest.raises(TrainerReplaced):
        await silent.heartbeat()
    run = await load_run(database)
    assert run is not None and run.trainer == "next"


async def test_only_services_heard_of_lately_or_given_by_url_are_live(
    database: RunDatabase,
) -> None:
    await services.register(database, "http://old", "m", 8)
    await asyncio.sleep(0.3)
    await services.register(database, "http://new", "m", 8)
    await services.register_urls(database, ["http://given"])
    await services.acknowledge(database, "http://given", 4)
    await services.register_urls(database, ["http://given"])
    live = {s.url: s.weight_version for s in await services.live_services(database, 0.2)}
    assert live == {"http://new": -1, "http://given": 4}
    await services.heartbeat(database, "http://old")
    await services.unregister(database, "http://new")
    assert {s.url for s in await services.live_services(database, 0.2)} == {
        "http://old", "http://given",
    }  # fmt: skip


async def test_a_policy_version_is_published_once(database: RunDatabase) -> None:
    assert await policies.latest(database) is None
    for version in (0, 1):
        await policies.publish(database, version, step=version, path=f"weights/v{version}")
    latest = await policies.latest(database)
    assert latest is not None and (latest.version, latest.path) == (1, "weights/v1")
    with pytest.raises(DuplicateKeyError):
        await policies.publish(database, 1, step=7, path="weights/other")


async def test_a_database_out_of_reach_is_named_with_the_time_it_was_tried() -> None:
    url = f"mongodb://user:secret@127.0.0.1:{free_port()}"
    with pytest.raises(DatabaseUnreachable) as error:
        await connect(url, "run", timeout_s=0.5)
    assert "127.0.0.1" in str(error.value) and "secret" not in str(error.value)


async def test_a_run_whose_trainer_is_known_to_be_dead_may_be_taken_at_once(
    database: RunDatabase,
) -> None:
    await RunLease(database, "dead", "here", lease_seconds=60).acquire(8)
    await reopen(database)
    run = await RunLease(database, "next", "here", lease_seconds=60).acquire(8)
    assert (run.trainer, run.status) == ("next", "created")


async def test_only_services_with_the_newest_publication_get_work(database: RunDatabase) -> None:
    for url, version in {"http://new": 5, "http://old": 4, "http://fresh": -1}.items():
        await services.register(database, url, "m", 8, weight_version=version)

    async def serving() -> set[str]:
        return {service.url for service in await services.serving(database, 60)}

    assert await serving() == {"http://new", "http://old"}, "nothing is published yet"
    await policies.publish(database, 4, step=4, path="v4")
    await policies.serve(database, 4)
    await policies.publish(database, 5, step=5, path="v5")
    # While version 5 comes to one after the other, all of them work.
    assert await serving() == {"http://new", "http://old"}
    await policies.serve(database, 5)
    assert await serving() == {"http://new"}
