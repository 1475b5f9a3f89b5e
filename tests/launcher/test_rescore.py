"""`agentrl rescore` as it is called: flags, filter and report, on a real mongod."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentrl import cli
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import (
    Record,
    RecordStatus,
    Slot,
    SlotStatus,
    Split,
    Task,
    TaskStatus,
)
from agentrl.databases.mongod import EmbeddedMongod


async def add_group(database: RunDatabase, name: str, answers: tuple[str, ...]) -> None:
    """A completed held-out group whose attempts answered so; "the red bin" was right."""
    slots = [
        Slot(rollout=i, status=SlotStatus.COMPLETED, record=f"{name}-t{i}-a0", score=0.0)
        for i in range(len(answers))
    ]
    seq = await database.tasks.count_documents({})
    task = Task(
        _id=name, split=Split.EVAL, epoch=0, seq=seq, group_order=seq, task_id=name, query="q",
        answer="the red bin", scorer="exact_match", pending=0, slots=slots,
        status=TaskStatus.COMPLETED,
    )  # fmt: skip
    await database.tasks.insert_one(task.to_mongo())
    for i, answer in enumerate(answers):
        record = Record(
            _id=f"{name}-t{i}-a0", task=name, task_id=name, rollout=i, attempt=0, split=Split.EVAL,
            epoch=0, owner="a", query="q", final_answer=answer, status=RecordStatus.SCORED,
            score=0.0,
        )  # fmt: skip
        await database.records.insert_one(record.to_mongo())


async def rescore(database: RunDatabase, mongod: EmbeddedMongod, *arguments: str) -> int:
    flags = ("--db_connection_string", mongod.url)
    return await asyncio.to_thread(cli.main, ["rescore", database.name, *arguments, *flags])


@pytest.fixture(autouse=True)
def no_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run was launched elsewhere."""
    monkeypatch.chdir(tmp_path)


async def scores(database: RunDatabase) -> list[Any]:
    return [record["score"] async for record in database.records.find().sort("_id", 1)]


async def test_the_groups_that_a_filter_selects_have_new_scores_and_the_report_counts_them(
    database: RunDatabase, mongod: EmbeddedMongod, capfd: pytest.CaptureFixture[str]
) -> None:
    await add_group(database, "g", ("red bin", "blue"))
    await add_group(database, "h", ("red",))
    await database.database.notes.insert_one({"_id": "g-t1-a0", "labels": ["odd"]})
    for where in (['{"final_answer": {"$in": ["blue"]}}'], ["label=odd", "rollout>0"]):
        await database.records.update_many({}, {"$set": {"score": 0.0}})
        status = await rescore(database, mongod, "--scorer", "f1+0.5*contains", "--where", *where)
        out, err = capfd.readouterr()
        assert (status, err) == (0, "")
        assert "1 groups with 2 records are scored again" in out
        assert await scores(database) == [1.5, 0.0, 0.0]


async def test_a_group_that_cannot_be_scored_is_named_and_the_status_is_one(
    database: RunDatabase,
    mongod: EmbeddedMongod,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    await add_group(database, "g", ("red bin",))
    (tmp_path / "mine.py").write_text(
        "from agentrl import register_scorer\n"
        "def gone(record): raise LookupError('the grader is gone')\n"
        "register_scorer('gone', gone)\n"
    )
    status = await rescore(database, mongod, "--scorer", "gone", "--scorer_module", "mine.py")
    out, _ = capfd.readouterr()
    assert status == 1
    assert "g: LookupError: the grader is gone" in out
    assert await scores(database) == [0.0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--scorer", "vibes"], ["--scorer", "unknown scorer 'vibes'", "exact_match"]),
        (["--scorer", "2*2*f1"], ["--scorer", "weighted sum"]),
        (["--scorer", "ruler"], ["ruler", "ruler_agent", "--agent_config_path"]),
        (["--scorer", "http"], ["http_scorer"]),
        (["--scorer", "f1", "--where", "{"], ["--where", "not JSON"]),
        (["--scorer", "f1", "--where", "[]"], ["--where", "not FIELD=VALUE"]),
        (["--scorer", "f1", "--where", "scroe<1"], ["--where", "do you mean score?"]),
        (["--scorer", "f1", "--where", '{"$where": "sleep(1e6)"}'], ["$where", "JavaScript"]),
        (
            ["--scorer", "f1", "--where", '{"$expr": {"$function": {"body": ""}}}'],
            ["$function", "JavaScript"],
        ),
        (["--scorer", "f1", "--where", '{"$wher": 1}'], ["--where", "$wher"]),
        (["--scorer", "f1", "--scorer_module", "no.py"], ["--scorer_module", "no.py"]),
    ],
)
async def test_bad_input_is_one_sentence_with_status_two(
    database: RunDatabase,
    mongod: EmbeddedMongod,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    words: list[str],
) -> None:
    assert await rescore(database, mongod, *arguments) == 2
    _, err = capfd.readouterr()
    assert len(err.splitlines()) == 1, err
    for word in words:
        assert word in err
