"""How long the trainer and the services of a run have had their devices.

Each process has a document (`DeviceUse`), which its heartbeats extend; so a process that was killed
counts up to its last one. It begins with the process, which has its devices while it loads.
Services that were given by URL write none.
"""

import time
from dataclasses import asdict, dataclass

from pymongo.write_concern import WriteConcern

from agentrl.databases.connection import RunDatabase

TRAINER, SERVICE = "trainer", "service"
_LOADED_AT = time.monotonic()  # with the first imports of a process


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices of a process and what it is: `TRAINER` or `SERVICE`.

    `gpus`: 0 on a CPU. `cores`: 0 on a GPU. `in_turns`: whether they are the trainer's as well.
    """

    part: str
    gpus: int
    cores: int
    in_turns: bool = False


@dataclass(frozen=True, slots=True)
class DeviceHours:
    """Hours of devices so far, of all processes of a run. A device that services and trainer have
    in turns is the trainer's."""

    trainer_gpu: float = 0.0
    service_gpu: float = 0.0
    trainer_core: float = 0.0
    service_core: float = 0.0

    @property
    def gpu(self) -> float:
        """Of all GPUs."""
        return self.trainer_gpu + self.service_gpu

    @property
    def core(self) -> float:
        """Of all cores of processes without a GPU."""
        return self.trainer_core + self.service_core


async def note_use(database: RunDatabase, process: str, devices: Devices) -> None:
    """Note that the process has its devices now. `process`: a name that no later one gets."""
    age_ms = int(1000 * (time.monotonic() - _LOADED_AT))
    began = {"$ifNull": ["$began", {"$subtract": ["$$NOW", age_ms]}]}
    times = {"began": began, "until": "$$NOW"}
    uses = database.device_use.with_options(write_concern=WriteConcern(1))
    await uses.update_one({"_id": process}, [{"$set": {**asdict(devices), **times}}], upsert=True)


async def device_hours(database: RunDatabase) -> DeviceHours:
    """The hours of all processes of the run so far."""
    seconds = {"$dateDiff": {"startDate": "$began", "endDate": "$until", "unit": "second"}}
    uses = await database.device_use.aggregate(
        [
            {"$match": {"in_turns": False}},
            {
                "$group": {
                    "_id": "$part",
                    "gpu": {"$sum": {"$multiply": ["$gpus", seconds]}},
                    "core": {"$sum": {"$multiply": ["$cores", seconds]}},
                }
            },
        ]
    )
    hours = {
        f"{use['_id']}_{unit}": use[unit] / 3600 async for use in uses for unit in ("gpu", "core")
    }
    return DeviceHours(**hours)
