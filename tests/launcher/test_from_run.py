"""`agentrl sft` and `agentrl dpo` with `--from_run`: a run's own trajectories."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from pymongo import MongoClient

from agentrl.cli import main
from agentrl.databases.documents import DBRecordData
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.token_tree import TokenTree
from agentrl.databases.tree_file import TreeFile
from agentrl.launcher.run_pairs import pairs_of_groups

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "assets" / "demo" / "model"


def test_a_run_that_is_not_there_and_conditions_without_one_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DB_URL", raising=False)
    given = ["sft", "--model", str(DEMO)]

    def said(*flags: str) -> str:
        assert main([*given, *flags]) == 2
        return capsys.readouterr().err

    assert "run 'nobody' has no database" in said("--from_run", "nobody")
    assert "a Record has no field 'goodness'" in said(
        "--from_run", "nobody", "--where", "goodness>1"
    )
    rows = ("--train_file", "rows.jsonl")
    assert "--where chooses trajectories of --from_run" in said(*rows, "--where", "score>=1")
    assert "not allowed with" in said(*rows, "--from_run", "nobody")
    assert "--train_file --from_run" in said()


@pytest.fixture(scope="module")
def run() -> Iterator[str]:
    """Two steps of the demo."""
    name = f"test-{uuid4().hex[:8]}"
    command = [
        sys.executable, "-m", "agentrl.cli", "launch", "grpo", name, "--max_steps", "2",
        "--per_device_train_batch_size", "16", "--eval_steps", "1000", "--eval_rollouts", "1",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    yield name
    shutil.rmtree(ROOT / "output" / name)
    for log in (ROOT / "logs" / "as").glob(f"{name}_*"):
        log.unlink()


def supervised(verb: str, run: str, output: Path, *flags: str, status: int = 0) -> str:
    """What `agentrl VERB` says of training the demo's model on a run."""
    command = [
        sys.executable, "-m", "agentrl.cli", verb, "--model", str(DEMO), "--from_run", run,
        "--output_dir", str(output), "--per_device_train_batch_size", "8", "--use_cpu", *flags,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, text=True, capture_output=True, timeout=240,
        env={**os.environ, "NUM_PROCESSES": "1"},
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def rows_in(output: Path) -> TreeFile:
    """The rows that a command has prepared."""
    [made] = [path for path in (output / "rows").iterdir() if path.is_dir()]
    return TreeFile(made)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_right_trajectories_are_trained_with_the_tokens_that_were_sampled(
    run: str, tmp_path: Path
) -> None:
    def sft(*flags: str, status: int = 0) -> str:
        return supervised("sft", run, tmp_path / "sft", *flags, status=status)

    folder = ROOT / "output" / run
    with (
        EmbeddedMongod(folder / "mongo", tmp_path / "mongod.log") as mongod,
        MongoClient(mongod.url) as client,
    ):
        right = {
            record["_id"]
            for record in client[run]["records"].find({"split": "train", "score": {"$gte": 1}})
        }
        stored = {
            row["_id"]: DBRecordData.from_mongo(row) for row in client[run]["record_data"].find()
        }
        completed = {
            record: {
                turn["status"]
                for turn in client[run]["dispatched_sampling_tasks"].find({"record_id": record})
            }
            == {"completed"}
            for record in right
        }

    text = sft("--max_steps", "2")
    assert f"run {run}: {len(right):,} rows" in text
    rows = rows_in(tmp_path / "sft")
    records = [rows.place(number).removeprefix("record ") for number in range(len(rows))]
    assert set(records) == right
    compared = 0
    for number, record in enumerate(records):
        tree = rows[number]
        assert np.array_equal(tree["advantages"], tree["mask"])
        if record in stored:
            of_run = stored[record].tree
            assert np.array_equal(tree["ids"], of_run["ids"])
            if completed[record]:
                assert np.array_equal(tree["mask"], of_run["mask"])
                compared += 1
    assert compared
    metrics = (tmp_path / "sft" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [1, 2]
    assert (tmp_path / "sft" / "model" / "config.json").is_file()

    assert "it has no finished record with score>7" in sft("--where", "score>7", status=2)
    other = tmp_path / "other"
    shutil.copytree(DEMO, other)
    with (other / "tokenizer_config.json").open("a") as file:
        file.write("\n")
    assert "is not that of the run's model" in sft("--model", str(other), status=2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_best_of_a_group_is_trained_against_its_worst(run: str, tmp_path: Path) -> None:
    with (
        EmbeddedMongod(ROOT / "output" / run / "mongo", tmp_path / "mongod.log") as mongod,
        MongoClient(mongod.url) as client,
    ):
        finished = {"split": "train", "finished_at": {"$ne": None}, "status": {"$ne": "failed"}}
        expected, alike = pairs_of_groups([*client[run]["records"].find(finished)], None)
        stored = {
            row["_id"]: DBRecordData.from_mongo(row).tree
            for row in client[run]["record_data"].find()
        }
    out = tmp_path / "pairs.jsonl"
    export = [
        sys.executable, "-m", "agentrl.cli", "export-data", run, "--format", "preferences", "--to",
        "jsonl", "--out", str(out),
    ]  # fmt: skip
    subprocess.run(export, cwd=ROOT, check=True, timeout=100)
    exported = [json.loads(line) for line in out.read_text().splitlines()]
    found = {row["task"]: (row["chosen_record"], row["rejected_record"]) for row in exported}
    assert found == expected, "both commands make pairs of the same trajectories"
    text = supervised("dpo", run, tmp_path / "dpo", "--max_steps", "1")
    assert f"run {run}: {len(expected):,} pairs" in text
    assert not alike or f"{len(alike)} pairs are left out" in text
    rows, compared = rows_in(tmp_path / "dpo"), 0
    groups = [rows.place(number).removeprefix("group ") for number in range(len(rows))]
    assert set(groups) == expected.keys()
    for number, group in enumerate(groups):
        pair = rows[number]
        assert pair.parents.count(-1) == 1, "siblings share their prompt"
        best, worst = expected[group]
        for record in {best, worst} & stored.keys():
            assert lines_of(stored[record]) <= lines_of(pair)
            compared += 1
        if worst in stored:
            assert (pair["advantages"] == -1).sum() == stored[worst]["mask"].sum()
    assert compared


def lines_of(tree: TokenTree) -> set[bytes]:
    """The tokens of each path."""
    return {tree["ids"][tree.places(path)].tobytes() for path in tree.paths()}
