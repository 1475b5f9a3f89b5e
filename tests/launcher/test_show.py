"""`agentrl show` on a stored run: tokens, two Records side by side, and JSON of each form."""

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from two_segments import FIRST, OF_RECORD, SECOND

import agentrl
from agentrl.cli import main
from agentrl.databases.arrays import pack_floats
from agentrl.databases.connection import RunDatabase
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.notes import write_note

ONE = OF_RECORD["record"]
OTHER = "train-0-x-t2-a0"  # says something else in its second turn, and has no second segment


def other_rows() -> list[dict[str, Any]]:
    row = copy.deepcopy({**FIRST, **OF_RECORD})
    row |= {
        "record": OTHER, "rollout": 2, "score": 0.0, "scores": {"exact_match": 0.0}, "reward": 0.0,
        "final_answer": "64", "advantage": -0.5, "input_ids": [1, 2, 3, 10, 11, 20, 21, 12, 15],
    }  # fmt: skip
    row["turns"][1]["text"] = "forty-nine"
    return [row]


@pytest.fixture
async def run(
    database: RunDatabase, mongod: EmbeddedMongod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The name of a run with two Records of one task, and one of another."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DB_URL", mongod.url)
    monkeypatch.setenv("COLUMNS", "100")
    elsewhere = {"record": "train-1-y-t0-a0", "task": "train-1-y", "task_id": "y", "rollout": 0}
    rows = [
        {**FIRST, **OF_RECORD}, {**SECOND, **OF_RECORD}, *other_rows(),
        {**FIRST, **OF_RECORD, **elsewhere},
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["import", "rows.jsonl", "--run_name", database.name]
    assert await asyncio.to_thread(main, command) == 0
    return database.name


async def shown(capsys: pytest.CaptureFixture[str], run: str, *words: str) -> str:
    capsys.readouterr()
    assert await asyncio.to_thread(main, ["show", run, *words]) == 0
    return capsys.readouterr().out


async def test_tokens_are_a_line_each_with_what_is_known_of_them(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (await shown(capsys, run, ONE, "--tokens")).splitlines()
    assert lines[0].split() == ["place", "id", "mask", "logprob", "advantage", "version", "text"]
    assert lines[2].split() == ["0", "1", "0", "'[1]'"], "of a prompt only the mask"
    assert [line.split() for line in lines[5:7]] == [
        ["3", "10", "1", "-0.5000", "+0.5000", "4", "'[10]'"],
        ["4", "11", "1", "-0.2500", "+0.5000", "4", "'[11]'"],
    ]
    [segment] = [at for at, line in enumerate(lines) if "segment 1" in line]
    assert "the first 3 tokens are those of" in lines[segment]
    assert [line.split()[:2] for line in lines[segment + 1 :]] == [["3", "30"], ["4", "14"]]


async def test_tokens_that_a_step_trained_have_the_trainers_logprob_and_the_ratio(
    run: str, capsys: pytest.CaptureFixture[str], database: RunDatabase
) -> None:
    mark = {"step": 1, "trainer": "t", "fence": 1, "logprobs": pack_floats([-1.0] * 5)}
    await database.rows.update_one({"_id": ONE}, {"$set": {"trained": [mark]}})
    lines = (await shown(capsys, run, ONE, "--tokens")).splitlines()
    assert lines[0].split()[2:6] == ["mask", "logprob", "trainer", "ratio"]
    assert lines[5].split()[2:6] == ["1", "-0.5000", "-1.0000", "0.6065"]


async def test_a_trajectory_is_json_with_its_turns_and_tokens(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads(await shown(capsys, run, ONE, "--tokens", "--json"))
    assert record["id"] == ONE and record["right_answer"] == "46"
    assert [turn["output_ids"] for turn in record["turns"]] == [[10, 11], [12, 13], [14]]
    assert record["turns"][0]["tool_calls"][0]["result"] == "46 <i>parts</i>"
    assert record["tokens"][1]["values"] == {
        "logprob": [-1, -0.125], "version": [4, 5], "mask": [1, 1], "advantage": [-0.25, -0.25],
    }  # fmt: skip
    assert "tokens" not in json.loads(await shown(capsys, run, ONE, "--json"))["turns"][0]


async def test_a_note_of_the_pages_is_shown_with_its_record(
    run: str, database: RunDatabase, mongod: EmbeddedMongod, capsys: pytest.CaptureFixture[str]
) -> None:
    await write_note(database, ONE, "counts twice", ["good", "odd"], None)
    assert "note [good] [odd]: counts twice" in await shown(capsys, run, ONE)
    note = json.loads(await shown(capsys, run, ONE, "--json"))["note"]
    assert note["text"] == "counts twice" and note["labels"] == ["good", "odd"]
    assert json.loads(await shown(capsys, run, OTHER, "--json"))["note"] is None
    host = mongod.url.partition("/?")[0]

    def tables() -> tuple[list[str], list[str]]:
        with agentrl.open_run(f"{host}/{run}?directConnection=true") as opened:
            [written] = opened.notes().to_pylist()
            assert (written["id"], written["labels"]) == (ONE, ["good", "odd"])
            assert written["text"] == "counts twice" and opened.notes([OTHER]).num_rows == 0
            with_label, without = opened.records("label=good"), opened.records("label!=good")
        return with_label["id"].to_pylist(), without["id"].to_pylist()

    with_label, without = await asyncio.to_thread(tables)
    assert with_label == [ONE] and OTHER in without and ONE not in without


async def test_lists_and_failures_are_json_in_the_same_order_and_number(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    worst = json.loads(await shown(capsys, run, "--worst", "--count", "2", "--json"))
    assert len(worst) == 2
    assert worst[0]["id"] == OTHER and worst[0]["scores"] == {"exact_match": 0.0}
    best = json.loads(await shown(capsys, run, "--best", "--where", "task_id=x", "--json"))
    assert [record["score"] for record in best] == [1.0, 0.0]
    failures = json.loads(await shown(capsys, run, "--failed", "--json"))
    assert failures == {"n_tasks": 0, "tasks": [], "n_quarantined": 0, "quarantined": []}


async def test_two_records_of_a_task_are_compared_from_where_they_part(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = await shown(capsys, run, "--diff", ONE, OTHER)
    assert "the same up to here: 3 parts, 1 turns of the model" in text
    assert "after 8 equal tokens: '[13]' (id 13, logprob -0.125) against '[15]'" in text
    assert "forty-six" in text and "forty-nine" in text and "let me look" not in text
    assert "(it had ended)" in text
    found = json.loads(await shown(capsys, run, "--diff", ONE, OTHER, "--json"))
    assert [record["score"] for record in found["records"]] == [1.0, 0.0]
    assert [said["role"] for said in found["common"]] == ["user", "assistant", "call"]
    assert [side[0]["text"] for side in found["after"]] == ["forty-six", "forty-nine"]
    assert found["parting"]["same"] == 8
    assert [token["advantage"] for token in found["parting"]["tokens"]] == [-0.25, -0.25]
    same = await shown(capsys, run, "--diff", ONE, ONE)
    assert "nothing differs" in same and "against" not in same


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--diff", ONE, "train-1-y-t0-a0"], "give two records of one task"),
        (["--diff", ONE, "nobody"], "has no record 'nobody'"),
        (["no\udcffbody"], "has no record"),
        (["--count", "9" * 20], "is no number of records"),
        (["--count", "9" * 5000], "is no number of records"),
        (["--where", '{"$where": "sleep(1e6)"}'], "$where would run JavaScript"),
        (["--list", "--tokens"], "--tokens prints those of one record"),
        (["--diff", ONE, OTHER, "--count", "2"], "leave out the id, --diff or --failed"),
    ],
)
async def test_what_cannot_be_shown_is_one_sentence(
    run: str, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert await asyncio.to_thread(main, ["show", run, *words]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
