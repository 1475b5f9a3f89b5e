"""The overhead of a sampler process over the time of its services, and a profile of its CPU time.

The real `agentrl sample` in this process: chat template, tokens, MCP client, scoring, ledger and
rows on a real mongod. Beside it, as processes of their own, a service of a fixed latency that
follows a script, and an MCP server whose tool takes a fixed time (`scripted_services.py`). A record
has 4 turns and 3 tool calls; its critical path is the sum of their latencies.

    python benchmarks/sampler.py [--quick] [--save]
    python benchmarks/sampler.py --turns 40 --tokens 50000    # long records: long_records.py

At 1, 32 and 256 records at once: records per second; CPU milliseconds of the sampler per turn;
`overhead`, the wall time over that of the critical paths, from the first record's start to the last
group's finalisation; and the share of one core that the sampler took (the CPU is the limit where
that is near 1, or where the other processes have the rest). The run at 256 at once is under a
sampling profiler, for what the CPU is spent on: the share of samples by the innermost package that
is not the standard library. Latencies are fixed, so all records turn at the same moments: the
bursts of work that this makes are in `overhead`.
"""

import asyncio
import logging
import resource
import signal
import tempfile
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from uuid import uuid4

import long_records
import uvloop
from report import finish, parse_flags
from scripted_services import DEMO_MODEL, Script, add_groups, model_service, tool_server

from agentrl.configs import parse_config
from agentrl.databases import policies, runs, services
from agentrl.databases.connection import RunDatabase, connect
from agentrl.databases.documents import TaskStatus
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.runs import RunLease
from agentrl.rollout.scheduling.worker import sample

GROUP = 8  # rollouts of a task; 2 where one record is made at a time
SCRIPT = Script(latency_s=1.5, turns=4, tool_median_s=0.75)
AT_ONCE = (1, 32, 256)
PACKAGES = ("pymongo", "mcp", "aiohttp", "transformers")
PROFILE_S = 0.002  # of CPU time between two samples


@dataclass(frozen=True)
class Addresses:
    """The addresses of the other processes."""

    mongod: str
    model: str
    tools: str


@dataclass(frozen=True)
class Measured:
    """One run of a sampler."""

    records: int
    at_once: int
    wall_s: float
    cpu_s: float  # of the sampler, from the first record's start on
    tokens: int  # of all records, with what their segments share once
    stored_bytes: int  # of all documents, uncompressed

    def summary(self) -> dict[str, float]:
        """What is reported."""
        waves = -(-self.records // self.at_once)
        return {
            "records_per_s": round(self.records / self.wall_s, 2),
            "cpu_ms_per_turn": round(1000 * self.cpu_s / self.records / SCRIPT.turns, 2),
            "overhead": round(self.wall_s / (waves * SCRIPT.critical_path_s), 3),
            "cpu_share": round(self.cpu_s / self.wall_s, 2),
        }


async def prepare(
    addresses: Addresses, run: str, rows_per_step: int
) -> tuple[RunDatabase, RunLease]:
    """Make a run with a published version, and no tasks yet."""
    database = await connect(addresses.mongod, run)
    lease = RunLease(database, "trainer", "benchmark", lease_seconds=600)
    await lease.acquire(rows_per_step)
    await policies.publish(database, 0, 0, "none")
    await services.register_urls(database, [addresses.model])
    await services.acknowledge(database, addresses.model, 0)
    await policies.serve(database, 0)
    return database, lease


async def run_sampler(
    addresses: Addresses,
    at_once: int,
    records: int,
    model: Path = DEMO_MODEL,
    flags: Sequence[str] = ("--max_tokens", "2000"),
    watches: Sequence[Callable[[], AbstractAsyncContextManager[None]]] = (),
) -> Measured:
    """Sample the records, with a number at once, while `watches` are active."""
    run = f"sampler-{uuid4().hex[:12]}"
    group = min(GROUP, at_once + 1)
    groups = records // group
    database, lease = await prepare(addresses, run, groups * group)
    await add_groups(database, groups, group)
    given = [
        "--run_name", run, "--model_name_or_path", str(model),
        "--db_connection_string", addresses.mongod, "--mcp_manager_url", addresses.tools,
        "--num_generations", str(group), "--max_concurrent_samples_per_process", str(at_once),
        *flags,
    ]  # fmt: skip
    sampler = asyncio.create_task(sample(parse_config(given)))
    await asyncio.sleep(5.0)  # it imports, loads its model folder and connects
    async with AsyncExitStack() as watching:
        for watch in watches:
            await watching.enter_async_context(watch())
        cpu = time.process_time()
        await lease.progress(step=0, max_steps=1, version=0, status=runs.TRAINING)
        done = {"status": TaskStatus.COMPLETED}
        while await database.tasks.count_documents(done) < groups:
            if sampler.done():
                raise RuntimeError("the sampler ended before its work did") from sampler.exception()
            await asyncio.sleep(0.1)
        cpu = time.process_time() - cpu
    await lease.progress(step=1, max_steps=1, version=0, status=runs.FINISHED)
    await sampler
    sizes = [row["n_tokens"] async for row in database.rows.find({}, {"n_tokens": 1})]
    assert len(sizes) == records, f"{len(sizes)} rows of {records} records"
    stored = await database.records.database.command("dbStats")
    measured = Measured(
        records, at_once, await wall_s(database), cpu, sum(sizes), int(stored["dataSize"])
    )
    await database.client.drop_database(run)
    await database.close()
    return measured


async def wall_s(database: RunDatabase) -> float:
    """From the first record's start to the last group's finalisation."""
    first = await database.records.find_one(sort=[("started_at", 1)])
    last = await database.tasks.find_one(sort=[("completed_at", -1)])
    assert first is not None and last is not None
    return float((last["completed_at"] - first["started_at"]).total_seconds())


@contextmanager
def profiled(counts: Counter[str]) -> Iterator[None]:
    """Profile the main thread by sampling its CPU time."""

    def sampled(_: int, frame: FrameType | None) -> None:
        counts[_package(frame)] += 1

    signal.signal(signal.SIGPROF, sampled)
    signal.setitimer(signal.ITIMER_PROF, PROFILE_S, PROFILE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)


def _package(frame: FrameType | None) -> str:
    """The innermost package on the stack; of our own code, the module too."""
    while frame is not None:
        parts = Path(frame.f_code.co_filename).parts
        if "agentrl" in parts:
            return ".".join(parts[len(parts) - 1 - parts[::-1].index("agentrl") :])[: -len(".py")]
        if "site-packages" in parts:
            return parts[parts.index("site-packages") + 1]
        frame = frame.f_back
    return "event loop"


def add_flags(parser: ArgumentParser) -> None:
    """Those of long records."""
    parser.add_argument("--turns", type=int, help="turns of a record (default: the short script)")
    parser.add_argument("--tokens", type=int, default=50_000, help="tokens of its last prompt")


def main() -> None:
    args = parse_flags(__doc__ or "", add=add_flags)
    logging.disable(logging.WARNING)
    if args.turns:
        at_once = (8,) if args.quick else long_records.AT_ONCE
        result = long_records.compare(args.turns, args.tokens, at_once)
        finish("sampler_long", result, PACKAGES, save=args.save)
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    waves = {1: 2, 32: 1, 256: 1} if args.quick else {1: 4, 32: 6, 256: 3}
    counts: Counter[str] = Counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedMongod(Path(folder) / "data", Path(folder) / "mongod.log") as mongod,
        model_service(SCRIPT) as model,
        tool_server() as tools,
    ):
        addresses = Addresses(mongod.url, model, tools)
        results = {}
        for at_once in AT_ONCE:
            records = waves[at_once] * at_once
            with profiled(counts) if at_once == AT_ONCE[-1] else nullcontext():
                measured = uvloop.run(run_sampler(addresses, at_once, records))
            results[at_once] = measured.summary()
            print(f"{at_once} at once, {records} records: {results[at_once]}", flush=True)
    total = counts.total()
    spent = {name: round(count / total, 3) for name, count in counts.most_common(14)}
    print(f"CPU at 256 at once is spent on: {spent}", flush=True)
    result = {
        **{f"records_per_second_{n}": results[n]["records_per_s"] for n in AT_ONCE},
        **{f"cpu_ms_per_turn_{n}": results[n]["cpu_ms_per_turn"] for n in AT_ONCE},
        "overhead_32": results[32]["overhead"],
        "at_once": results,
        "cpu_spent_on": spent,
        "critical_path_s": SCRIPT.critical_path_s,
    }
    finish("sampler", result, PACKAGES, save=args.save)


if __name__ == "__main__":
    main()
