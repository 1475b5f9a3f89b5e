"""A whole run through every real part, with parts of it killed on the way."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
from pymongo import MongoClient
from pymongo.database import Database
from stored_rows import assert_logprobs_are_the_models, assert_rows_are_their_turns

from agentrl.databases.mongod import EmbeddedMongod

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "assets" / "demo" / "model"
STEPS, ROWS_PER_STEP, SAVE_STEPS = 8, 16, 2
KILLED_AT = 4  # the step after which the trainer is killed: past a checkpoint, before the end
HELD_OUT, EVAL_ATTEMPTS = 8, 2
pytestmark = pytest.mark.timeout(420)

Documents = Database[dict[str, Any]]


@dataclass(frozen=True)
class FinishedRun:
    """A run that was killed twice and brought to its end."""

    name: str
    output: Path
    first_status: int
    first_message: str
    refusal: "subprocess.CompletedProcess[str]"
    second: "subprocess.CompletedProcess[str]"
    database: Documents

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.output / "metrics.jsonl").open()]


def launch_command(name: str, output: Path, held_out: Path) -> list[str]:
    return [
        sys.executable, "-m", "agentrl.cli", "launch", "grpo", name,
        "--output_dir", str(output), "--eval_file", str(held_out),
        "--per_device_train_batch_size", str(ROWS_PER_STEP), "--max_steps", str(STEPS),
        "--save_steps", str(SAVE_STEPS), "--eval_steps", "1000",
        "--eval_rollouts", str(EVAL_ATTEMPTS), "--lease_seconds", "4",
    ]  # fmt: skip


def processes_of(name: str, what: str) -> list[psutil.Process]:
    """The processes whose command line has the run's name and `what`, without their guards."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if name in line and what in line[:4]:
            found.append(process)
    return found


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str], what: str) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert process.poll() is None, f"the launch ended before {what}"
        assert time.monotonic() < deadline, f"no {what} within 180 s"
        time.sleep(0.05)


def steps_done(output: Path) -> int:
    path = output / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def leased_slots(name: str, output: Path) -> int:
    """How many attempts are being worked on."""
    port = output / "mongo" / "port"
    if not port.exists():
        return 0
    url = f"mongodb://127.0.0.1:{port.read_text()}/?directConnection=true"
    with MongoClient[dict[str, Any]](url) as client:
        tasks = client[name]["tasks"].find({"slots.status": "leased"}, {"slots.status": 1})
        return sum(slot["status"] == "leased" for task in tasks for slot in task["slots"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FinishedRun]:
    """Launch; kill -9 the sampler at work, then the trainer; launch again to the end."""
    folder = tmp_path_factory.mktemp("run")
    name, output = f"test-{uuid4().hex[:8]}", folder / "output"
    held_out = folder / "heldout.jsonl"
    lines = (ROOT / "assets" / "demo" / "heldout.jsonl").read_text().splitlines()
    held_out.write_text("\n".join(lines[:HELD_OUT]))
    command = launch_command(name, output, held_out)
    first = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        wait_for(lambda: leased_slots(name, output) >= 4, first, "leased slots")
        (sampler,) = processes_of(name, "sample")
        sampler.kill()
        refusal = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60)
        wait_for(lambda: steps_done(output) >= KILLED_AT, first, f"step {KILLED_AT}")
        (trainer,) = processes_of(name, "agentrl.launcher.accelerate")
        trainer.kill()
        message, _ = first.communicate(timeout=60)
    finally:
        if first.poll() is None:
            first.terminate()
            first.wait(60)
    second = subprocess.run(
        [*command, "--learning_rate", "4e-4"], cwd=ROOT, text=True, capture_output=True, timeout=300
    )
    mongod = EmbeddedMongod(output / "mongo", folder / "mongod.log")
    with mongod, MongoClient[dict[str, Any]](mongod.url) as client:
        yield FinishedRun(name, output, first.returncode, message, refusal, second, client[name])
    for log in (ROOT / "logs" / "as").glob(f"{name}_*"):
        log.unlink()


@pytest.mark.slow
def test_a_launch_on_other_data_is_refused_and_other_flags_are_taken_and_said(
    run: FinishedRun,
) -> None:
    held_out = run.output.parent / "heldout.jsonl"
    other_data = subprocess.run(
        [*launch_command(run.name, run.output, held_out), "--train_file", str(held_out)], cwd=ROOT,
        text=True, capture_output=True, timeout=60,
        env={**os.environ, "MCP_URL": "http://127.0.0.1:9/mcp"},
    )  # fmt: skip
    assert other_data.returncode == 2
    for said in ("--train_file was ", "the demo's tools and has tools given", "--change_data"):
        assert said in other_data.stderr
    resumed = int(run.first_message.split("resumes from checkpoint-")[1].split()[0].strip(".;"))
    assert f"--learning_rate 5e-4 → 4e-4 (since step {resumed})" in run.second.stdout
    rates = {line["step"]: line["learning_rate"] for line in run.metrics()}
    assert rates == {step: 5e-4 if step <= resumed else 4e-4 for step in range(1, STEPS + 1)}


def test_a_killed_trainer_ends_the_launch_with_a_sentence_and_the_next_one_goes_on(
    run: FinishedRun,
) -> None:
    assert run.first_status == 1
    assert "trainer" in run.first_message and "resumes from checkpoint-" in run.first_message
    assert run.second.returncode == 0, run.second.stdout + run.second.stderr
    assert [line["step"] for line in run.metrics()] == list(range(1, STEPS + 1))


def test_a_second_launch_of_a_live_run_is_refused(run: FinishedRun) -> None:
    assert run.refusal.returncode == 2
    assert run.name in run.refusal.stderr or str(run.output) in run.refusal.stderr
    assert "Traceback" not in run.refusal.stderr


def test_nothing_is_left_running(run: FinishedRun) -> None:
    own = {os.getpid(), os.getppid()}
    left = [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline"])
        if process.pid not in own and run.name in " ".join(process.info["cmdline"] or [])
    ]
    assert left == []


def test_the_summary_says_what_the_database_says(run: FinishedRun) -> None:
    summary = json.loads((run.output / "summary.json").read_text())
    assert set(summary) == {
        "steps", "seconds", "eval_before", "eval_after", "reward_first", "reward_last", "slots",
        "rows", "max_staleness", "tokens", "conversations", "eval_file", "quarantined",
    }  # fmt: skip
    rows = Counter(row["status"] for row in run.database["record_data"].find({}, {"status": 1}))
    assert summary["steps"] == STEPS
    assert summary["rows"]["trained"] == rows["trained"] == STEPS * ROWS_PER_STEP
    assert summary["rows"]["evicted"] == rows["evicted"]
    assert summary["max_staleness"] <= 2
    assert summary["slots"]["failed"] == 0
    held = summary["conversations"]
    assert 0 < held["segments"] <= held["records"]  # some had not begun when it ended
    assert held["continuations"] > 0 == held["drifts"]
    assert 0 <= summary["eval_before"] <= 1 and 0 <= summary["eval_after"] <= 1
    assert (run.output / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_every_slot_ends_in_exactly_one_terminal_state(run: FinishedRun) -> None:
    records = {record["_id"]: record for record in run.database["records"].find()}
    ended = 0
    for task in run.database["tasks"].find({"status": "completed"}):
        for slot in task["slots"]:
            assert slot["status"] == "completed"  # nothing here fails for good
            record = records[slot["record"]]
            assert record["score"] == slot["score"]
            expected = {"scored"} if task["split"] == "eval" else {"ready", "abandoned"}
            assert record["status"] in expected
            ended += 1
    assert not [r for r in records.values() if r["status"] == "sampling"]
    finished = [r for r in records.values() if r["status"] in ("scored", "ready", "abandoned")]
    unfinished_groups = run.database["tasks"].count_documents(
        {"status": {"$in": ["running", "finalising"]}, "split": "eval"}
    )
    assert ended > 0 and unfinished_groups == 0
    assert len({(r["task"], r["rollout"]) for r in finished}) == len(finished) >= ended


def test_every_trained_row_is_trained_once_along_the_lineage(run: FinishedRun) -> None:
    steps = Counter[int]()
    for row in run.database["record_data"].find({"status": "trained"}):
        assert len(row["trained"]) == 1
        steps[row["trained"][0]["step"]] += 1
    assert steps == dict.fromkeys(range(1, STEPS + 1), ROWS_PER_STEP)


def test_what_is_trained_is_what_was_sampled(run: FinishedRun) -> None:
    checked = assert_rows_are_their_turns(run.database)
    assert checked >= STEPS * ROWS_PER_STEP


def test_the_sampled_logprobs_are_the_models_and_the_first_ratios_are_1(run: FinishedRun) -> None:
    assert assert_logprobs_are_the_models(run.database, MODEL) > 100
    first = run.metrics()[0]
    assert first["staleness_max"] == 0
    assert abs(first["ratio_min"] - 1) < 1e-4 and abs(first["ratio_max"] - 1) < 1e-4


def test_the_killed_samplers_attempts_were_made_by_another(run: FinishedRun) -> None:
    owners = {record["owner"] for record in run.database["records"].find({}, {"owner": 1})}
    assert len(owners) >= 3  # the killed one, its replacement, the second launch's
    retried = run.database["records"].count_documents({"attempt": {"$gte": 1}})
    assert retried > 0


def test_the_finished_run_is_said_to_be_finished(run: FinishedRun) -> None:
    command = launch_command(run.name, run.output, run.output.parent / "heldout.jsonl")
    again = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert again.returncode == 0
    assert "is finished" in again.stdout and "eval_example.sh" in again.stdout


@pytest.mark.slow
def test_a_signal_stops_a_launch_in_order_with_a_checkpoint_and_without_tracebacks(
    tmp_path: Path,
) -> None:
    name, output = f"test-{uuid4().hex[:8]}", tmp_path / "output"
    held_out = tmp_path / "heldout.jsonl"
    held_out.write_text((ROOT / "assets" / "demo" / "heldout.jsonl").read_text().split("\n")[0])
    process = subprocess.Popen(
        [*launch_command(name, output, held_out), "--save_steps", "100"], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_for((output / "launch.json").exists, process, "the launch's record")
    recorded_at = time.monotonic()
    wait_for(lambda: steps_done(output), process, "a step")
    at_work = time.monotonic() - recorded_at
    process.send_signal(signal.SIGINT)
    message, _ = process.communicate(timeout=90)
    assert process.returncode == 130
    # No checkpoint was there when the signal came: the stop saved one.
    last = message.splitlines()[-1]
    saved = re.fullmatch(
        r"stopped by SIGINT; saved: checkpoint-(\d+) in (\S+), (\d+) trajectories stored by this "
        r"launch; the same command resumes from checkpoint-(\d+)",
        last,
    )
    assert saved is not None, last
    assert saved[1] == saved[4] and Path(saved[2]) == output
    assert int(saved[1]) == steps_done(output)
    assert int(saved[3]) >= ROWS_PER_STEP
    assert not processes_of(name, "sample")
    before = json.loads((output / "launch.json").read_text())["seconds"]
    assert before >= at_work > 0, "the next launch counts on from here"
    for log in (ROOT / "logs" / "as").glob(f"{name}_*"):
        assert "Traceback" not in log.read_text(), log
        log.unlink()


@pytest.mark.slow
def test_synchronous_sampling_trains_only_what_the_current_policy_sampled(tmp_path: Path) -> None:
    name, held_out = f"test-{uuid4().hex[:8]}", tmp_path / "heldout.jsonl"
    held_out.write_text((ROOT / "assets" / "demo" / "heldout.jsonl").read_text().split("\n")[0])
    command = launch_command(name, tmp_path / "output", held_out)
    result = subprocess.run(
        [*command, "--sync_sampling", "true", "--max_steps", "4"], cwd=ROOT, text=True,
        capture_output=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [json.loads(line) for line in (tmp_path / "output" / "metrics.jsonl").open()]
    assert [line["staleness_max"] for line in lines] == [0] * 4
    assert all(abs(line["ratio_max"] - 1) < 1e-4 for line in lines)
    for log in (ROOT / "logs" / "as").glob(f"{name}_*"):
        log.unlink()
