"""Time and memory until a run's first sample, by the number of task lines.

For each number of lines (300 bytes each, groups of eight) three processes, one after the other, on
a mongod of the benchmark's own, each with the code of launcher and trainer in their order:

    first       a new run: the launcher's check, digest, index, first tasks; then a sampler's claim
    again       the same run once more while its check was not complete
    restart     the same once the check was complete: nothing of the file is read

`seconds` go from the first look at the file to the claim, without imports, model and services;
`cpu_seconds` are those of the process within them, which other work on the machine changes less.
`memory_mb` is by how much the process's peak rises above what it had before; `read_mb` what it read
from files. `check_seconds` is how long the whole check takes that goes on beside the run, with all
of a core (a run gives it a quarter).

    python benchmarks/feeding.py [--quick] [--save]
"""

import asyncio
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import finish, parse_flags

from agentrl.configs import parse_config
from agentrl.databases.connection import connect
from agentrl.databases.documents import Split
from agentrl.databases.feeder import TaskFeeder
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.task_file import known_digest, open_tasks
from agentrl.databases.tasks import TaskLedger
from agentrl.launcher.preflight import check_tasks
from agentrl.training.run.entry import TASKS

GROUP, LOW_WATER = 8, 32
_WORDS = [
    "the",
    "of",
    "and",
    "train",
    "speed",
    "tokens",
    "apples",
    "how",
    "many",
    "kilometres",
    "between",
    "city",
    "box",
    "sum",
]


def write_lines(path: Path, count: int) -> None:
    """A task file."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            query = f"{number}: {' '.join(rng.choices(_WORDS, k=35))}?"
            line = {
                "id": f"task-{number}", "query": query, "answer": str(number % 1000),
                "scorer": "math", "answer_schema": "boxed", "level": number % 7,
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")


def begin(path: Path, output: Path, url: str, run: str, whole_check: bool) -> dict[str, float]:
    """Measure one start in this process."""
    flags = ["--train_file", str(path), "--output_dir", str(output), "--run_name", run]
    config = parse_config(flags)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read = _bytes_read()
    began, busy = time.perf_counter(), time.process_time()
    checks = check_tasks(config)
    known_digest(path, output / TASKS)
    lines = open_tasks(path, output / TASKS)
    asyncio.run(_feed_and_claim(lines, url, run))
    seconds = time.perf_counter() - began
    measured = {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(time.process_time() - busy, 2),
        "read_mb": round((_bytes_read() - read) / 1e6, 1),
    }
    if whole_check:
        began = time.perf_counter()
        checks[0].advance(float("inf"))
        measured["check_seconds"] = round(time.perf_counter() - began, 1)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {**measured, "memory_mb": round((after - before) / 1024, 1)}


async def _feed_and_claim(lines: Any, url: str, run: str) -> None:
    database = await connect(url, run)
    feeder = TaskFeeder(
        database, lines, [], num_generations=GROUP, eval_rollouts=1, epochs=1,
        low_water=LOW_WATER, seed=1,
    )  # fmt: skip
    await feeder.start()
    ledger = TaskLedger(database, "sampler", lease_seconds=60, max_failures=1)
    assert await ledger.claim(Split.TRAIN, count=GROUP)
    await database.close()


def _bytes_read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def measure(count: int, folder: Path, url: str) -> dict[str, Any]:
    """Measure the three starts of a run with `count` lines."""
    path = folder / f"{count}.jsonl"
    write_lines(path, count)
    os.utime(path, (1, 1))  # not of this moment
    output = folder / f"run-{count}"
    output.mkdir()
    result: dict[str, Any] = {"lines": count, "file_mb": round(path.stat().st_size / 1e6, 1)}
    for start, whole in (("first", False), ("again", True), ("restart", False)):
        command = [
            sys.executable,
            __file__,
            "--start",
            str(path),
            str(output),
            url,
            str(int(whole)),
        ]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        result[start] = json.loads(told.splitlines()[-1])
        print(count, start, result[start], file=sys.stderr, flush=True)
    path.unlink()
    return result


def main(quick: bool, save: bool) -> None:
    counts = [1000, 10_000] if quick else [10_000, 100_000, 1_000_000]
    with (
        tempfile.TemporaryDirectory() as name,
        EmbeddedMongod(Path(name) / "data", Path(name) / "log") as mongod,
    ):
        measured = [measure(count, Path(name), mongod.url) for count in counts]
    finish("feeding", {"runs": measured}, ("pymongo",), save=save)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--start"]:
        file, output, url, whole = sys.argv[2:]
        result = begin(Path(file), Path(output), url, Path(output).name, whole == "1")
        print(json.dumps(result))
    else:
        given = parse_flags(__doc__ or "")
        main(given.quick, given.save)
