"""How examples/sql runs the model's queries, and judges them."""

import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from example_run import EXAMPLES, PACKAGES

sys.path += map(str, (PACKAGES, EXAMPLES / "sql"))

import execution
from execution import QueryError, judge, open_for_reading, run_query, shown

REFERENCE = "select name from drug where price > 10"


@pytest.fixture
def databases(tmp_path: Path) -> list[Path]:
    """Two with the same names and other prices."""
    files = [tmp_path / "medical.sqlite", tmp_path / "medical-other.sqlite"]
    for file, prices in zip(files, [(5, 20, 30), (20, 5, 30)], strict=True):
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("create table drug (name text, price integer)")
            rows = zip(("a", "b", "c"), prices, strict=True)
            connection.executemany("insert into drug values (?, ?)", rows)
            connection.commit()
    return files


@pytest.fixture
def connection(databases: list[Path]) -> Iterator[sqlite3.Connection]:
    with closing(open_for_reading(databases[0])) as connection:
        yield connection


@pytest.mark.parametrize(
    "sql",
    [
        "delete from drug", "drop table drug", "insert into drug values ('d', 1)",
        "create table other (id)", "attach database '/tmp/other.sqlite' as other",
        "pragma writable_schema = 1", "vacuum into '/tmp/other.sqlite'",
        "select 1; delete from drug", "select load_extension('x')", "select '\0'",
    ],
)  # fmt: skip
def test_a_query_can_only_read(connection: sqlite3.Connection, sql: str) -> None:
    with pytest.raises(QueryError):
        run_query(connection, sql)
    assert len(run_query(connection, "select * from drug")) == 3


@pytest.mark.parametrize(
    "sql",
    [
        "select count(*) from drug a, drug b, drug c, drug d, drug e, drug f, drug g, drug h, "
        "drug i, drug j, drug k, drug l, drug m, drug n, drug o, drug p, drug q, drug r",
        "select hex(zeroblob(1000000000))",
    ],
)
def test_a_query_that_takes_too_much_is_ended(connection: sqlite3.Connection, sql: str) -> None:
    began = time.monotonic()
    with pytest.raises(QueryError, match=r"more than 2 s|too big"):
        run_query(connection, sql)
    assert time.monotonic() - began < execution.SECONDS + 20


def test_the_error_is_sqlite_s_own(connection: sqlite3.Connection) -> None:
    with pytest.raises(QueryError, match="no such column: title"):
        run_query(connection, "select title from drug")


def test_of_a_result_the_model_sees_the_count_and_the_first_rows() -> None:
    assert shown([]) == "0 rows: "
    assert shown([("a", 1), ("b", None), ("c", 3)]) == "3 rows: a 1; b None"


@pytest.mark.parametrize(
    ("sql", "score", "why"),
    [
        ("SELECT name FROM drug WHERE price > 10", 1.0, "the reference"),
        ("select drug.name from drug where not price <= 10 order by name desc", 1.0, "gives what"),
        # In the first database it gives the same by chance.
        ("select name from drug where name > 'a'", 0.0, "in medical-other.sqlite it gives 2 rows"),
        ("select name from drug", 0.0, "in medical.sqlite it gives 3 rows: a; b, not 2 rows"),
        ("select name from drug where cost > 10", 0.0, "no such column: cost"),
        ("select distinct price > 10, name from drug where price > 10", 0.0, "it gives"),
        ("name of the drugs", 0.0, "it is no"),
        ("", 0.0, "it is not one query"),
        ("select name from drug where price > 10; select 1", 0.0, "it is not one query"),
        ("delete from drug", 0.0, "it is not one query"),
    ],
)
def test_a_query_is_right_if_it_gives_what_the_reference_gives_in_both_databases(
    databases: list[Path], sql: str, score: float, why: str
) -> None:
    found, said = judge(sql, REFERENCE, databases)
    assert (found, why in said) == (score, True), said


def test_the_order_counts_where_the_reference_has_one(databases: list[Path]) -> None:
    up, down = (f"{REFERENCE} order by price {order}" for order in ("asc", "desc"))
    assert judge(down, up, databases)[0] == 0.0
    assert judge(up, up, databases)[0] == 1.0
    assert judge(down, REFERENCE, databases)[0] == 1.0


def test_rows_that_come_twice_count_twice(databases: list[Path]) -> None:
    twice = f"{REFERENCE} union all {REFERENCE}"
    assert judge(twice, REFERENCE, databases)[0] == 0.0
