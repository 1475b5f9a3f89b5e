"""What a turn costs samplers and mongod, by processes and by records at once.

`agentrl sample --sampler_processes N` as users start it, beside a scripted service, an MCP server
(`scripted_services.py`) and a mongod, all processes of their own. Latencies grow with the records
at once, so that each setting asks for the same 40 turns a second and leaves cores; one record at
once asks for as many as it can.

    python benchmarks/sampler_processes.py [--quick] [--save]

For each number of records at once and of processes: turns per second; `turns_per_core_s`, turns
per CPU second of the samplers; `overhead`, the wall time over that of the critical paths, from the
first record's start to the last group's finalisation; and CPU milliseconds per turn of the
samplers, of mongod, and of the services. Start-up is not in it. `mongod_idle_ms_per_s` is
what mongod takes while the samplers wait for tasks, and `mongod_ms_per_turn_beyond_idle` the rest.
"""

import asyncio
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import psutil
from report import finish, parse_flags
from sampler import Addresses, prepare, wall_s
from scripted_services import DEMO_MODEL, Script, add_groups, model_service, tool_server

from agentrl.databases import runs
from agentrl.databases.documents import TaskStatus
from agentrl.databases.mongod import EmbeddedMongod

GROUP, TURNS = 8, 4
TURNS_PER_S = 40.0
SETTINGS = ((1, 1), (256, 1), (256, 2), (256, 4), (1024, 1), (1024, 2), (1024, 4))
_QUIET = 0.1  # of a core: less means that all processes have started and wait
_IDLE_S = 10.0  # how long mongod is measured while the samplers wait


def script_for(at_once: int) -> Script:
    """A record of 4 turns; a tool call takes half as long as a turn."""
    path_s = at_once * TURNS / TURNS_PER_S if at_once > 1 else 0.5
    unit = path_s / (TURNS + (TURNS - 1) / 2)
    return Script(latency_s=unit, turns=TURNS, tool_median_s=unit / 2)


@contextmanager
def samplers(addresses: Addresses, run: str, at_once: int, processes: int) -> Iterator[int]:
    """`agentrl sample` with so many processes; yields its pid."""
    group = min(GROUP, at_once + 1)
    command = [
        str(Path(sys.executable).with_name("agentrl")), "sample", "--run_name", run,
        "--model_name_or_path", str(DEMO_MODEL), "--db_connection_string", addresses.mongod,
        "--mcp_manager_url", addresses.tools, "--num_generations", str(group),
        "--sampler_processes", str(processes), "--max_tokens", "2000", "--request_timeout", "600",
        "--max_concurrent_samples_per_process", str(at_once // processes),
    ]  # fmt: skip
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield started.pid
        if (status := started.wait(60)) != 0:
            raise SystemExit(f"the samplers ended with {status}: start them without the benchmark")
    finally:
        started.kill()
        started.wait()


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and of those that it started."""
    root = psutil.Process(pid)
    spent = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(times.user + times.system for times in spent)


async def until_quiet(pid: int, processes: int) -> None:
    """Wait until all sampler processes have started and wait for work."""
    expected = processes + 1 if processes > 1 else 1
    while True:
        before = cpu_s(pid)  # raises if it has ended
        await asyncio.sleep(1.0)
        there = 1 + len(psutil.Process(pid).children(recursive=True))
        if there >= expected and before > 1.0 and cpu_s(pid) - before < _QUIET * processes:
            return


async def measure(at_once: int, processes: int, records: int) -> dict[str, float]:
    """One run."""
    script = script_for(at_once)
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedMongod(Path(folder) / "data", Path(folder) / "mongod.log") as mongod,
        model_service(script) as model,
        tool_server() as tools,
    ):
        parts = {name: pid for pid, name in _own_children()}
        addresses = Addresses(mongod.url, model, tools)
        run, group = f"sampler-{uuid4().hex[:12]}", min(GROUP, at_once + 1)
        groups = records // group
        database, lease = await prepare(addresses, run, groups * group)
        await lease.progress(step=0, max_steps=1, version=0, status=runs.TRAINING)
        with samplers(addresses, run, at_once, processes) as pid:
            parts["samplers"] = pid
            await until_quiet(pid, processes)
            idle_before = cpu_s(parts["mongod"])
            await asyncio.sleep(_IDLE_S)
            idle = (cpu_s(parts["mongod"]) - idle_before) / _IDLE_S
            before = {name: cpu_s(part) for name, part in parts.items()}
            began = time.monotonic()
            await add_groups(database, groups, group)
            done = {"status": TaskStatus.COMPLETED}
            while await database.tasks.count_documents(done) < groups:
                await asyncio.sleep(0.2)
            spent = {name: cpu_s(part) - before[name] for name, part in parts.items()}
            whole_s = time.monotonic() - began
            await lease.progress(step=1, max_steps=1, version=0, status=runs.FINISHED)
        turns, took_s = records * TURNS, await wall_s(database)
        await database.close()
    return {
        "records": records,
        "turns_per_s": round(turns / took_s, 1),
        "turns_per_core_s": round(turns / spent["samplers"], 1),
        "overhead": round(took_s / (records / at_once * script.critical_path_s), 3),
        "cores_taken": round(sum(spent.values()) / whole_s, 2),
        **{f"{name}_ms_per_turn": round(1000 * s / turns, 2) for name, s in spent.items()},
        "mongod_idle_ms_per_s": round(1000 * idle, 1),
        "mongod_ms_per_turn_beyond_idle": round(
            1000 * (spent["mongod"] - idle * whole_s) / turns, 2
        ),
    }


def _own_children() -> Iterator[tuple[int, str]]:
    for child in psutil.Process().children():
        line = " ".join(child.cmdline())
        for mark, name in (("mongod", "mongod"), ("py model", "service"), ("py tools", "tools")):
            if mark in line:
                yield child.pid, name


def main() -> None:
    args = parse_flags(__doc__ or "")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    settings = ((1, 1), (64, 2)) if args.quick else SETTINGS
    results: dict[str, dict[str, float]] = {}
    for at_once, processes in settings:
        records = 40 if at_once == 1 else at_once
        results[f"{at_once}_by_{processes}"] = found = asyncio.run(
            measure(at_once, processes, records)
        )
        print(f"{at_once} at once, {processes} processes: {found}", flush=True)
    result = {
        "asked_turns_per_s": TURNS_PER_S,
        "worst_overhead": max(found["overhead"] for found in results.values()),
        "settings": results,
    }
    finish("sampler_processes", result, ("pymongo", "mcp", "aiohttp"), save=args.save)


if __name__ == "__main__":
    main()
