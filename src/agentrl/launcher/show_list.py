"""`agentrl show --list`, `--worst`, `--best`: many Records, one line each."""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pymongo.asynchronous.cursor import AsyncCursor
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.databases.connection import BEFORE_ALL, RunDatabase
from agentrl.databases.documents import HANDED_BACK, Record, Split
from agentrl.launcher.record_filter import LONGEST_S, Filter, refused_by_mongod, selected
from agentrl.launcher.runs import age

_WIDE = 92  # width from which the task is shown, which the id names too
# Sort orders. Among equal scores, the longest is the worst and the shortest the best.
ORDERS: dict[str, list[tuple[str, int]]] = {
    "newest": [("started_at", -1)],
    "worst": [("score", 1), ("tokens.generated", -1)],
    "best": [("score", -1), ("tokens.generated", 1)],
}


async def list_records(
    database: RunDatabase, order: str, conditions: Filter, split: Split, count: int
) -> list[Record]:
    """The first `count` Records that match the conditions, in this order (a key of `ORDERS`).

    `split` is ignored if a condition is on the split. An order by score has only Records with a
    score. Raises `ConfigError` for a filter that MongoDB refuses, or is too long at.
    """
    cursor = (await in_order(database, order, conditions, split)).limit(count)
    with refused_by_mongod():
        return [Record.from_mongo(document) async for document in cursor]


async def in_order(
    database: RunDatabase,
    order: str,
    conditions: Filter,
    split: Split,
    fields: Mapping[str, int] | None = None,
) -> AsyncCursor[dict[str, Any]]:
    """All of them, as stored, or these `fields` of them. Nothing is read yet."""
    filters = await selected(database, conditions, split)
    if order != "newest":
        # A scored Record has a `finished_at`, the condition of the index that has the order.
        filters.append({"score": {"$gte": -math.inf}, "finished_at": {"$gt": BEFORE_ALL}})
    cursor = database.records.find({"$and": filters}, fields).sort(ORDERS[order])
    return cursor.max_time_ms(int(LONGEST_S * 1000))


def print_list(console: Console, records: Sequence[Record], run: str) -> None:
    """Print one line for each Record, with the id for `agentrl show RUN ID`."""
    if not records:
        console.print(f"run {run} has no such record")
        return
    now = datetime.now(UTC)
    wide = console.width >= _WIDE
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("id", no_wrap=True, min_width=max(len(record.id) for record in records))
    if wide:
        table.add_column("task", overflow="ellipsis", no_wrap=True)
    for title in ("rollout", "score", "adv", "turns", "tools", "tokens"):
        table.add_column(title, justify="right")
    table.add_column("stop", overflow="ellipsis", no_wrap=True)
    table.add_column("age", justify="right", no_wrap=True)
    for record in records:
        when = record.finished_at or record.started_at
        table.add_row(
            record.id,
            *([record.task_id] if wide else []),
            str(record.rollout),
            number(record.score, ".2f"),
            number(record.advantage, "+.2f"),
            str(record.n_turns),
            str(record.n_tool_calls),
            str(record.tokens.generated),
            _end(record),
            age((now - when).total_seconds()) if when else "-",
        )
    console.print(table)


def _end(record: Record) -> Text:
    """How it ended. What was handed back is no failure: its rollout is attempted again."""
    if (record.error or "").startswith(HANDED_BACK):
        return Text(HANDED_BACK.rstrip(": "), "dim")
    return Text(record.stop_reason or record.status, "red" if record.error else "")


def number(value: float | None, form: str) -> str:
    """A number in a format; a hyphen for None."""
    return "-" if value is None else format(value, form)
