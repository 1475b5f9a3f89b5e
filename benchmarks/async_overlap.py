"""How much of the long tail of tool calls asynchronous sampling hides from the trainer.

Real sampler process, ledger, staleness bound, eviction and row ledger on a real mongod, and a real
MCP server. In place of a model stands a service that answers each turn after a fixed time, in place
of the optimizer step a pause of a fixed time: computing them would measure this machine's cores.
The trainer leases the rows of a step, "trains", publishes a version to the service and commits, in
the order of the real one, with `--sync_sampling` and without.

The seconds of a tool call are drawn from a log-normal distribution, the same calls for both. A
synchronous step waits for its slowest trajectory, an asynchronous one for any rows in the bound.

    python benchmarks/async_overlap.py [--quick] [--save]

Rounds of both sides in turn, N steps each, timed from the moment that tasks may be begun to the
commit of step N. `async_over_sync` is the ratio of their wall times, the median over rounds.
Evicted rows, the ages of what was trained and how long trajectories took are told with it.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import uvloop
from report import finish, parse_flags
from scripted_services import DEMO_MODEL, Script, add_groups, model_service, tool_server

from agentrl.databases import policies, runs, services
from agentrl.databases.changes import Changes, inserted
from agentrl.databases.connection import RunDatabase, connect
from agentrl.databases.documents import RowStatus
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.row_ledger import RowLedger, count_rows, fetch_rows
from agentrl.databases.runs import RunLease
from agentrl.inference.client import SGLangClient

SCRIPT = Script(latency_s=0.15, turns=3, tool_median_s=0.5, tool_sigma=1.2)
GROUP, ROWS = 4, 16  # rollouts of a task, rows of a step
TRAIN_S = 1.0  # a step's computing
MAX_STALENESS = 4
AT_ONCE = (MAX_STALENESS + 1) * ROWS  # of both sides: neither is held back by it


@dataclass(frozen=True)
class Side:
    """The result of one side in one round."""

    wall_s: float
    evicted: int
    ages: list[int]  # of the trained rows, in versions

    def line(self) -> str:
        """For people."""
        age = statistics.mean(self.ages)
        return f"{self.wall_s:.1f} s, rows {age:.2f} versions old, {self.evicted} evicted"


@contextmanager
def sampler(url: str, run: str, tools: str, flags: list[str], log: Path) -> Iterator[None]:
    """`agentrl sample` as a process; it waits for the run to begin."""
    command = [
        sys.executable, "-m", "agentrl.cli", "sample", "--sampler_processes", "1",
        "--run_name", run, "--model_name_or_path", str(DEMO_MODEL),
        "--db_connection_string", url, "--mcp_manager_url", tools,
        "--num_generations", str(GROUP), "--max_tokens", "2000", "--drain_seconds", "0",
        "--max_concurrent_samples_per_process", str(AT_ONCE), *flags,
    ]  # fmt: skip
    with log.open("w") as output:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stderr=output, env=environment)
        try:
            while f"of run {run}" not in log.read_text():
                if process.poll() is not None:
                    raise SystemExit(log.read_text())
                time.sleep(0.1)
            yield
        finally:
            process.terminate()
            process.wait()


async def prepare(database: RunDatabase, model: str, groups: int) -> RunLease:
    """Make a run with `groups` groups; the service has version 0."""
    await add_groups(database, groups, GROUP)
    lease = RunLease(database, "trainer", "benchmark", lease_seconds=600)
    await lease.acquire(rows_per_step=ROWS)
    await services.register_urls(database, [model])
    await publish(database, model, 0)
    return lease


async def publish(database: RunDatabase, model: str, version: int) -> None:
    """Update the service to a version, as the trainer does."""
    await policies.publish(database, version, version, "none")
    async with SGLangClient(model) as client:
        await client.update_weights_from_disk("none", version)
    await services.acknowledge(database, model, version)
    await policies.serve(database, version)


async def train(
    database: RunDatabase, lease: RunLease, model: str, steps: int, max_staleness: int
) -> Side:
    """Run steps in the trainer's order, each of a fixed time."""
    ledger = RowLedger(database, "trainer", lease.fence)
    ages: list[int] = []
    began = time.monotonic()
    await lease.progress(step=0, max_steps=steps, version=0, status=runs.TRAINING)
    async with Changes(database, inserted(database.rows)) as changes:
        for step in range(1, steps + 1):
            leased: list[str] = []
            lineage = await policies.load_lineage(database)
            while len(leased) < ROWS:
                missing = ROWS - len(leased)
                headers = await ledger.lease(step, missing, lineage, max_staleness)
                leased += [header.id for header in headers]
                if len(leased) < ROWS:
                    await changes.wait(5.0, found=bool(headers))
            for row in (await fetch_rows(database, leased)).rows:
                ages.append(step - 1 - min(row.policy_versions))
            await asyncio.sleep(TRAIN_S)
            await publish(database, model, step)
            await ledger.commit(step, leased)
            await lease.progress(step=step, max_steps=steps, version=step, status=runs.TRAINING)
    wall = time.monotonic() - began
    await lease.progress(step=steps, max_steps=steps, version=steps, status=runs.FINISHED)
    counts = await count_rows(database)
    return Side(wall, counts[RowStatus.EVICTED], ages)


async def run_side(url: str, tools: str, folder: Path, steps: int, *, sync: bool) -> Side:
    """N steps of one side, from nothing."""
    run = f"overlap-{uuid4().hex[:12]}"
    bound = 0 if sync else MAX_STALENESS
    flags = ["--sync_sampling", "true"] if sync else ["--max_staleness", str(MAX_STALENESS)]
    database = await connect(url, run)
    with model_service(SCRIPT) as model:
        lease = await prepare(database, model, groups=(steps + 3 * MAX_STALENESS) * ROWS // GROUP)
        with sampler(url, run, tools, flags, folder / f"{run}.log"):
            side = await train(database, lease, model, steps, bound)
    await database.client.drop_database(run)
    await database.close()
    return side


def expected() -> dict[str, Any]:
    """Expected seconds of a trajectory, and of the slowest one of a step (2000 simulated steps)."""
    slowest, all_seconds = [], []
    for step in range(2000):
        seconds = [
            SCRIPT.turns * SCRIPT.latency_s
            + sum(SCRIPT.tool_seconds(f"{step}/{row}", turn) for turn in range(SCRIPT.turns - 1))
            for row in range(ROWS)
        ]
        slowest.append(max(seconds))
        all_seconds += seconds
    return {
        "trajectory_mean_s": round(statistics.mean(all_seconds), 2),
        "trajectory_p99_s": round(statistics.quantiles(all_seconds, n=100)[-1], 2),
        "slowest_of_step_mean_s": round(statistics.mean(slowest), 2),
    }


def main() -> None:
    args = parse_flags(__doc__ or "")
    rounds, steps = (1, 2) if args.quick else (3, 8)
    tail = expected()
    print(f"trajectories: {tail}", flush=True)
    sides: dict[str, list[Side]] = {"sync": [], "async": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedMongod(Path(folder) / "data", Path(folder) / "mongod.log") as mongod,
        tool_server() as tools,
    ):
        for number in range(rounds):
            for name, measured in sides.items():
                side = run_side(mongod.url, tools, Path(folder), steps, sync=name == "sync")
                measured.append(uvloop.run(side))
                print(f"round {number}, {name}, {steps} steps: {measured[-1].line()}", flush=True)
    pairs = zip(sides["async"], sides["sync"], strict=True)
    ratios = [round(a.wall_s / s.wall_s, 3) for a, s in pairs]
    trained = rounds * steps * ROWS
    result = {
        "async_over_sync": round(statistics.median(ratios), 3),
        "ratios": ratios,
        **{
            f"{name}_s_per_step": round(
                statistics.median(side.wall_s for side in measured) / steps, 2
            )
            for name, measured in sides.items()
        },
        "async_mean_age": round(
            statistics.mean(age for side in sides["async"] for age in side.ages), 2
        ),
        "async_evicted_share": round(
            sum(side.evicted for side in sides["async"])
            / (trained + sum(side.evicted for side in sides["async"])),
            3,
        ),
        "steps": steps,
        "train_s": TRAIN_S,
        "rows_per_step": ROWS,
        "max_staleness": MAX_STALENESS,
        "turns": SCRIPT.turns,
        "service_latency_s": SCRIPT.latency_s,
        "tool_seconds": {"median": SCRIPT.tool_median_s, "sigma": SCRIPT.tool_sigma},
        **tail,
    }
    finish("async_overlap", result, ("pymongo", "mcp", "transformers"), save=args.save)


if __name__ == "__main__":
    main()
