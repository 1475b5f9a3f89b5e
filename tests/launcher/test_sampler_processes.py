"""`agentrl sample` as several processes, which are real, on a real mongod."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.configs import parse_config
from agentrl.configs.run_flags import read_digests, stored_flags
from agentrl.databases import runs
from agentrl.databases.connection import RunDatabase, connect
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.runs import RunLease, describe
from agentrl.launcher.deployment import default_sampler_processes, read_deployment
from agentrl.launcher.inventory import read_inventory
from agentrl.launcher.presets import PRESETS
from agentrl.launcher.stack import plan_stack
from agentrl.rollout.scheduling.process_share import ProcessShare
from agentrl.subreaper import descendants

MODEL = Path(__file__).resolve().parents[2] / "assets" / "demo" / "model"


@given(st.integers(0, 100), st.integers(1, 9))
def test_the_processes_of_a_machine_share_what_counts_for_all_of_them(
    total: int, count: int
) -> None:
    shares = [ProcessShare(number, count) for number in range(count)]
    assert [ProcessShare.read(share.environment) for share in shares] == shares
    parts = [share.of(total) for share in shares]
    assert sum(parts) == (max(total, count) if total else 0)
    assert max(parts) - min(parts) <= 1
    started = ProcessShare.processes(count, total)
    assert started == (min(count, total) if total else count)
    assert sum(ProcessShare(number, started).of(total) for number in range(started)) == total


def test_a_launch_starts_no_more_processes_than_its_target_has_trajectories() -> None:
    flags = ["--sampler_processes", "4", "--target_concurrency", "2"]
    machine = read_inventory({}, machines=1)
    stack = plan_stack(PRESETS["grpo"], "demo", flags, read_deployment({}), machine)
    assert stack.samplers == 2


def test_a_machine_has_a_process_for_each_core_that_nothing_else_needs() -> None:
    assert [default_sampler_processes(cores) for cores in (1, 2, 6, 64)] == [1, 2, 6, 8]
    assert [default_sampler_processes(6, computing) for computing in (2, 6, 9)] == [4, 1, 1]


@pytest.fixture
async def database(mongod: EmbeddedMongod) -> AsyncIterator[RunDatabase]:
    """That of a run which has begun, and has no tasks yet."""
    database = await connect(mongod.url, f"processes-{uuid4().hex[:8]}")
    config = parse_config(["--model_name_or_path", str(MODEL), "--agent_name", "single_turn"])
    lease = RunLease(database, "trainer", "test", lease_seconds=600)
    await lease.acquire(rows_per_step=8)
    await describe(database, "id", stored_flags(config), read_digests(config))
    await lease.progress(step=0, max_steps=1, version=0, status=runs.TRAINING)
    yield database
    await database.client.drop_database(database.name)
    await database.close()


@asynccontextmanager
async def sampling(
    database: RunDatabase, url: str, log: Path
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """`agentrl sample` with two processes, both at work."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "agentrl.cli", "sample", "--sampler_processes", "2",
                "--run_name", database.name, "--db_connection_string", url,
                "--target_concurrency", "5", "--drain_seconds", "1",
            ],
            stderr=output,
        )  # fmt: skip
    try:
        await said(log, r"INFO sampler ", 2)
        yield process
    finally:
        process.kill()
        process.wait()


async def said(log: Path, pattern: str, times: int = 1) -> None:
    """Wait until the log has it so often."""
    async with asyncio.timeout(60):
        while len(re.findall(pattern, log.read_text())) < times:
            await asyncio.sleep(0.05)


async def ends(process: subprocess.Popen[bytes]) -> int:
    async with asyncio.timeout(30):
        while process.poll() is None:
            await asyncio.sleep(0.05)
    return process.returncode


def samplers(process: subprocess.Popen[bytes]) -> list[int]:
    """The processes that sample, below the one that was started."""
    below = descendants(process.pid)
    return [
        pid for pid in below if b"-I" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    ]


@pytest.mark.slow
async def test_a_process_that_dies_is_named_and_started_again_and_sigterm_ends_them_all(
    mongod: EmbeddedMongod, database: RunDatabase, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    async with sampling(database, mongod.url, log) as process:
        first, second = samplers(process)
        os.kill(first, signal.SIGKILL)
        await said(log, r"sampler-[01] was ended by SIGKILL: it is started again\n")
        await said(log, r"INFO sampler ", 3)
        again = samplers(process)
        assert len(again) == 2 and second in again and first not in again
        process.terminate()
        assert await ends(process) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in again)


@pytest.mark.slow
async def test_they_end_with_the_run(
    mongod: EmbeddedMongod, database: RunDatabase, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    async with sampling(database, mongod.url, log) as process:
        change = {"$set": {"status": runs.FINISHED}}
        await database.runs.update_one({"_id": database.name}, change)
        assert await ends(process) == 0
    assert "2 sampler processes, each with up to 64 trajectories at once" in log.read_text()


def test_what_is_wrong_with_the_flags_is_said_once(mongod: EmbeddedMongod) -> None:
    command = [
        sys.executable, "-m", "agentrl.cli", "sample", "--sampler_processes", "3",
        "--run_name", "no-such-run", "--db_connection_string", mongod.url,
        "--startup_timeout", "0.5",
    ]  # fmt: skip
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert told.returncode == 2
    assert told.stderr.count("--run_name no-such-run: the database holds no such run") == 1
