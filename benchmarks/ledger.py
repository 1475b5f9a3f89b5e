"""The cost of the ledger for the database: claims, and all writes of a record of four turns.

Everything is measured on one mongod of the benchmark's own, in rounds of all sides in turn.

Claims: workers of one process take slots until none is left, one slot a command, beside the
simplest queue there is (`find_one_and_update` of the first pending document, with an index), and
beside claims of up to a group's slots a command, as samplers make them.

Records: a sampler process without a model. As many records at once as there are workers; each is
claimed, started, gets four turns of some hundred tokens, is finished and completed, its group
finalised into rows; heartbeats and the reaper run as often as with a lease of three seconds (the
default is a minute). Beside it the Mongo store of agentlightning 0.3.0 doing its own operations for
a rollout with the same contents (`agentlightning_store.py`), in an environment of its own under the
cache folder, which `--setup` makes.

    python benchmarks/ledger.py [--setup] [--quick] [--save]

`claim_ratio_N` is our rate of single claims over the queue's, `writes_per_turn` the write commands
of a whole record (its share of heartbeats, finalisation and row included) over its turns, at 32 or
128 workers, whichever is more; `vs_agentlightning` the smaller ratio of the rates at the two.
`mongod_us` is what each operation costs the server (`ledger_costs.py`).
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import tempfile
import time
import venv
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pymongo
import uvloop
from ledger_costs import measure_costs
from modelless_sampler import (
    GROUP,
    MESSAGE,
    OUTPUT,
    PROMPT,
    TEXT,
    TURNS,
    ModellessSampler,
    fresh_run,
    task_ledger,
)
from pymongo import monitoring
from report import finish

from agentrl.databases.connection import Documents, RunDatabase
from agentrl.databases.documents import Split
from agentrl.databases.mongod import EmbeddedMongod

CLAIMERS, WORKERS = (1, 32, 256), (1, 32, 128)
COMPARED = (32, 128)  # with agentlightning
AGENTLIGHTNING = "agentlightning[mongo]==0.3.0"
ENVIRONMENT = (
    Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agentrl/agentlightning-0.3.0"
)


@dataclass(frozen=True)
class Side:
    """A way to claim: every call of `claim` takes `count` slots."""

    claim: Callable[[], Awaitable[None]]
    count: int

    async def seconds(self, workers: int, slots: int) -> float:
        """Seconds that `workers` workers take for `slots` slots."""
        left = slots

        async def work() -> None:
            nonlocal left
            while left > 0:
                left -= self.count
                await self.claim()

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(workers)))
        return time.perf_counter() - began


def queue_side(queue: Documents) -> Side:
    """The simplest queue."""

    async def claim() -> None:
        found = await queue.find_one_and_update(
            {"status": "pending"},
            {"$set": {"status": "leased", "owner": "sampler"}},
            sort=[("seq", 1)],
        )
        assert found is not None

    return Side(claim, 1)


def ledger_side(database: RunDatabase, count: int) -> Side:
    """The ledger, one slot or a whole group a command."""
    ledger = task_ledger(database)

    async def claim() -> None:
        assert len(await ledger.claim(Split.TRAIN, count=count)) == count

    return Side(claim, count)


async def measure_claims(url: str, rounds: int) -> dict[int, dict[str, Any]]:
    """Measure all sides in short alternating rounds, so that other load affects all alike."""
    results = {}
    for workers in CLAIMERS:
        slots = 2 * max(workers, 32)  # of a round
        groups = (rounds + 1) * slots // GROUP
        async with fresh_run(url, groups) as single, fresh_run(url, groups) as batch:
            queue = single.database["queue"]
            await queue.create_index([("status", 1), ("seq", 1)])
            await queue.insert_many(
                [{"status": "pending", "seq": seq} for seq in range(groups * GROUP)]
            )
            sides = {
                "queue": queue_side(queue),
                "single": ledger_side(single, 1),
                "batch": ledger_side(batch, GROUP),
            }
            rates: dict[str, list[float]] = {side: [] for side in sides}
            for number in range(rounds + 1):
                for name, side in sides.items():
                    seconds = await side.seconds(workers, slots)
                    if number > 0:  # connections are opened in the first
                        rates[name].append(slots / seconds)
        results[workers] = {
            **{f"{side}_per_s": round(statistics.median(x)) for side, x in rates.items()},
            "single_ratio": median_ratio(rates["single"], rates["queue"]),
            "batch_ratio": median_ratio(rates["batch"], rates["queue"]),
        }
        print(f"claims, {workers} workers: {results[workers]}", flush=True)
    return results


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 2)


async def record_rate(url: str, workers: int, groups: int) -> float:
    """Records per second from the claim to the row."""
    async with fresh_run(url, groups) as database:
        began = time.perf_counter()
        await ModellessSampler(database, workers).run()
        elapsed = time.perf_counter() - began
        rows = await database.rows.count_documents({})
        assert rows == groups * GROUP, f"{rows} rows of {groups * GROUP} records"
        return groups * GROUP / elapsed


class WriteCounter(monitoring.CommandListener):
    """Counts write commands, and the documents they wrote."""

    def __init__(self) -> None:
        self.commands: Counter[str] = Counter()
        self.documents = 0

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        pass

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        if event.command_name in ("insert", "update", "delete"):
            self.commands[event.command_name] += 1
            self.documents += event.reply["n"]
        elif event.command_name == "findAndModify":
            self.commands[event.command_name] += 1
            self.documents += event.reply["lastErrorObject"]["n"]

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        pass


async def count_writes(url: str, groups: int) -> dict[int, dict[str, Any]]:
    """Count write commands and documents of a record, after all timings, because it takes time."""
    counter = WriteCounter()
    monitoring.register(counter)
    results = {}
    for workers in WORKERS:
        async with fresh_run(url, groups) as database:
            counter.commands.clear()
            counter.documents = 0
            await ModellessSampler(database, workers).run()
            records = groups * GROUP
            results[workers] = {
                "writes_per_turn": round(counter.commands.total() / records / TURNS, 2),
                "documents_per_turn": round(counter.documents / records / TURNS, 2),
                "commands_per_record": {
                    name: round(count / records, 2) for name, count in counter.commands.items()
                },
            }
        print(f"writes, {workers} workers: {results[workers]}", flush=True)
    return results


class AgentLightning:
    """The other store, in a separate process that is idle while ours is measured."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [ENVIRONMENT / "bin/python", Path(__file__).with_name("agentlightning_store.py"), url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        )
        self._url = url

    def rate(self, workers: int, rollouts: int) -> float:
        """Rollouts per second."""
        assert self._process.stdin is not None and self._process.stdout is not None
        database = f"agentlightning-{uuid4().hex[:12]}"
        attributes = {
            "prompt_token_ids": list(range(PROMPT)),
            "response_token_ids": list(range(OUTPUT)),
            "response_logprobs": [-0.5] * OUTPUT,
            "input": MESSAGE,
            "output": TEXT,
            "finish_reason": "stop",
        }
        job = {
            "database": database,
            "workers": workers,
            "rollouts": rollouts,
            "turns": [attributes] * TURNS,
        }
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"agentlightning's store ended with {self._process.wait()}")
        with pymongo.MongoClient(self._url) as client:
            client.drop_database(database)
        return float(json.loads(answer)["per_second"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure_records(url: str, rounds: int, groups: int, rollouts: int) -> dict[int, dict[str, Any]]:
    """Both sides in turn; `rollouts`: at least so many, and one for each worker, of the other."""
    other = AgentLightning(url) if (ENVIRONMENT / "bin/python").exists() else None
    if other is None:
        print("no agentlightning to compare with: run this with --setup once", flush=True)
    results = {}
    for workers in WORKERS:
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(rounds):
            ours.append(uvloop.run(record_rate(url, workers, groups)))
            if other is not None and workers in COMPARED:
                theirs.append(other.rate(workers, max(workers, rollouts)))
        results[workers] = {"per_s": round(statistics.median(ours))}
        if theirs:
            results[workers]["agentlightning_per_s"] = round(statistics.median(theirs), 1)
            results[workers]["ratio"] = median_ratio(ours, theirs)
        print(f"records, {workers} workers: {results[workers]}", flush=True)
    if other is not None:
        other.close()
    return results


def set_up() -> None:
    """Make agentlightning's environment."""
    venv.create(ENVIRONMENT, with_pip=True, clear=True)
    subprocess.run(
        [ENVIRONMENT / "bin/python", "-m", "pip", "install", "--quiet", AGENTLIGHTNING], check=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--setup", action="store_true", help=f"install {AGENTLIGHTNING} first")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds, < 60 s")
    parser.add_argument("--save", action="store_true", help="write results/ledger.json")
    args = parser.parse_args()
    if args.setup:
        set_up()
    rounds, groups, rollouts = (1, 24, 48) if args.quick else (5, 100, 160)
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedMongod(Path(folder) / "data", Path(folder) / "mongod.log") as mongod,
    ):
        claims = uvloop.run(measure_claims(mongod.url, 7 if args.quick else 25))
        records = measure_records(mongod.url, rounds, groups, rollouts)
        assert mongod.pid is not None
        costs = uvloop.run(measure_costs(mongod.url, mongod.pid, max(groups, 100)))
        writes = uvloop.run(count_writes(mongod.url, groups))
        with pymongo.MongoClient[dict[str, Any]](mongod.url) as client:
            server = client.server_info()["version"]
    result = {
        **{f"claim_ratio_{n}": claims[n]["single_ratio"] for n in CLAIMERS},
        **{f"records_per_second_{n}": records[n]["per_s"] for n in WORKERS},
        "writes_per_turn": max(writes[n]["writes_per_turn"] for n in COMPARED),
        "vs_agentlightning": min(
            (records[n]["ratio"] for n in COMPARED if "ratio" in records[n]), default=None
        ),
        "claims": claims,
        "records": records,
        "writes": writes,
        "mongod_us": costs,
        "rounds": rounds,
        "mongod": server,
    }
    finish("ledger", result, ("pymongo",), save=args.save)


if __name__ == "__main__":
    main()
