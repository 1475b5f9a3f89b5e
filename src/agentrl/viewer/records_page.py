"""The table of Records: filters, orders, and a search in the texts of turns."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.databases.documents import Record, Split
from agentrl.launcher.record_filter import read_conditions
from agentrl.launcher.show_list import ORDERS, list_records
from agentrl.viewer.group_page import split_of
from agentrl.viewer.notes import labelled, labels_in_use
from agentrl.viewer.places import Place

SHOWN = 100
_SEARCHED = 50_000  # newest turns that a search in texts reads


@dataclass(frozen=True)
class RecordsPage:
    """What the page shows. `asked`: the fields of its form. `error`: why they are refused."""

    asked: Mapping[str, str]
    records: list[Record]
    labels: list[str]
    error: str | None = None
    orders: tuple[str, ...] = tuple(ORDERS)
    splits: tuple[str, ...] = tuple(Split)


async def read_records_page(place: Place, asked: Mapping[str, str]) -> RecordsPage:
    """Read it. `asked`: `where` (conditions, one a line), `order`, `split`, `text`, `label`.

    Raises `ConfigError` for a filter that cannot be read.
    """
    given = [line.strip() for line in re.split(r"[\n;]", asked.get("where", "")) if line.strip()]
    conditions: dict[str, Any] = read_conditions(given)
    chosen: list[dict[str, Any]] = []
    if text := asked.get("text", "").strip():
        chosen.append({"_id": {"$in": await _with_text(place, text)}})
    if label := asked.get("label", ""):
        chosen.append({"_id": {"$in": await labelled(place.database, label)}})
    if chosen:
        conditions = {"$and": [*conditions.get("$and", []), *chosen]}
    order = asked.get("order", "newest")
    split = await split_of(place, asked)
    records = await list_records(place.database, order, conditions, split, SHOWN)
    return RecordsPage({**asked, "split": split}, records, await labels_in_use(place.database))


async def _with_text(place: Place, text: str) -> list[str]:
    """The Records of the newest turns in which a text occurs, in what model or tools said."""
    pattern = {"$regex": re.escape(text), "$options": "i"}
    said = [{name: pattern} for name in ("output_text", "messages.content", "tool_calls.result")]
    cursor = await place.database.turns.aggregate(
        [
            {"$limit": _SEARCHED},
            {"$match": {"$or": said}},
            {"$limit": 2000},
            {"$project": {"record_id": 1}},
        ],
        hint={"$natural": -1},
    )
    return list({turn["record_id"] async for turn in cursor})
