"""`agentrl show --list`, `--worst`, `--best`: many Records, one line each; and their orders."""

import math
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from functools import reduce
from operator import getitem
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.databases.connection import BEFORE_ALL, RunDatabase
from agentrl.databases.documents import HANDED_BACK, Record, Split
from agentrl.launcher.record_filter import LONGEST_S, Filter, refused_by_mongod, selected
from agentrl.launcher.runs import age

_WIDE = 92  # width from which the task is shown, which the id names too
# Sort orders. Among equal scores, the longest is the worst and the shortest the best. All but the
# newest are those of an index, which ends with the id: so each Record has a place of its own.
ORDERS: dict[str, list[tuple[str, int]]] = {
    "newest": [("started_at", -1)],
    "worst": [("score", 1), ("tokens.generated", -1), ("_id", 1)],
    "best": [("score", -1), ("tokens.generated", 1), ("_id", -1)],
    "longest": [("tokens.generated", -1), ("_id", -1)],
    "shortest": [("tokens.generated", 1), ("_id", 1)],
    "most turns": [("n_turns", -1), ("_id", -1)],
    "fewest turns": [("n_turns", 1), ("_id", 1)],
}
OrderPlace = Sequence[Any]  # a Record's values of the fields of an order


async def list_records(
    database: RunDatabase,
    order: str,
    conditions: Filter,
    split: Split,
    count: int,
    after: OrderPlace | None = None,
) -> list[Record]:
    """The first `count` Records that match the conditions, in this order (a key of `ORDERS`).

    `split` is ignored if a condition is on the split. An order by score has only Records with a
    score, one by length or turns those that ended. `after`: only those behind this place. Raises
    `ConfigError` for a filter that MongoDB refuses, or is too long at.
    """
    found: list[Record] = []
    async with aclosing(in_order(database, order, conditions, split, count, after)) as records:
        async for document in records:
            found.append(Record.from_mongo(document))
            if len(found) == count:
                break
    return found


async def in_order(
    database: RunDatabase,
    order: str,
    conditions: Filter,
    split: Split,
    most: int = 0,
    after: OrderPlace | None = None,
    fields: Mapping[str, int] | None = None,
    batch: int = 0,
) -> AsyncGenerator[dict[str, Any], None]:
    """As `list_records`: all of them, as stored, or these `fields` of them. `most`: that will be
    read; 0 is unknown. `batch`: that come at once; 0 leaves it to MongoDB, which sends up to
    16 MiB."""
    filters = await selected(database, conditions, split)
    if order != "newest":
        # The condition of the indexes that have the orders; a scored Record fulfils it.
        filters.append({"finished_at": {"$gt": BEFORE_ALL}})
    if order in ("worst", "best"):
        filters.append({"score": {"$gte": -math.inf}})
    for behind in _behind(ORDERS[order], after):
        cursor = database.records.find({"$and": [*filters, behind]}, fields).sort(ORDERS[order])
        cursor = cursor.limit(most).batch_size(batch)
        async with cursor.max_time_ms(int(LONGEST_S * 1000)):
            with refused_by_mongod():
                async for document in cursor:
                    yield document


def place_of(document: Mapping[str, Any], order: str) -> OrderPlace:
    """The place of a stored Record in this order."""
    return [reduce(getitem, name.split("."), document) for name, _ in ORDERS[order]]


def _behind(order: Sequence[tuple[str, int]], after: OrderPlace | None) -> Iterator[Filter]:
    """Filters of what comes behind a place, in order: each is one stretch of the order's index.

    Behind (1, 5, "a") come those with 1, 5 and a later id, then those with 1 and more than 5, then
    those with more than 1.
    """
    if after is None:
        yield {}
        return
    for number in reversed(range(len(order))):
        same = {name: value for (name, _), value in zip(order[:number], after, strict=False)}
        name, direction = order[number]
        yield {**same, name: {"$gt" if direction > 0 else "$lt": after[number]}}


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
