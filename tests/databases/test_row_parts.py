"""A row that is larger than a document is stored in parts, and read as it was."""

import numpy as np
import pytest

from agentrl.databases import row_parts
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DBRecordData, Record, RecordStatus, Split
from agentrl.databases.records import RecordLedger
from agentrl.databases.rescoring import Rescored, Rescoring, RowOutcome
from agentrl.databases.row_ledger import fetch_rows
from agentrl.databases.token_tree import TokenTree


def make_row(row_id: str, n_tokens: int, advantage: float = 1.0) -> DBRecordData:
    ids = np.arange(n_tokens)
    return DBRecordData(
        id=row_id, task="task", group_order=0, reward=1.0, n_train_tokens=1, cost=1.0,
        policy_versions=[0], temperature=1.0, prefix_hash="",
        tree=TokenTree.line(ids, mask=ids % 2, logprobs=-ids / 1000, advantages=advantage),
    )  # fmt: skip


async def read(database: RunDatabase, row_id: str) -> DBRecordData:
    fetched = await fetch_rows(database, [row_id])
    assert not fetched.faults
    (row,) = fetched.rows
    return row


async def test_a_row_of_any_size_is_read_as_it_was_stored(database: RunDatabase) -> None:
    rows = [make_row("short", 1000), make_row("long", 5_000_000)]
    records = RecordLedger(database, 60.0)
    await records.add_rows(rows)
    await records.add_rows(rows)  # as whoever takes over from one that died does
    for row in rows:
        stored = await read(database, row.id)
        assert stored.tree == row.tree
        assert stored == row
    assert await database.parts.distinct("row") == ["long"]
    # columns of 20 MB, and two of 5
    assert await database.parts.count_documents({}) == 4 * 5 + 2 * 2


async def test_a_row_whose_part_is_gone_cannot_be_read_and_says_which(
    database: RunDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_parts, "_LARGEST", 1000)
    await RecordLedger(database, 60.0).add_rows([make_row("a", 400), make_row("b", 400)])
    gone = await database.parts.find_one_and_delete({"row": "a"})
    assert gone is not None
    fetched = await fetch_rows(database, ["a", "b"])
    assert [row.id for row in fetched.rows] == ["b"]
    assert fetched.faults == {
        "a": f"it cannot be read: row a: its part {gone['_id']} is not in record_data_parts"
    }


async def test_a_long_row_gets_other_advantages(
    database: RunDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_parts, "_LARGEST", 1000)
    await RecordLedger(database, 60.0).add_rows([make_row("a", 400)])
    record = Record(
        id="a", task="task", task_id="line", rollout=0, attempt=0, split=Split.TRAIN, epoch=0,
        owner="s", query="q", status=RecordStatus.READY,
    )  # fmt: skip
    other = make_row("a", 400, advantage=-2.0).model_copy(update={"reward": 0.0})
    rescoring = Rescoring(database)
    changed = Rescored(record, -2.0, None, other)
    assert await rescoring.store_row(changed) == RowOutcome.REWRITTEN
    assert await read(database, "a") == other
    withdrawn = Rescored(record, None, "rule", None)
    assert await rescoring.store_row(withdrawn) == RowOutcome.WITHDRAWN
    first = Rescored(record, 1.0, None, make_row("a", 400))
    assert await rescoring.store_row(first) == RowOutcome.ADDED
    assert (await read(database, "a")).tree == make_row("a", 400).tree
    await database.rows.delete_many({})
    assert await rescoring.store_row(changed) == RowOutcome.ADDED
    assert (await read(database, "a")).tree == other.tree
