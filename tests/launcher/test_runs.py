"""Runs as things: listed from their folders, deleted with all that is theirs and nothing else."""

import io
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.asynchronous.collection import AsyncCollection

from agentrl import cli
from agentrl.databases.connection import COLLECTIONS, RunDatabase
from agentrl.databases.documents import Run
from agentrl.databases.mongod import EmbeddedMongod, MongodError
from agentrl.databases.mongod_lock import opened_by
from agentrl.launcher.run_folder import LaunchRecord, RunLock, write_launch
from agentrl.launcher.run_state import read_run


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, and no MongoDB in the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DB_URL", raising=False)
    (tmp_path / "logs/as").mkdir(parents=True)
    return tmp_path


def make_run(
    name: str, *, step: int, status: int | None, most: int = 4, ended: str = "", processes: int = 1
) -> Path:
    """A run's folder as launch and trainer leave it, with a database of its own."""
    folder = Path("output") / name
    (folder / "mongo").mkdir(parents=True)
    (folder / "mongo" / "WiredTiger.wt").write_bytes(os.urandom(300_000))
    write_launch(
        folder,
        LaunchRecord("grpo", ["--max_steps", "2", f"--max_steps={most}"], status=status,
                     ended=ended, held_out=[0.25, 0.5]),
    )  # fmt: skip
    lines = [json.dumps({"step": n + 1}) + "\n" for n in range(step)]
    (folder / "metrics.jsonl").write_text("".join(lines) + '{"st')
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir()
    for file in (".metadata", "__0_0.distcp"):
        (checkpoint / file).write_text("x")
    state = {"step": step, "processes": processes, "config": {}}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    for name in ("v0", "v1.partial", "probe-0123abcd"):  # with what a crash has left
        (folder / "weights" / name).mkdir(parents=True)
    return folder


class Command:
    """`agentrl` called in this process; in a thread, because tests have a loop of their own."""

    def __init__(self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capfd, self._monkeypatch = capfd, monkeypatch

    def __call__(self, *arguments: str, typed: str = "") -> tuple[int, str, str]:
        """Status, output and errors."""
        self._monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        self._capfd.readouterr()
        with ThreadPoolExecutor(1) as thread:
            status = thread.submit(cli.main, list(arguments)).result()
        return status, *self._capfd.readouterr()

    def listed(self, *flags: str) -> dict[str, dict[str, Any]]:
        """What `agentrl runs` lists, by name."""
        status, printed, _ = self("runs", "--json", *flags)
        assert status == 0
        return {row["name"]: row for row in json.loads(printed)}


@pytest.fixture
def agentrl(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(capfd, monkeypatch)


def test_each_run_is_listed_with_its_state_by_what_is_in_its_folder(
    agentrl: Command,
) -> None:
    done = make_run("done", step=4, status=0)
    summary = {"steps": 4, "eval_before": 0.25, "eval_after": 0.75}
    (done / "summary.json").write_text(json.dumps(summary))
    more = make_run("more", step=6, status=130, most=8)  # went on after its report
    (more / "summary.json").write_text(json.dumps(summary))
    make_run("failed", step=1, status=1, ended="the tools went away")
    make_run("killed", step=3, status=None)
    make_run("half", step=2, status=0, processes=2)  # one process's part is not there
    garbled = make_run("garbled", step=2, status=0)
    (garbled / "launch.json").write_text("{")
    Path("output/other").mkdir()
    Path("output/other/notes.txt").write_text("no run")
    live = make_run("live", step=1, status=None)
    with RunLock(live):
        rows = agentrl.listed()
    assert {name: row["state"] for name, row in rows.items()} == {
        "done": "finished", "more": "stopped", "failed": "failed", "killed": "stopped",
        "half": "broken", "garbled": "broken", "live": "live",
    }  # fmt: skip
    assert str(os.getpid()) in rows["live"]["note"]
    assert rows["failed"]["note"] == "the tools went away"
    assert rows["killed"]["note"] == "killed; resumes from checkpoint-3"
    assert rows["half"]["note"] == "checkpoint-2 has no __1_0.distcp"
    assert "launch.json" in rows["garbled"]["note"]
    assert (rows["more"]["step"], rows["more"]["max_steps"]) == (6, 8)
    assert (rows["done"]["before"], rows["done"]["after"]) == (0.25, 0.75)
    assert (rows["killed"]["before"], rows["killed"]["after"]) == (0.25, 0.5)
    assert rows["done"]["bytes"] > 300_000 and rows["done"]["database"] == "embedded"
    _, printed, _ = agentrl("runs")
    assert "4/4" in printed and "0.25 → 0.75" in printed and "output/done" in printed


def test_a_run_of_evaluations_has_no_steps_and_the_success_of_the_last_one(
    agentrl: Command,
) -> None:
    folder = Path("output/eval")
    (folder / "eval").mkdir(parents=True)
    write_launch(folder, LaunchRecord("eval", ["--run_name", "eval"], status=0))
    for number, (model, success) in enumerate((("old/model", 0.25), ("new/model", 0.75))):
        report = folder / "eval" / f"model-{number}.json"
        found = {"mean": success, "low": 0.1, "high": 0.9}
        report.write_text(
            json.dumps({"checkpoint": model, "task_file": "held.jsonl", "pass_at": {"1": found}})
        )
        os.utime(report, (1000 + number, 1000 + number))
    status, printed, _ = agentrl("runs")
    assert status == 0
    [line, note] = printed.splitlines()[1:]
    assert line.split()[:4] == ["eval", "finished", "-", "0.75"]
    assert note == "eval: 2 evaluations, the last: new/model on held.jsonl"


def test_a_supervised_run_is_finished_at_the_end_of_its_steps_or_epochs(agentrl: Command) -> None:
    for name, step, epoch, most in (
        ("by_epochs", 6, 2.0, 0), ("half_way", 3, 1.0, 0), ("by_steps", 4, 0.5, 4),
        ("early", 2, 3.0, 4),
    ):  # fmt: skip
        folder = make_run(name, step=step, status=0)
        (folder / "launch.json").unlink()
        (folder / "rows").mkdir()
        (folder / "metrics.jsonl").write_text(json.dumps({"step": step, "epoch": epoch}) + "\n")
        config = {"optimizer": {"max_steps": most}, "data": {"num_train_epochs": 2}}
        state = {"step": step, "processes": 1, "config": config}
        (folder / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    rows = agentrl.listed()
    assert {name: (row["state"], row["note"]) for name, row in rows.items()} == {
        "by_epochs": ("finished", ""), "by_steps": ("finished", ""),
        "half_way": ("stopped", "resumes from checkpoint-3"),
        "early": ("stopped", "resumes from checkpoint-2"),
    }  # fmt: skip


async def add_stored_run(database: RunDatabase, *, live: bool) -> None:
    lease = datetime.now(UTC) + timedelta(seconds=60 if live else -60)
    run = Run(id=database.name, status="training", trainer="t", trainer_host="far", step=3,
              max_steps=9, lease_expires=lease, heartbeat=datetime.now(UTC))  # fmt: skip
    await database.runs.insert_one(run.to_mongo())


async def test_runs_of_a_mongodb_are_listed_and_a_live_one_is_not_deleted(
    database: RunDatabase, mongod: EmbeddedMongod, agentrl: Command
) -> None:
    await add_stored_run(database, live=True)
    flags = ["--db_connection_string", mongod.url]
    before = await database.client.list_database_names()
    row = agentrl.listed(*flags)[database.name]
    assert (row["state"], row["step"], row["max_steps"]) == ("live", 3, 9)
    assert "far" in row["note"] and row["folder"] is None
    assert await database.client.list_database_names() == before
    status, _, refusal = agentrl("delete", database.name, *flags, "--yes")
    assert status == 2 and f"run '{database.name}' is live" in refusal
    assert await database.runs.count_documents({}) == 1


async def test_a_deleted_run_takes_its_database_along_but_not_what_others_keep_there(
    database: RunDatabase, mongod: EmbeddedMongod, agentrl: Command
) -> None:
    await add_stored_run(database, live=False)
    folder = Path("output") / database.name
    folder.mkdir(parents=True)
    write_launch(folder, LaunchRecord("grpo", ["--db_connection_string", mongod.url], status=0))
    await database.database["my_notes"].insert_one({"a": 1})
    status, printed, _ = agentrl("delete", database.name, "--yes")
    assert status == 0 and "not the run's: my_notes" in printed
    assert await database.database.list_collection_names() == ["my_notes"]
    assert not folder.exists()
    await add_stored_run(database, live=False)
    await database.database.drop_collection("my_notes")
    status, printed, _ = agentrl(
        "delete", database.name, "--db_connection_string", mongod.url, "--yes"
    )
    assert status == 0 and f"database {database.name} at" in printed
    assert database.name not in await database.client.list_database_names()


async def test_every_collection_of_a_run_is_known_to_be_one(database: RunDatabase) -> None:
    names = [name for name in vars(RunDatabase) if not name.startswith("_")]
    values = [getattr(database, name) for name in names]
    assert {value.name for value in values if isinstance(value, AsyncCollection)} == COLLECTIONS


def test_only_what_the_run_wrote_is_deleted_and_no_link_is_followed(
    tmp_path: Path, agentrl: Command
) -> None:
    folder = make_run("mine", step=2, status=0)
    far = tmp_path / "far"
    far.mkdir()
    (far / "precious").write_text("x")
    (folder / "checkpoint-1").symlink_to(far)
    (folder / "notes.txt").write_text("x")
    (folder / "checkpoint-9").mkdir()  # of another program
    (folder / "checkpoint-9" / "trainer_state.json").write_text("{}")
    (folder / "eval").mkdir()
    (folder / "eval" / "checkpoint-2-held.json").write_text("{}")
    (folder / "eval" / "by-hand.csv").write_text("x")
    logs = tmp_path / "logs" / "as"
    for log in ("mine_train_0", "mine_serve-1", "mine_too_train_0", "mine_notes"):
        (logs / f"{log}.log").write_text("x")
    for typed in ("y\nmime\n", "no\n", "y\n", ""):
        status, printed, _ = agentrl("delete", "mine", typed=typed)
        assert status == 1 and "nothing is deleted" in printed
    assert (folder / "mongo").is_dir()
    with RunLock(folder):
        status, _, refusal = agentrl("delete", "mine", "--yes")
        assert status == 2 and "run 'mine' is live" in refusal
    status, printed, _ = agentrl("delete", "mine", typed="y\nmine\n")
    assert status == 0 and "not the run's: checkpoint-9, eval, notes.txt" in printed
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    assert left == ["checkpoint-9", "checkpoint-9/trainer_state.json", "eval", "eval/by-hand.csv",
                    "notes.txt"]  # fmt: skip
    assert (far / "precious").exists()
    assert sorted(log.name for log in logs.iterdir()) == ["mine_notes.log", "mine_too_train_0.log"]
    status, _, refusal = agentrl("delete", "mine", "--yes")
    assert status == 2 and "nothing in output/mine" in refusal


def test_an_open_database_is_held_for_compass_and_closed_in_order(
    tmp_path: Path, agentrl: Command
) -> None:
    folder = Path("output/held")
    with (
        EmbeddedMongod(folder / "mongo", tmp_path / "log") as server,
        MongoClient[dict[str, object]](server.url) as client,
    ):
        client["held"]["records"].insert_one({"_id": "a"})
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl.cli", "db", "held"], text=True, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix("for MongoDB Compass: ").strip()
        assert process.stdout.readline() == "open until Ctrl-C\n"
        with MongoClient[dict[str, object]](url) as client:
            assert client.get_default_database()["records"].find_one() == {"_id": "a"}
        status, _, refusal = agentrl("delete", "held", "--yes")
        assert status == 2 and "is open" in refusal
        holder = f"`agentrl db` (process {process.pid})"
        assert opened_by(folder / "mongo") == holder
        for timeout in (0.0, 2.0):  # the deadline is before mongod finds the lock, or after it
            with pytest.raises(MongodError, match=re.escape(f"{holder} has the database in ")):
                EmbeddedMongod(folder / "mongo", tmp_path / "log").start(timeout_s=timeout)
        process.terminate()
        rest, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, rest) == (0, "closed\n")
    lock = folder / "mongo" / "mongod.lock"
    assert lock.read_bytes() == b"", "mongod ended in order"


def test_looking_at_a_run_does_not_make_it_a_new_one() -> None:
    folder = make_run("old", step=4, status=0)
    hour_ago = datetime.now(UTC).timestamp() - 3600
    for part in (*folder.iterdir(), folder):
        os.utime(part, (hour_ago, hour_ago))
    (folder / "mongo" / "mongod.lock").touch()  # as `agentrl show` does
    row = read_run(folder)
    assert row is not None
    assert row.changed == pytest.approx(hour_ago, abs=1)
