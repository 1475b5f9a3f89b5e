"""The samplers of a run: what each holds, what it has done lately, and what it waits for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from agentrl.databases.documents import SamplerLoad, SlotStatus, Split, TaskStatus
from agentrl.databases.loads import sampler_loads
from agentrl.viewer.places import Place

_LATELY = timedelta(seconds=60)
_SHOWN = 100


@dataclass(frozen=True)
class SamplerLine:
    """A sampler. `held`: rollouts that it holds. `ended`, `tokens_per_s`: attempts of the last
    minute. `waits_for`: dependencies whose breakers are open. `load`: what it said of itself; None
    if that is long ago.
    """

    owner: str
    held: int
    ended: int
    tokens_per_s: float
    waits_for: tuple[str, ...]
    load: SamplerLoad | None


def busiest(samplers: Sequence[SamplerLine]) -> list[SamplerLine]:
    """As many as a page shows, in their order: those that hold and ended the most."""
    if len(samplers) <= _SHOWN:
        return list(samplers)
    most = sorted(samplers, key=lambda line: (-line.held, -line.ended, line.owner))[:_SHOWN]
    return sorted(most, key=lambda line: line.owner)


async def read_samplers(place: Place, now: datetime) -> list[SamplerLine]:
    """Those with rollouts, with attempts that ended lately, that wait, or that told their load.

    `now`: the server's time.
    """
    database = place.database
    held: dict[str, Mapping[str, Any]] = {}
    leases = await database.tasks.aggregate(
        [
            {"$match": {"status": TaskStatus.RUNNING, "split": {"$in": list(Split)}}},
            {"$project": {"slots.owner": 1, "slots.status": 1}},
            {"$unwind": "$slots"},
            {"$match": {"slots.status": SlotStatus.LEASED}},
            {
                "$group": {
                    "_id": "$slots.owner",
                    "held": {"$sum": 1},
                }
            },
        ],
        hint="state",
    )
    async for lease in leases:
        held[lease["_id"]] = lease
    done: dict[str, Mapping[str, Any]] = {}
    ended = await database.records.aggregate(
        [
            {"$match": {"split": {"$in": list(Split)}, "finished_at": {"$gt": now - _LATELY}}},
            {
                "$group": {
                    "_id": "$owner",
                    "ended": {"$sum": 1},
                    "tokens": {"$sum": "$tokens.generated"},
                }
            },
        ],
        hint="recent",
    )
    async for each in ended:
        done[each["_id"]] = each
    waits = {
        outage["_id"]: tuple(wait["dependency"] for wait in outage.get("waits_for", ()))
        async for outage in database.outages.find()
    }
    loads = await sampler_loads(database, now)
    return [
        SamplerLine(
            owner=owner,
            held=held.get(owner, {}).get("held", 0),
            ended=done.get(owner, {}).get("ended", 0),
            tokens_per_s=done.get(owner, {}).get("tokens", 0) / _LATELY.total_seconds(),
            waits_for=waits.get(owner, ()),
            load=loads.get(owner),
        )
        for owner in sorted({*held, *done, *waits, *loads})
    ]
