"""The table of Records: filters, orders, and a search in the texts of turns."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from agentrl.databases.documents import Record, Split
from agentrl.databases.notes import labels_in_use
from agentrl.launcher.record_filter import LABEL, read_conditions
from agentrl.launcher.show_list import ORDERS, list_records, place_of
from agentrl.viewer.address import order_in, place_in, text_in, time_in
from agentrl.viewer.group_page import split_of
from agentrl.viewer.places import Place
from agentrl.viewer.record_search import search, search_in_order

SHOWN = 100


@dataclass(frozen=True)
class RecordsPage:
    """What the page shows. `asked`: the fields of its form. `error`: why they are refused.

    `looked_at`: Records that were read, None where an order of all is shown. `until`: none that
    began before this time was read. `after`: where the next page of an order begins, as an address
    has it; None if this is the last one. `late`: whether there was no time to search more.
    """

    asked: Mapping[str, str]
    records: list[Record]
    labels: list[str]
    error: str | None = None
    looked_at: int | None = None
    until: datetime | None = None
    after: str | None = None
    late: bool = False
    newest: bool = False  # whether these are the newest of all
    enough: int = SHOWN
    orders: tuple[str, ...] = tuple(ORDERS)
    splits: tuple[str, ...] = tuple(Split)


async def read_records_page(place: Place, asked: Mapping[str, str]) -> RecordsPage:
    """Read it. `asked`: `where` (conditions, one a line), `order`, `split`, `text`, `label`; and
    where the page begins: `before`, a time, or `after`, a place in an order.

    Raises `ConfigError` for a filter, and `AddressError`.
    """
    database = place.database
    given = [line.strip() for line in re.split(r"[\n;]", asked.get("where", "")) if line.strip()]
    if label := asked.get("label", ""):
        given.append(f"{LABEL}={label}")
    conditions = read_conditions(given)
    order, text = order_in(asked, ORDERS), text_in(asked)
    split = await split_of(place, asked)
    labels = await labels_in_use(database)
    shown = {**asked, "split": split}
    if order != "newest" and not text:
        begin = place_in(asked, order)
        records = await list_records(database, order, conditions, split, SHOWN + 1, begin)
        more, records = len(records) > SHOWN, records[:SHOWN]
        after = json.dumps(place_of(records[-1].to_mongo(), order)) if more else None
        return RecordsPage(shown, records, labels, after=after)
    if order != "newest":
        begin = place_in(asked, order)
        found = await search_in_order(database, order, conditions, split, text, begin, SHOWN)
        after = None if found.after is None else json.dumps(found.after)
        late = after is not None and len(found.records) < SHOWN
        return RecordsPage(
            shown, found.records, labels, looked_at=found.looked_at, after=after, late=late
        )
    found = await search(database, conditions, split, text, time_in(asked, "before"), SHOWN)
    newest = not text and "before" not in asked
    return RecordsPage(
        shown, found.records, labels, looked_at=found.looked_at, until=found.until, newest=newest
    )
