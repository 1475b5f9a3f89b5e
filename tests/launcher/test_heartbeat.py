"""A service goes on announcing itself after the database was away."""

import asyncio
import logging
from pathlib import Path

import pytest

from agentrl.databases import services
from agentrl.databases.connection import connect
from agentrl.databases.device_use import SERVICE, Devices, device_hours
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.launcher import serve

URL = "http://127.0.0.1:1"


async def test_a_heartbeat_outlives_an_outage_of_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve, "HEARTBEAT_S", 0.05)
    caplog.set_level(logging.WARNING, serve.__name__)
    with EmbeddedMongod(tmp_path / "data", tmp_path / "mongod.log") as mongod:
        url = mongod.url
        database = await connect(url, "run", timeout_s=0.5)  # after that, an operation fails
        await services.register(database, URL, "model", 8)
        devices = Devices(SERVICE, gpus=2, cores=0)
        heartbeats = asyncio.create_task(serve._beat(database, URL, "process", devices))
        try:
            mongod.kill()
            async with asyncio.timeout(20):
                while not caplog.records:
                    await asyncio.sleep(0.05)
            assert mongod.start() == url
            looking = await connect(url, "run")  # this one waits until the server is a primary
            registered = await looking.services.find_one({"_id": URL})
            assert registered is not None
            later = {"_id": URL, "heartbeat": {"$gt": registered["heartbeat"]}}
            async with asyncio.timeout(20):
                while await looking.services.find_one(later) is None:
                    await asyncio.sleep(0.05)
            async with asyncio.timeout(20):
                while (await device_hours(looking)).service_gpu < 2 / 3600:  # a second of two GPUs
                    await asyncio.sleep(0.05)
            await looking.close()
            assert not heartbeats.done()
        finally:
            heartbeats.cancel()
            await asyncio.gather(heartbeats, return_exceptions=True)
            await database.close()
