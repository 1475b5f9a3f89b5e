"""A finished run is given more steps, on a MongoDB that keeps what the last launch said."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from uuid import uuid4

import pytest
from demo_launch import demo_lines, launch_demo
from rich.console import Console

from agentrl.databases import runs
from agentrl.databases.connection import RunDatabase, connect
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.runs import RunLease
from agentrl.launcher.deployment import read_deployment
from agentrl.launcher.inventory import read_inventory
from agentrl.launcher.launch import Launch
from agentrl.launcher.presets import PRESETS
from agentrl.launcher.processes import Kind, Part
from agentrl.launcher.progress import ProgressReader
from agentrl.launcher.stack import plan_stack
from agentrl.launcher.view import LiveView

ENDS_AT_ONCE = Part("sampler-0", Kind.SAMPLER, (sys.executable, "-c", ""), None, restarts=9,
                    may_end=True)  # fmt: skip


@pytest.fixture
async def database(mongod: EmbeddedMongod) -> AsyncIterator[RunDatabase]:
    database = await connect(mongod.url, f"extended-{uuid4().hex[:8]}")
    yield database
    await database.client.drop_database(database.name)
    await database.close()


def planned(mongod: EmbeddedMongod, output: Path, console: Console) -> Launch:
    """A launch of the demo on a MongoDB that is given, of which nothing is started."""
    flags = ["--db_connection_string", mongod.url, "--output_dir", str(output)]
    preset, machine = PRESETS["grpo"], read_inventory({}, machines=1)
    stack = plan_stack(preset, "demo", flags, read_deployment({}), machine)
    return Launch(stack, preset, console=console)


@pytest.mark.parametrize("status", [runs.FINISHED, runs.HOPELESS])
async def test_a_run_that_gets_a_trainer_is_neither_finished_nor_given_up(
    database: RunDatabase, status: str
) -> None:
    first = RunLease(database, "first", "here", lease_seconds=60)
    await first.acquire(8)
    await first.progress(step=2, max_steps=2, version=2, status=status)
    await first.release()
    run = await RunLease(database, "next", "here", lease_seconds=60).acquire(8)
    assert (run.status, run.step) == ("created", 2)


@pytest.mark.parametrize(("status", "again"), [(runs.FINISHED, False), (runs.TRAINING, True)])
async def test_a_sampler_that_ends_is_started_again_unless_the_run_is_finished(
    database: RunDatabase, mongod: EmbeddedMongod, tmp_path: Path, status: str, again: bool
) -> None:
    trainer = RunLease(database, "trainer", "here", lease_seconds=60)
    await trainer.acquire(8)
    await trainer.progress(step=2, max_steps=4, version=2, status=status)
    said = StringIO()
    launch = planned(mongod, tmp_path, Console(file=said, width=400))
    view = LiveView("", launch._console)
    launch._supervisor.start(replace(ENDS_AT_ONCE, log=tmp_path / "log"))
    reading = asyncio.create_task(launch._read_progress(ProgressReader(database, tmp_path), view))
    with suppress(TimeoutError):
        async with asyncio.timeout(60 if again else 4):
            while "ended" not in said.getvalue():
                assert launch._judge(launch._events(), view) is None
                await asyncio.sleep(0.05)
    reading.cancel()
    launch._supervisor.kill_all()
    launch._ports.close()
    told = "sampler-0 ended with status 0: it is started again" in said.getvalue()
    assert told is again


async def test_a_launch_that_goes_on_finds_its_run_no_longer_finished(
    database: RunDatabase, mongod: EmbeddedMongod, tmp_path: Path
) -> None:
    trainer = RunLease(database, "trainer", "here", lease_seconds=60)
    await trainer.acquire(8)
    await trainer.progress(step=2, max_steps=2, version=2, status=runs.FINISHED)
    await trainer.release()
    launch = planned(mongod, tmp_path, Console(file=StringIO()))
    await launch._enter(database)
    launch._ports.close()
    run = await runs.load_run(database)
    assert run is not None and (run.status, run.step) == ("created", 2)


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_finished_run_goes_on_with_more_steps(mongod: EmbeddedMongod, tmp_path: Path) -> None:
    def launch(steps: int) -> None:
        done = launch_demo(
            tmp_path, "--max_steps", str(steps), "--db_connection_string", mongod.url,
            "--train_file", "train.jsonl", "--num_generations", "4", "--eval_rollouts", "1",
            "--per_device_train_batch_size", "16", "--sampler_processes", "1",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    (tmp_path / "train.jsonl").write_text("\n".join(demo_lines(24)))
    launch(1)
    # A trainer that loads longer than the samplers, which then look first.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\ntime.sleep(15 * ('agentrl.launcher.accelerate' in sys.orig_argv))\n"
    )
    launch(8)  # more than the rows that the first launch left suffice for
    lines = (tmp_path / "output/demo/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, 9)], (
        "more than the rows that were left"
    )
