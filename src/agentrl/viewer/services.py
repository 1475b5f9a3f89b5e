"""The inference services of a run, and the load that samplers saw last."""

from dataclasses import dataclass
from datetime import datetime

from agentrl.databases.documents import InferenceService, StoredLoad
from agentrl.databases.loads import STALE
from agentrl.viewer.places import Place


@dataclass(frozen=True)
class ServiceLine:
    """A service. `cache_used`: share of the positions of its KV cache. `stale`: whether the load
    says nothing about now."""

    service: InferenceService
    load: StoredLoad | None
    cache_used: float | None
    stale: bool


async def read_services(place: Place, now: datetime) -> list[ServiceLine]:
    """Those that are registered, by URL. `now`: the server's time."""
    found = place.database.services.find().sort("_id", 1)
    return [_line(InferenceService.from_mongo(document), now) async for document in found]


def _line(service: InferenceService, now: datetime) -> ServiceLine:
    load = service.load
    if load is None:
        return ServiceLine(service, None, None, stale=False)
    used = load.used_tokens / load.total_tokens if load.total_tokens else None
    return ServiceLine(service, load, used, stale=now - load.at > STALE)
