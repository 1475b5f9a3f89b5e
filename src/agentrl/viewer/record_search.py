"""Records by conditions and by a text of their turns, in bounded time.

No index serves every condition, and one over texts would cost samplers more than it is worth to
people who look for one now and then. So the Records are read in stretches of their time, until
enough are found or the time is up. The result says how far back that was; the next search goes on
from there. In another order a text is searched for from the first of the order on, in the same way.
"""

import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Record, Split
from agentrl.launcher.record_filter import Filter, names_field, refused_by_mongod, selected
from agentrl.launcher.show_list import ORDERS, OrderPlace, in_order, place_of

_SECONDS = 0.2  # after which no further stretch is begun
_SECONDS_OF_TEXT = 0.7
_SHORT_S = 0.1  # a stretch that takes less is followed by a larger one
_STRETCH, _FIRST_OF_TEXT = 4000, 250  # Records
_MOST_AT_ONCE = 300  # Records of a page, and those that begin in the moment of its last one
_MOMENT = {"started_at": 1}
_SAID = ("output_text", "messages.content", "tool_calls.result")  # by model, user and tools


@dataclass(frozen=True)
class Found:
    """Records in their order. `looked_at`: Records of the split that were read.

    `until`: none before this time was read; None: all were. `after`: the place in the order up to
    which all were read; None: to its end.
    """

    records: list[Record]
    looked_at: int
    until: datetime | None
    after: OrderPlace | None = None


async def search(
    database: RunDatabase,
    conditions: Filter,
    split: Split,
    text: str = "",
    before: datetime | None = None,
    enough: int = 100,
) -> Found:
    """The newest Records that fulfil the conditions and of which a turn has the text, without
    regard to case: `enough` or a few more. `before`: only those that began before this time.

    Raises `ConfigError` for a filter that MongoDB refuses.
    """
    deadline = time.monotonic() + (_SECONDS_OF_TEXT if text else _SECONDS)
    wanted = await selected(database, conditions, split)
    # So that the index of times serves; a condition may narrow it.
    of_split = {"split": {"$in": list(Split)} if names_field(conditions, "split") else split}
    size = _FIRST_OF_TEXT if text else _STRETCH
    found: list[Filter] = []
    looked_at = 0
    since: datetime | None = before
    while True:
        began = time.monotonic()
        before = since
        since, count = None, 0
        if text or conditions:
            since, count = await _stretch(database, {**of_split, **_within(None, before)}, size)
        filters = [*wanted, {**of_split, **_within(since, before)}]
        with refused_by_mongod():
            newest = database.records.find({"$and": filters}, _MOMENT).sort("started_at", -1)
            if not text:
                newest = newest.limit(_MOST_AT_ONCE)
            stretch = [document async for document in newest]
        if text:
            stretch = await _with_text(database, stretch, text)
        found += stretch
        looked_at += count
        now = time.monotonic()
        # The next stretch takes as long as this one at least.
        if since is None or len(found) >= enough or 2 * now - began > deadline:
            break
        if now - began < _SHORT_S:
            size = min(2 * size, _STRETCH)
    if len(found) > enough:
        # With all that began in the moment of the last one, because `until` names times only.
        since = found[enough - 1]["started_at"]
        found = [each for each in found if each["started_at"] >= since] if since else found
    return Found(await _whole(database, found), looked_at, since)


async def search_in_order(
    database: RunDatabase,
    order: str,
    conditions: Filter,
    split: Split,
    text: str,
    begin: OrderPlace | None = None,
    enough: int = 100,
) -> Found:
    """The first `enough` of an order (a key of `ORDERS`) of which a turn has the text.

    `begin`: only those behind this place. Raises `ConfigError` for a filter that MongoDB refuses.
    """
    deadline = time.monotonic() + _SECONDS_OF_TEXT
    fields = {name: 1 for name, _ in ORDERS[order]}
    found: list[Filter] = []
    looked_at = 0
    after: OrderPlace | None = begin
    size = _FIRST_OF_TEXT
    # In batches, because a run's whole index may fit into one of MongoDB's own.
    records = in_order(
        database, order, conditions, split, after=begin, fields=fields, batch=_FIRST_OF_TEXT
    )
    async with aclosing(records):
        while len(found) < enough:
            began = time.monotonic()
            stretch = await _first(records, size)
            looked_at += len(stretch)
            found += await _with_text(database, stretch, text)
            if len(stretch) < size:
                after = None
                break
            after = place_of(stretch[-1], order)
            now = time.monotonic()
            if 2 * now - began > deadline:  # the next stretch takes as long as this one
                break
            if now - began < _SHORT_S:
                size = min(2 * size, _STRETCH)
    if len(found) > enough:
        found = found[:enough]
        after = place_of(found[-1], order)
    return Found(await _whole(database, found), looked_at, None, after)


async def _first(records: AsyncIterator[Filter], count: int) -> list[Filter]:
    """The next `count` of these; fewer where they end."""
    found: list[Filter] = []
    while len(found) < count and (record := await anext(records, None)) is not None:
        found.append(record)
    return found


async def _whole(database: RunDatabase, found: Sequence[Filter]) -> list[Record]:
    ids = [each["_id"] for each in found]
    records = {
        document["_id"]: Record.from_mongo(document)
        async for document in database.records.find({"_id": {"$in": ids}})
    }
    return [records[each] for each in ids if each in records]


async def _stretch(
    database: RunDatabase, wanted: Filter, count: int
) -> tuple[datetime | None, int]:
    """Since when the newest `count` Records began, None if there are no more; and their number."""
    newest = database.records.find(wanted, {"started_at": 1, "_id": 0}, hint="started")
    last = [each async for each in newest.sort("started_at", -1).skip(count - 1).limit(1)]
    if last and last[0]["started_at"] is not None:
        return last[0]["started_at"], count
    return None, await database.records.count_documents(wanted, hint="started")


def _within(since: datetime | None, before: datetime | None) -> Filter:
    """Records that began since a time and before another; without a limit also those that never
    did."""
    limits: Filter = {}
    if since is not None:
        limits["$gte"] = since
    if before is not None:
        limits["$not"] = {"$gte": before}
    return {"started_at": limits} if limits else {}


async def _with_text(database: RunDatabase, records: Sequence[Filter], text: str) -> list[Filter]:
    """Those of the Records of which a turn has the text."""
    pattern = {"$regex": re.escape(text), "$options": "i"}
    ids = [record["_id"] for record in records]
    said = {"record_id": {"$in": ids}, "$or": [{name: pattern} for name in _SAID]}
    turns = database.turns.find(said, {"record_id": 1, "_id": 0}, hint="record")
    named = {turn["record_id"] async for turn in turns}
    return [record for record in records if record["_id"] in named]
