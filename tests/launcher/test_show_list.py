"""Records listed by `agentrl show`: which ones, in which order, and how a condition is said."""

import io
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console

from agentrl.configs import ConfigError
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import (
    HANDED_BACK,
    Record,
    RecordStatus,
    Split,
    StopReason,
    TokenCounts,
    VersionRange,
)
from agentrl.databases.notes import write_note
from agentrl.databases.policies import publish
from agentrl.launcher import record_filter
from agentrl.launcher.record_filter import read_conditions
from agentrl.launcher.show_list import list_records, print_list


async def add_records(database: RunDatabase) -> None:
    """Four of training, newest last: scores 0, 1, 1 and none; and one of evaluation."""
    began = datetime.now(UTC) - timedelta(hours=3)
    values: list[dict[str, Any]] = [
        {"score": 0.0, "task_id": "7", "n_turns": 3},
        {"score": 1.0, "tokens": TokenCounts(generated=50)},
        {"score": 1.0, "tokens": TokenCounts(generated=20)},
        {"status": RecordStatus.FAILED, "error": "broke", "stop_reason": None},
        {"score": 0.0, "split": Split.EVAL},
    ]
    for number, changes in enumerate(values):
        fields: dict[str, Any] = {
            "split": Split.TRAIN, "task_id": "a", "n_turns": 1, "status": RecordStatus.READY,
            "versions": VersionRange(min=number, max=9), "stop_reason": StopReason.ANSWERED,
            "turn_statuses": {"completed": number}, **changes,
        }  # fmt: skip
        record = Record(
            id=f"r{number}", task="t", rollout=number, attempt=0, epoch=0, owner="s", query="?",
            started_at=began + timedelta(minutes=number),
            finished_at=began + timedelta(minutes=number), **fields,
        )  # fmt: skip
        await database.records.insert_one(record.to_mongo())
        await publish(database, number, number // 2, "v")


async def ids(
    database: RunDatabase, *conditions: str, order: str = "newest", count: int = 9
) -> list[str]:
    where = read_conditions(conditions)
    return [r.id for r in await list_records(database, order, where, Split.TRAIN, count)]


async def test_records_are_listed_in_the_order_that_is_asked_for(database: RunDatabase) -> None:
    await add_records(database)
    assert await ids(database) == ["r3", "r2", "r1", "r0"]
    assert await ids(database, order="worst") == ["r0", "r1", "r2"]  # among equals, the longest
    assert await ids(database, order="best", count=2) == ["r2", "r1"]  # and the shortest
    out = io.StringIO()
    records = await list_records(database, "newest", {}, Split.TRAIN, 9)
    print_list(Console(file=out, width=80), records, "demo")
    lines = out.getvalue().splitlines()
    assert lines[0].split() == [
        "id", "rollout", "score", "adv", "turns", "tools", "tokens", "stop", "age",
    ]  # fmt: skip
    assert lines[2].split() == ["r2", "2", "1.00", "-", "1", "0", "20", "answered", "3", "h"]
    assert "failed" in lines[1]
    handed_back = {"$set": {"error": f"{HANDED_BACK}the sampler stopped"}}
    await database.records.update_one({"_id": "r3"}, handed_back)
    out = io.StringIO()
    records = await list_records(database, "newest", {}, Split.TRAIN, 1)
    print_list(Console(file=out, width=80), records, "demo")
    assert "handed back" in out.getvalue() and "failed" not in out.getvalue()


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        (["score<0.5"], ["r0"]),
        (["score>=1", "tokens>20"], ["r1"]),
        (["task_id=7"], ["r0"]),  # a text of digits
        (["task=a", "status=failed"], ["r3"]),
        (["stop!=answered"], ["r3"]),
        (["turns = 3"], ["r0"]),
        (["score=null"], ["r3"]),
        (["step=1"], ["r3", "r2"]),  # whose versions are of that step
        (["step<1", "score>0"], ["r1"]),
        (["turn_statuses.completed>=2"], ["r3", "r2"]),
        (["split=eval"], ["r4"]),
        (["label=odd"], ["r3", "r1"]),
        (["label!=odd"], ["r2", "r0"]),
        (["label=7", "score>0"], ["r1"]),  # a text of digits
        (["label=nobody's"], []),
        (["trained=true"], ["r1", "r0"]),
        (["trained=false", "score>0"], ["r2"]),
        (["trained!=false", "step=0"], ["r1", "r0"]),
        (['{"score": {"$in": [0.0]}}'], ["r0"]),
    ],
)
async def test_a_condition_chooses_records(
    database: RunDatabase, conditions: Sequence[str], expected: list[str]
) -> None:
    await add_records(database)
    await write_note(database, "r1", "", ["odd", "7"], None)
    await write_note(database, "r3", "a note", ["odd"], None)
    for row, steps in (("r0", [1]), ("r1", [1, 2]), ("r2", [])):  # the last one waits
        marks = [{"step": step} for step in steps]
        await database.rows.insert_one({"_id": row, "trained": marks})
    assert await ids(database, *conditions) == expected


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("score", ["'score'", "FIELD=VALUE"]),
        ("scroe<1", ["'scroe'", "do you mean score?"]),
        ("score<high", ["score is a number", "'high'"]),
        ("score=nan", ["score is a number", "'nan'"]),
        ("score<NaN", ["score is a number", "'NaN'"]),
        ("turns!=few", ["turns is a number", "'few'"]),
        ("tokens.prompt=true", ["tokens.prompt is a number", "'true'"]),
        ("turn_statuses.completed=x", ["turn_statuses.completed is a number"]),
        ("versions.min=x", ["versions.min is a number"]),
        ("step=x", ["step is a number", "'x'"]),
        ("task<b", ["compares with a number", "'b'"]),
        ("{", ["not JSON"]),
        ("trained=1", ["write trained=true or trained=false"]),
        ("status=trained", ["'status=trained'", "sampling, sampled", "write trained=true"]),
        ("status=done", ["'status=done'", "ready, abandoned"]),
        ("label>3", ["compares with a number"]),
        ('{"trained": true}', ["trained=VALUE"]),
        ('{"$oid": "5f43a1b2c3d4e5f6a7b8c9d0"}', ["a value, not a filter"]),
        ('{"$oid": "5f"}', ["no value of MongoDB's", "InvalidId"]),
        ('{"score": {"$numberDecimal": "x"}}', ["no value of MongoDB's"]),
        ('{"score": {"$binary": {}}}', ["no value of MongoDB's", "base64"]),
        ('{"score": ' + "[" * 100_000, ["not JSON"]),
        ("score>99999999999999999999999", ["no such value", "8-byte"]),
        ('{"sco\\u0000re": 1}', ["no such value"]),
        ("task=a\udcff", ["no such value", "surrogate"]),
        ('{"task": "\\ud800"}', ["no such value", "surrogate"]),
        ('{"$where": "while (true) {}"}', ["$where would run JavaScript"]),
        ('{"$or": [{"$expr": {"$function": {}}}]}', ["$function would run JavaScript"]),
    ],
)
def test_a_condition_that_cannot_be_read_is_told_in_a_sentence(
    condition: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        read_conditions([condition])
    assert all(word in str(refused.value) for word in words)
    assert "\n" not in str(refused.value)


async def test_a_filter_that_mongodb_refuses_is_told_in_a_sentence(database: RunDatabase) -> None:
    for condition in ('{"$wher": 1}', '{"score": ' + '{"a": ' * 300 + "1" + "}" * 301):
        with pytest.raises(ConfigError, match="--where: MongoDB refuses the filter"):
            await ids(database, condition)


async def test_a_filter_that_takes_mongodb_too_long_is_given_up_in_a_sentence(
    database: RunDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Record(
        id="r", task="t", rollout=0, attempt=0, epoch=0, owner="s", query="?", split=Split.TRAIN,
        task_id="a", status=RecordStatus.READY,
    ).to_mongo()  # fmt: skip
    await database.records.insert_many({**one, "_id": f"r{at}"} for at in range(2000))
    monkeypatch.setattr("agentrl.launcher.show_list.LONGEST_S", 0.02)
    many = {"$range": [0, 20_000]}
    slow = {"$expr": {"$eq": [{"$reduce": {"input": many, "initialValue": 0, "in": "$$this"}}, 0]}}
    with pytest.raises(ConfigError, match="takes too long to find the records"):
        await ids(database, json.dumps(slow))


async def test_more_rows_than_a_filter_may_name_are_told_in_a_sentence(
    database: RunDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_filter, "LARGEST_LOOKUP", 1)
    await database.rows.insert_many([{"_id": n, "trained": [{"step": 1}]} for n in range(2)])
    with pytest.raises(ConfigError, match=r"^--where trained: the run has more than 1 of these"):
        await ids(database, "trained=true")
