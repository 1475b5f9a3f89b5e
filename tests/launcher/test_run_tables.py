"""`agentrl.open_run`: a run's documents as tables."""

import asyncio
import json
import os
import signal
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo_launch import launch_demo
from pymongo import MongoClient
from two_segments import FIRST, OF_RECORD, SECOND

import agentrl
from agentrl.cli import main
from agentrl.configs import ConfigError
from agentrl.databases.connection import DatabaseUnreachable, RunDatabase
from agentrl.databases.documents import Record, Split
from agentrl.databases.mongod import EmbeddedMongod


async def test_documents_are_columns_with_dots_and_tokens_are_numbers(
    database: RunDatabase, mongod: EmbeddedMongod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DB_URL", mongod.url)
    rows = [{**FIRST, **OF_RECORD}, {**SECOND, **OF_RECORD}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["import", str(file), "--run_name", database.name]
    assert await asyncio.to_thread(main, command) == 0
    host = mongod.url.partition("/?")[0]
    with agentrl.open_run(f"{host}/{database.name}?directConnection=true") as run:
        records = run.records().to_pandas()
        assert records["scores.exact_match"].tolist() == [1.0]
        assert records["tokens.generated"].tolist() == [5]
        assert run.records("score<0.5").num_rows == 0
        turns = run.turns(records["id"])
        assert turns["output_ids"].to_pylist() == [[10, 11], [12, 13], [14]]
        assert turns["output_logprobs"].to_pylist()[1] == [-1.0, -0.125]
        assert json.loads(turns["tool_calls"][0].as_py())[0]["arguments"] == {"bin": "K7"}
        [row] = run.rows().to_pylist()
        assert row["advantages"] == [0, 0, 0, 0.5, 0.5, 0, 0, -0.25, -0.25, 0, 0.5]
        assert row["loss_mask"] == [0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 1]
        assert json.loads(run.tasks()["slots"][0].as_py())[0]["status"] == "completed"
        assert run.turns(["another"]).num_rows == 0 and run.metrics().num_rows == 0
    monkeypatch.delenv("DB_URL")
    with pytest.raises(ConfigError, match="there is no run in"):
        agentrl.open_run(tmp_path)
    with pytest.raises(ConfigError, match="must end with the run's name"):
        agentrl.open_run(host)


def test_a_run_that_another_process_closes_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DB_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "output" / "mine"
    other = EmbeddedMongod(run / "mongo", tmp_path / "other.log")
    record = Record(
        id="r0", task="t", task_id="x", rollout=0, attempt=0, split=Split.TRAIN, epoch=0,
        owner="s", query="?", score=1.0, started_at=datetime.now(UTC),
    )  # fmt: skip
    with MongoClient[dict[str, Any]](other.start()) as client:
        client["mine"]["records"].insert_one(record.to_mongo())
    with agentrl.open_run(run) as opened:
        other.stop()
        assert opened.records()["score"].to_pylist() == [1.0]
    other.start()
    close(other)
    assert main(["show", "mine", "--list"]) == 0
    assert "r0" in capsys.readouterr().out


def close(mongod: EmbeddedMongod) -> None:
    """Have it end, until it answers no more; a moment later it lets the folder go."""
    assert mongod.pid is not None
    os.kill(mongod.pid, signal.SIGTERM)
    with suppress(ConnectionRefusedError):
        while True:
            socket.create_connection(("127.0.0.1", mongod.port)).close()


def test_a_mongodb_that_does_not_answer_is_one_sentence() -> None:
    nobody = "mongodb://me:secret@127.0.0.1:1/demo?serverSelectionTimeoutMS=200"
    with pytest.raises(DatabaseUnreachable, match="MongoDB does not answer") as refused:
        agentrl.open_run(nobody)
    assert "secret" not in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_finished_run_is_opened_by_its_folder(tmp_path: Path) -> None:
    done = launch_demo(tmp_path, "--max_steps", "2", "--log_entropy")
    assert done.returncode == 0, done.stdout
    with agentrl.open_run(tmp_path / "output" / "demo") as run:
        metrics = run.metrics().to_pandas()
        assert metrics["step"].tolist() == [1, 2]
        trained = run.rows().to_pandas()
        assert (trained["status"] == "trained").sum() == metrics["n_rows"].sum()
        assert run.records("advantage>0").num_rows > 0
        trained = trained[trained["status"] == "trained"]
        trained["step"] = [json.loads(marks)[0]["step"] for marks in trained["trained"]]
        for step, figures in enumerate(metrics.to_dict("records"), 1):
            of_step = trained[trained["step"] == step]
            assert len(of_step) == figures["n_rows"]
            columns = ("trainer_logprobs", "logprobs", "loss_mask", "trainer_entropies")
            trainer, sampler, mask, entropies = (
                np.concatenate(of_step[name].tolist()) for name in columns
            )
            assert entropies[mask == 1].mean() == pytest.approx(figures["entropy"], abs=1e-3)
            ratio = np.exp(trainer - sampler)[mask == 1]
            assert ratio.mean() == pytest.approx(figures["ratio_mean"], abs=1e-5)
            assert ratio.max() == pytest.approx(figures["ratio_max"], abs=1e-5)
