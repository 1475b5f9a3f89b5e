"""The pages of a finished run and of a live one in a real browser, against the run's database."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from demo_launch import launch_demo
from ports import free_port
from pymongo import MongoClient
from two_segments import FIRST, OF_RECORD, SECOND

from agentrl.cli import main as cli
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.launcher.database import embedded_url
from agentrl.launcher.deployment import REPOSITORY
from agentrl.launcher.run_folder import RunLock

Found = dict[str, dict[str, Any]]
VISIT = Path(__file__).with_name("visit.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of the demo."""
    folder = tmp_path_factory.mktemp("run")
    flags = ("--max_steps", str(STEPS), "--eval_rollouts", "1", "--log_entropy")
    done = launch_demo(folder, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@contextmanager
def viewer(folder: Path, run: str) -> Iterator[str]:
    """The address that `agentrl view` prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl.cli", "view", run, "--port", str(free_port())],
        cwd=folder, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("open http://"), line + process.stdout.read()
        yield line.split()[1]
    finally:
        process.terminate()
        assert process.wait(timeout=30) == 0


def visited(
    address: str, visits: Sequence[dict[str, Any]], shots: Path, refused: bool = False
) -> Found:
    """What a browser found, by the names of the visits. `refused`: whether some are, on purpose."""
    done = subprocess.run(
        [os.environ["BROWSER_PYTHON"], str(VISIT), address, str(shots)],
        input=json.dumps(list(visits)), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {each["name"]: each for each in json.loads(done.stdout)}
    for each in found.values():
        assert refused or not each["errors"], each
        assert not each["faults"], each
        assert not each["wide"], f"{each['name']} is wider than the screen"
    return found


def test_what_is_typed_stays_while_a_page_keeps_itself_fresh_and_a_lost_login_is_told(
    mongod: EmbeddedMongod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DB_URL", mongod.url)
    monkeypatch.setitem(ENVIRONMENT, "DB_URL", mongod.url)
    rows = [{**FIRST, **OF_RECORD}, {**SECOND, **OF_RECORD}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli(["import", "rows.jsonl", "--run_name", "typed"]) == 0
    with MongoClient(mongod.url) as client:
        records = client["typed"]["records"]
        records.update_one({}, {"$set": {"status": "sampling"}})
        turns = client["typed"]["dispatched_sampling_tasks"]
        turns.update_one({"turn": 0}, {"$set": {"output_ids": b"\0" * 7}})
        note = "#note input[name=text]"
        visits = [
            {"path": f"/run/typed/records/{OF_RECORD['record']}", "name": "typed",
             "do": [["fill", note, "half a thought"], ["leave", note],
                    ["wait_for", "text=0.125", 30000], ["wait", 3000], ["value", note],
                    ["forget"], ["wait_for", "text=not kept fresh", 10000], ["value", note]]},
            {"path": f"/run/typed/records/{OF_RECORD['record']}", "name": "kept",
             "do": [["fill", note, "a thought"], ["click", "#note button"], ["wait", 500]]},
            {"path": f"/run/typed/records/{OF_RECORD['record']}", "name": "broken",
             "do": [["click", "#tab-tokens"],
                    ["wait_for", "#stream:has-text('ValueError')", 9000]]},
        ]  # fmt: skip

        def score() -> None:
            time.sleep(8)  # the page is open, and the note begun
            records.update_one({}, {"$set": {"score": 0.125}})

        with (
            RunLock(tmp_path / "output/typed"),  # a launch is at work
            viewer(tmp_path, "typed") as address,
            ThreadPoolExecutor(1) as beside,
        ):
            scored = beside.submit(score)
            found = visited(address, visits, tmp_path, refused=True)
            scored.result()
        assert client["typed"]["notes"].find_one()["text"] == "a thought"
        client.drop_database("typed")
    assert found["typed"]["kept"] == ["half a thought", "half a thought"]


def whole_number(text: str) -> int:
    return int(re.sub(r"\D", "", text))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_page_of_a_finished_run_says_what_its_database_says(
    folder: Path, tmp_path: Path
) -> None:
    with (
        EmbeddedMongod(folder / "output/demo/mongo", tmp_path / "mongod.log") as mongod,
        MongoClient(mongod.url) as client,
    ):
        database = client["demo"]
        record = database["records"].find_one({"n_turns": {"$gte": 2}, "status": "ready"})
        row = database["record_data"].find_one({"_id": record["_id"]})
        turns = database["dispatched_sampling_tasks"].count_documents({"record_id": record["_id"]})
        trained = database["record_data"].count_documents({"trained.step": STEPS})
        siblings = database["records"].count_documents({"task": record["task"]})
        uses = list(database["device_use"].find())
        ended = database["records"].count_documents(
            {"split": "train", "finished_at": {"$ne": None}}
        )
        low = database["records"].find({"score": {"$lt": 0.5}, "split": "train"})
        began = [each["started_at"] for each in low.sort("started_at", -1)]
    # A page has the newest 100, and those that began in the same moment as the last of them.
    on_page = sum(moment >= began[:100][-1] for moment in began)
    at = f"/run/demo/records/{record['_id']}"
    visits = [
        {"path": "/", "name": "runs"},
        {"path": "/run/demo", "name": "run", "do": [["count", ".chart canvas"]]},
        {"path": "/run/demo", "name": "phone", "width": 390, "scheme": "dark"},
        {"path": f"/run/demo/steps/{STEPS}", "name": "step", "do": [["count", "tbody tr"]]},
        {"path": "/run/demo/tasks?order=hardest", "name": "tasks"},
        {"path": "/run/demo/records?where=score<0.5", "name": "records",
         "do": [["count", "tbody tr"]]},
        {"path": "/run/demo/records?order=longest", "name": "next",
         "do": [["click", "[rel=next]"], ["wait", 800], ["count", "tbody tr"]]},
        {"path": f"/run/demo/groups/{record['task']}", "name": "group",
         "do": [["count", "article"]]},
        {"path": at, "name": "trajectory", "do": [["count", ".turn"], ["press", "j"],
         ["count", ".turn.chosen"]]},
        {"path": at, "name": "tokens", "do": [["click", "#tab-tokens"], ["wait_for", ".t", 5000],
         ["count", ".t"], ["hover", ".t >> nth=1"], ["text", "#hover"],
         ["choose", "#colour", "entropy"], ["wait", 200], ["text", "#hover"]]},
        {"path": at, "name": "beside", "do": [["press", "l"], ["wait", 800]]},
        {"path": "/run/demo/compare", "name": "compare"},
        {"path": "/run/demo/failures", "name": "failures"},
        {"path": at, "name": "noted", "do": [["click", ".note button"], ["wait", 300]]},
    ]  # fmt: skip
    with viewer(folder, "demo") as address:
        found = visited(address, visits, tmp_path)
    assert found["run"]["kept"][0] >= 8
    assert {use["part"] for use in uses} == {"trainer", "service"}
    hours = sum((use["until"] - use["began"]).total_seconds() * use["cores"] for use in uses) / 3600
    said = re.search(r"core hours ([\d.]+)", found["run"]["text"])
    assert said is not None and float(said[1]) == pytest.approx(hours, abs=0.01) and hours > 0
    assert found["step"]["kept"] == [trained] and trained > 0
    assert found["records"]["kept"] == [on_page]
    assert found["group"]["kept"] == [siblings]
    assert found["trajectory"]["kept"] == [turns, 1]
    n_spans, hover, entropies = found["tokens"]["kept"]
    assert entropies.startswith("0 …") and entropies.endswith("nats")
    assert found["next"]["kept"] == [min(100, ended - 100)]
    assert n_spans == record["tokens"]["generated"]
    assert row["status"] == "trained"
    assert all(name in hover for name in ("logprob", "trainer", "ratio", "entropy", "advantage"))
    assert found["beside"]["path"] != found["trajectory"]["path"]
    assert "records/" in found["beside"]["path"]
    assert f"score\n{record['score']:.3f}" in found["trajectory"]["text"]
    assert "tasks in common" in found["compare"]["text"]
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in found)


def add_record(data: Path) -> float:
    """Add a Record to a run at work, when its page is open; the time at which it was there."""
    time.sleep(10)
    with MongoClient(embedded_url(data)) as client:
        records = client["demo"]["records"]
        latest = records.find_one({"split": "train", "score": {"$ne": None}})
        # Above those that the run adds meanwhile.
        soon = datetime.now(UTC) + timedelta(minutes=1)
        records.insert_one({**latest, "_id": "a-new-record", "started_at": soon})
        return time.time()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_live_run_moves_on_its_page_by_itself(tmp_path: Path) -> None:
    (tmp_path / "assets").symlink_to(REPOSITORY / "assets")
    training = subprocess.Popen(
        [sys.executable, "-m", "agentrl.cli", "launch", "grpo", "demo", "--eval_steps", "0",
         "--max_steps", "400"],
        cwd=tmp_path, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        assert training.stdout is not None
        for line in training.stdout:
            if re.search(r"step=[1-9]", line):  # a line every few seconds, not one a step
                break
        else:
            pytest.fail("the training ended before its first step")
        visits = [
            {"path": "/run/demo/records", "name": "records",
             "do": [["seen", "text=a-new-record", 60000]]},
            {"path": "/run/demo", "name": "live",
             "do": [["text", ".figures div:first-child dd"], ["wait", 30000],
                    ["text", ".figures div:first-child dd"]]},
        ]  # fmt: skip
        with viewer(tmp_path, "demo") as address, ThreadPoolExecutor(1) as beside:
            added = beside.submit(add_record, tmp_path / "output/demo/mongo")
            found = visited(address, visits, tmp_path)
        [seen] = found["records"]["kept"]
        assert seen - added.result() < 2.0
    finally:
        training.terminate()
        training.communicate(timeout=120)
    before, after = (whole_number(text.partition("/")[0]) for text in found["live"]["kept"])
    assert after > before
    assert "training" in found["live"]["text"]
