"""Runs the model's SQL, which may be anything, and judges it by what it gives.

A query may only read, for `SECONDS` at most, and `MOST_ROWS` of its rows are fetched. It is right
if it gives what the reference gives, in the database and in another one with the same names: a
wrong query rarely agrees with both.
"""

import sqlite3
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

SECONDS = 2.0
MOST_ROWS = 1000
STEPS_PER_LOOK = 10_000  # of SQLite's virtual machine, between looks at the clock
SHOWN_ROWS = 2
READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}
MOST_ALLOCATED = 64 * 2**20  # bytes of a text that an expression makes

Rows = list[tuple[Any, ...]]


class QueryError(Exception):
    """The query cannot be run; the text is for the model."""


def open_for_reading(file: Path) -> sqlite3.Connection:
    """The database, which nothing can change through this connection."""
    return sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)


def run_query(connection: sqlite3.Connection, sql: str) -> Rows:
    """The rows of one query. Raises `QueryError`."""
    deadline = time.monotonic() + SECONDS
    connection.set_authorizer(
        lambda action, *_: sqlite3.SQLITE_OK if action in READING else sqlite3.SQLITE_DENY
    )
    connection.set_progress_handler(lambda: time.monotonic() > deadline, STEPS_PER_LOOK)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_ALLOCATED)
    try:
        return connection.execute(sql).fetchmany(MOST_ROWS)
    except sqlite3.OperationalError as error:
        said = f"it took more than {SECONDS:g} s" if str(error) == "interrupted" else str(error)
        raise QueryError(said) from None
    # Warnings: several statements in Python 3.11. Values: characters that no query may have.
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        raise QueryError(str(error)) from None


def shown(rows: Rows) -> str:
    """A result as the model reads it: how many rows, and the first of them."""
    first = "; ".join(" ".join(map(str, row)) for row in rows[:SHOWN_ROWS])
    return f"{len(rows)} rows: {first}"


def judge(sql: str, reference: str, databases: list[Path]) -> tuple[float, str]:
    """1 or 0, and why, for a query whose reference is right."""
    try:
        asked = sqlglot.parse(sql, dialect="sqlite")
    except SqlglotError:
        return 0.0, "it is no SQL"
    if len(asked) != 1 or not isinstance(asked[0], exp.Query):
        return 0.0, "it is not one query"
    wanted = sqlglot.parse_one(reference, dialect="sqlite")
    if asked[0] == wanted:
        return 1.0, "it is the reference"
    ordered = wanted.find(exp.Order) is not None
    for file in databases:
        with closing(open_for_reading(file)) as connection:
            right = run_query(connection, reference)
            try:
                given = run_query(connection, sql)
            except QueryError as error:
                return 0.0, str(error)
        if given != right if ordered else Counter(given) != Counter(right):
            return 0.0, f"in {file.name} it gives {shown(given)}, not {shown(right)}"
    return 1.0, "it gives what the reference gives"
