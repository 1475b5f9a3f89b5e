"""`agentrl sample --model --tasks`: a run without a trainer, and what may be made of it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from demo_launch import demo_lines
from ports import free_port
from pymongo import MongoClient

from agentrl.cli import main
from agentrl.configs import ConfigError
from agentrl.configs.parsing import config_of
from agentrl.configs.verbs import sample_parser
from agentrl.databases import policies, runs
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DataSet, Split, TaskStatus
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.tasks import TaskLedger
from agentrl.launcher.deployment import REPOSITORY
from agentrl.launcher.feeding import feed
from agentrl.launcher.run_folder import LaunchRecord, write_launch
from agentrl.launcher.run_state import read_run
from agentrl.rollout.scheduling.work_view import Observer
from agentrl.training.run.entry import enter, settle

DEMO = REPOSITORY / "assets" / "demo"
SAMPLE = (
    "--model", str(DEMO / "model"), "--tasks", "tasks.jsonl",
    "--mcp_manager_url", f"{DEMO / 'warehouse_tools.py'}:server", "--max_turns", "6",
    "--max_tokens", "384", "--max_new_tokens", "48", "--num_generations", "4",
    "--lease_seconds", "3", "--max_concurrent_samples_per_process", "1",
)  # fmt: skip


async def test_the_feeder_ends_the_run_with_its_last_task_and_no_group_is_too_early(
    database: RunDatabase, tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    lines = [json.dumps({"id": f"t{n}", "query": "?", "answer": "1"}) for n in range(300)]
    tasks.write_text("\n".join(lines))
    config = config_of(
        {
            "run_name": database.name, "output_dir": str(tmp_path / "out"),
            "train_file": str(tasks), "model_name_or_path": str(DEMO / "model"),
            "num_generations": 1, "num_train_epochs": 1.0, "loss_calculator": "CrossEntropy",
        }
    )  # fmt: skip
    entry = await enter(database, config)
    await settle(database, config, entry)
    feeding = asyncio.create_task(feed(database, config, entry))
    ledger = TaskLedger(database, "sampler", lease_seconds=60, max_failures=1)
    observer = Observer(database, None, True, steps_ahead=0, group_size=1)
    done = 0
    while not feeding.done():
        # No step is ever taken: a bound on staleness would have stopped this after a batch.
        run = (await observer.look()).training
        if run is not None:
            assert run.status == runs.SAMPLING and run.n_groups == 300
            limit = await observer.admission_limit(run)
            for claim in await ledger.claim(Split.TRAIN, count=1, admission_limit=limit):
                task = await ledger.complete(claim, 1.0)
                assert task is not None
                await ledger.finalised(task)
                done += 1
        else:
            await asyncio.sleep(0.05)
    await feeding
    assert done == 300
    assert await database.tasks.count_documents({"status": TaskStatus.COMPLETED}) == 300
    run = await runs.load_run(database)
    assert run is not None and run.status == runs.FINISHED and run.trainer is None
    assert (await observer.look()).finished
    [published] = await database.policy_versions.find().to_list()
    assert (published["version"], published["step"], published["served"]) == (0, 0, True)
    # Once a trainer has published, the start weights are not sampled under its run's name.
    await policies.publish(database, 1, 0, "weights")
    with pytest.raises(ConfigError, match="has been trained"):
        await feed(database, config, entry)


def test_what_a_sampling_run_lacks_is_said_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("MODEL", "TRAIN_FILE", "DB_URL"):
        monkeypatch.delenv(variable, raising=False)

    def said(*flags: str) -> str:
        assert main(["sample", *flags]) == 2
        [line] = capsys.readouterr().err.splitlines()
        return line

    assert "--tasks is needed beside --model" in said("--model", str(DEMO / "model"))
    assert "--model is needed beside --tasks" in said("--tasks", "tasks.jsonl")
    both = ("--tasks", "tasks.jsonl", "--model")
    assert "there is no such folder" in said(*both, "nothing")
    assert "tasks.jsonl" in said(*both, str(DEMO / "model"))
    # One trajectory of each task needs no advantage.
    assert "tasks.jsonl" in said(*both, str(DEMO / "model"), "--num_generations", "1")
    trained = tmp_path / "output" / "sample" / "checkpoint-3"
    trained.mkdir(parents=True)
    assert "a run that was trained" in said(*both, str(DEMO / "model"))


@contextmanager
def opened(folder: Path) -> Iterator[MongoClient]:
    with (
        EmbeddedMongod(folder / "mongo", folder / "mongod.log") as mongod,
        MongoClient(mongod.url) as client,
    ):
        yield client


def _agentrl(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-m", "agentrl.cli", *arguments], cwd=folder, text=True,
        env={**environment, "PYTHONPATH": str(REPOSITORY / "src"), "NUM_SAMPLERS": "2"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_the_help_needs_a_database_only_of_a_run_that_is_joined() -> None:
    said = " ".join(sample_parser().format_help().split())
    assert "(needed to join a run; default with --model and --tasks: DB_URL, else" in said
    assert "(needed)" not in said


def test_a_refused_second_start_leaves_the_finished_run_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DB_URL", raising=False)
    tasks, output = tmp_path / "tasks.jsonl", tmp_path / "output" / "base"
    tasks.write_text("\n".join(demo_lines(2)) + "\n")
    output.mkdir(parents=True)
    given = ["--run_name", "base", *SAMPLE]
    data = DataSet(train_file=str(tasks), train_digest="of other tasks", tools="given", seed=0)
    mark = {"identity": "of the first", "data": data.model_dump()}
    (output / "run.json").write_text(json.dumps(mark))
    write_launch(output, LaunchRecord("sample", [], status=0))
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["sample", *given, "--inference_urls", url]) == 2
    assert "began with other data" in capsys.readouterr().err
    row = read_run(output)
    assert row is not None and (row.state, row.note) == ("finished", "")


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_run_is_sampled_through_kills_and_trained_later_on_all_its_rows(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("\n".join(demo_lines(60)) + "\n")
    folder = tmp_path / "output" / "sample"
    log = tmp_path / "logs" / "as" / "sample_sample-0.log"
    working = "of run sample"  # a sampler says so once, before its first claim

    # First the launch itself is killed, in the middle.
    first = _agentrl(tmp_path, "sample", *SAMPLE)
    _await(lambda: log.is_file() and working in log.read_text(), first)
    time.sleep(1)
    first.kill()
    first.communicate()

    # Then a sampler of the launch that goes on.
    again = _agentrl(tmp_path, "sample", *SAMPLE)
    _await(lambda: log.read_text().count(working) == 2, again)
    time.sleep(0.2)
    for child in _below(again.pid):
        if "sample-0" in _open_files(child):
            os.kill(child, signal.SIGKILL)
    printed, _ = again.communicate(timeout=240)
    assert again.returncode == 0, printed
    assert "sampler-0 was ended by SIGKILL" in printed, printed
    assert "240 trajectories" in printed

    with opened(folder) as client:
        run = client["sample"]
        assert run["tasks"].count_documents({"status": "completed"}) == 60
        slots = [slot for task in run["tasks"].find() for slot in task["slots"]]
        assert {slot["status"] for slot in slots} == {"completed"} and len(slots) == 240
        kept = run["records"].count_documents({"status": {"$in": ["ready", "abandoned"]}})
        assert kept == 240  # each rollout has one trajectory, however often it was begun
        rows = run["record_data"].count_documents({"status": "ready"})
        assert rows > 60

    # A trainer takes what is there, on weights that are newer by far more than --max_staleness.
    done = _agentrl(
        tmp_path, "launch", "grpo", "sample", "--model_name_or_path", str(DEMO / "model"),
        "--enable_sampling", "false", "--per_device_train_batch_size", "16", "--max_tokens", "384",
        "--learning_rate", "1e-4", "--use_cpu",
    )  # fmt: skip
    printed, _ = done.communicate(timeout=240)
    assert done.returncode == 0, printed
    with opened(folder) as client:
        states = client["sample"]["record_data"].distinct("status")
        assert states == ["trained"]
    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == -(-rows // 16) > 3


def _await(condition, process: "subprocess.Popen[str]", patience_s: float = 120) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + patience_s
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _below(parent: int) -> list[int]:
    """All processes below a process."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [parent]
    for process in found:
        found += [child for child, of in parents.items() if of == process]
    return found[1:]


def _open_files(process: int) -> str:
    """What a process writes its output to."""
    try:
        return os.readlink(f"/proc/{process}/fd/1")
    except OSError:
        return ""
