"""The time for which processes of a run had their devices, on a real mongod."""

import time
from datetime import timedelta

from agentrl.databases import device_use
from agentrl.databases.connection import RunDatabase
from agentrl.databases.device_use import SERVICE, TRAINER, Devices, device_hours, note_use
from agentrl.databases.documents import DeviceUse

GPUS = Devices(TRAINER, gpus=4, cores=0)


async def lasted(database: RunDatabase, process: str, hours: float) -> None:
    """As if the process had begun so long before its last heartbeat."""
    found = await database.device_use.find_one({"_id": process})
    assert found is not None
    until = DeviceUse.from_mongo(found).until
    began = until - timedelta(hours=hours)
    await database.device_use.update_one({"_id": process}, {"$set": {"began": began}})


async def test_a_process_has_its_devices_while_it_loads(database: RunDatabase) -> None:
    await note_use(database, "trainer", GPUS)
    found = await database.device_use.find_one({"_id": "trainer"})
    use = DeviceUse.from_mongo(found or {})
    since_import = timedelta(seconds=time.monotonic() - device_use._LOADED_AT)
    assert timedelta(0) <= since_import - (use.until - use.began) < timedelta(seconds=5)
    assert use.until > use.began


async def test_hours_of_all_processes_add_up_and_devices_in_turns_count_once(
    database: RunDatabase,
) -> None:
    assert (await device_hours(database)).gpu == 0
    for process, devices, hours in (
        ("trainer", GPUS, 2.0), ("trainer, resumed", GPUS, 0.5),
        ("service", Devices(SERVICE, gpus=2, cores=0), 1.5),
        ("service in turns", Devices(SERVICE, gpus=4, cores=0, in_turns=True), 3.0),
        ("service on a CPU", Devices(SERVICE, gpus=0, cores=8), 0.25),
    ):  # fmt: skip
        await note_use(database, process, devices)
        await lasted(database, process, hours)
    hours = await device_hours(database)
    assert (hours.trainer_gpu, hours.service_gpu, hours.gpu) == (10, 3, 13)
    assert (hours.trainer_core, hours.service_core, hours.core) == (0, 2, 2)
    await note_use(database, "trainer", GPUS)
    assert (await device_hours(database)).trainer_gpu - 10 < 0.1, "a heartbeat begins nothing anew"
    assert await database.device_use.count_documents({}) == 5
