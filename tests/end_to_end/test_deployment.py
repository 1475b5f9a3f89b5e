"""A run whose database, tools and services are given by URL, with samplers added from elsewhere."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
from ports import free_port
from pymongo import MongoClient
from still_running import still_running

from agentrl.databases.mongod import EmbeddedMongod

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "assets" / "demo" / "model"
TASKS = ROOT / "assets" / "demo" / "train.jsonl"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@contextmanager
def process(*command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A command of this environment's Python, ended with the block."""
    child = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, text=True, env={**os.environ, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield child
    finally:
        child.terminate()
        child.communicate(timeout=60)


def descendants(child: subprocess.Popen[str]) -> list[str]:
    """The command lines of all that a launch started."""
    family = psutil.Process(child.pid).children(recursive=True)
    return [" ".join(member.cmdline()) for member in still_running(family)]


def test_with_all_urls_given_trainer_and_samplers_are_all_that_runs(
    mongod: EmbeddedMongod, tmp_path: Path
) -> None:
    name = f"test-{uuid4().hex[:8]}"
    tools_port, service_port = free_port(), free_port()
    elsewhere = {
        "DB_URL": mongod.url,
        "MCP_URL": f"http://127.0.0.1:{tools_port}/mcp",
        "INFERENCE_URLS": f"http://127.0.0.1:{service_port}",
        "MODEL": str(MODEL),
        "TRAIN_FILE": str(TASKS),
    }
    flags = [
        "--output_dir", str(tmp_path / "output"), "--per_device_train_batch_size", "8",
        "--max_steps", "6", "--max_tokens", "384", "--max_new_tokens", "48",
        "--drop_zero_advantage", "false",
        # so that one sampler cannot do it all before the other has begun
        "--max_concurrent_samples_per_process", "2",
    ]  # fmt: skip
    launch = ["-m", "agentrl.cli", "launch", "grpo", name, *flags]
    with ExitStack() as stack:
        tool_server = str(ROOT / "assets" / "demo" / "tool_server.py")
        stack.enter_context(process(tool_server, "--port", str(tools_port)))
        stack.enter_context(
            process(
                "-m", "agentrl.cli", "serve", "--model", str(MODEL), "--port", str(service_port)
            )
        )
        trainer = stack.enter_context(process(*launch, **elsewhere, NUM_SAMPLERS="0"))
        deadline = time.monotonic() + 120
        with MongoClient[dict[str, Any]](mongod.url) as client:
            while not client[name]["tasks"].find_one():
                assert trainer.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
        started = descendants(trainer)
        assert any("agentrl.training.trainer" in line for line in started)
        for embedded in ("mongod --dbpath", "agentrl.cli serve", "tool_server.py", "cli sample"):
            assert not any(embedded in line for line in started)
        # They have the run's flags, model and tools from its database.
        join = ["-m", "agentrl.cli", "launch", "grpo", name]
        alone = {"DB_URL": mongod.url, "SAMPLERS_ONLY": "1"}
        refused = subprocess.run(
            [sys.executable, *join, "--max_tokens", "400"], cwd=ROOT, text=True,
            env={**os.environ, **alone}, capture_output=True, timeout=60,
        )  # fmt: skip
        assert refused.returncode == 2
        assert f"--max_tokens 400: run {name!r} has 384" in refused.stderr
        samplers = stack.enter_context(process(*join, **alone, NUM_SAMPLERS="2"))
        printed, _ = trainer.communicate(timeout=200)
        assert trainer.returncode == 0, printed
        # samplers end with the run
        printed, _ = samplers.communicate(timeout=60)
        assert samplers.returncode == 0, printed
    summary = json.loads((tmp_path / "output" / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["rows"]["trained"] == 48
    with MongoClient[dict[str, Any]](mongod.url) as client:
        owners = client[name]["records"].distinct("owner")
        client.drop_database(name)
    assert len(owners) == 2
    for log in (ROOT / "logs" / "as").glob(f"{name}_*"):
        log.unlink()
