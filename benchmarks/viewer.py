"""`agentrl view` on a large run: how long its pages take, its memory, and what a live page costs.

    python benchmarks/viewer.py [--quick] [--save] [--folder DIR] [--live]

A small run of the demo is launched. A run of 100,000 Records with 10 turns each is made of its
documents (`viewer_run.py`), and one Record of 200 turns and 128,000 tokens. Then the real
`agentrl view` is asked over HTTP, with a mongod of the run's own, as a user has it (256 MB of
cache). `--folder` keeps the runs, for a further call.

    pages          seconds of each page: median, p95 and most, of other steps, groups and Records
                   each time; `cpu_s`: what viewer and mongod computed for one, which other load of
                   the machine changes little
    search         a text of many turns, of few and of none; `looked_at`: Records that one page read
    memory_mb      resident memory of the server, the most
    long_record    the page and the tokens of the long Record; `browser_s`: until Chromium has drawn
                   the conversation and the tokens (where `BROWSER_PYTHON` is set, see
                   `tests/run_browser.sh`)
    live           with `--live`: CPU seconds of mongod per second of a demo run with and without an
                   open page, in turn; `page_share`: what the page adds
"""

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
from ledger_costs import ServerClock
from pymongo import MongoClient
from report import finish, parse_flags
from viewer_run import LONG_RECORD, Filled, fill

from agentrl.databases.mongod import EmbeddedMongod
from agentrl.launcher.deployment import REPOSITORY

GROUPS, QUICK_GROUPS = 12_500, 400  # of 8 Records
TIMES, QUICK_TIMES = 30, 8
SOURCE, LARGE = "demo", "large"
VISIT = REPOSITORY / "tests/browser/visit.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
_LIVE_S = 20.0
_LIVE_ROUNDS = 3
_REFRESH_S = 5.0  # of the page of a run

Result = dict[str, Any]


def launch_demo(folder: Path) -> None:
    """A finished run of the demo, whose documents the large run is made of."""
    if not (folder / "assets").exists():
        (folder / "assets").symlink_to(REPOSITORY / "assets")
    subprocess.run(
        [sys.executable, "-m", "agentrl.cli", "launch", "grpo", SOURCE, "--max_steps", "6",
         "--eval_rollouts", "1"],
        cwd=folder, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def make_large(folder: Path, groups: int) -> Filled:
    """The large run in `folder`."""
    large = folder / "output" / LARGE
    with (
        EmbeddedMongod(folder / "output" / SOURCE / "mongo", folder / "source.log") as source,
        EmbeddedMongod(large / "mongo", folder / "large.log", cache_gb=4) as target,
        MongoClient(source.url, tz_aware=True) as client,
    ):
        return asyncio.run(fill(client[SOURCE], target.url, LARGE, large, groups))


@contextmanager
def viewer(folder: Path) -> Iterator[tuple[str, int]]:
    """The address that `agentrl view` prints, and its process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl.cli", "view", LARGE, "--port", "0"],
        cwd=folder, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("open http://"), line
        yield line.split()[1], process.pid
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0


class Processors:
    """The processor time of the viewer and of the run's mongod."""

    def __init__(self, folder: Path, viewer: int) -> None:
        lock = folder / "output" / LARGE / "mongo" / "mongod.lock"
        self._clocks = [ServerClock(viewer), ServerClock(int(lock.read_text()))]

    def seconds(self) -> float:
        return sum(clock.seconds() for clock in self._clocks)


def measure_pages(
    client: httpx2.Client, filled: Filled, times: int, processors: Processors
) -> Result:
    """Seconds of each page."""
    chosen = random.Random(0)
    run = f"/run/{LARGE}"
    rows = client.get(f"{run}/records").text
    record_ids = sorted(set(re.findall(r"/records/(train-[^\"/]+-t\d+-a\d+)\"", rows)))
    assert record_ids, "the page of records shows none"

    def some_step() -> int:
        return chosen.randint(1, filled.steps)

    def some_record() -> str:
        found = client.get(f"{run}/steps/{some_step()}").text
        return chosen.choice(re.findall(r"/records/(train-[^\"/]+)\"", found))

    pages: dict[str, Callable[[], str]] = {
        "runs": lambda: "/",
        "run": lambda: run,
        "charts": lambda: f"{run}/charts",
        "step": lambda: f"{run}/steps/{some_step()}",
        "tasks": lambda: f"{run}/tasks",
        "tasks, most learned": lambda: f"{run}/tasks?order=learned",
        "tasks with a text": lambda: (
            f"{run}/tasks?order=hardest&text=train-00{some_step() % 100:02}"
        ),
        "group": lambda: f"{run}/groups/{some_record().rpartition('-t')[0]}",
        "records, newest": lambda: f"{run}/records",
        "records, worst": lambda: f"{run}/records?order=worst",
        "records, best": lambda: f"{run}/records?order=best",
        "records by score": lambda: f"{run}/records?where=score<0.5",
        "records of a step": lambda: f"{run}/records?where=step={some_step()}",
        "records by turns and calls": lambda: f"{run}/records?where=turns=10;tools>30",
        "record": lambda: f"{run}/records/{some_record()}",
        "tokens": lambda: f"{run}/records/{some_record()}/tokens",
        "json": lambda: f"{run}/records/{some_record()}/json",
        "compare": lambda: f"{run}/compare",
        "compare epochs": lambda: f"{run}/compare?first=train:0&second=train:1",
        "failures": lambda: f"{run}/failures",
    }
    return {name: _timed(client, path, times, processors) for name, path in pages.items()}


def measure_search(client: httpx2.Client, times: int, processors: Processors) -> Result:
    """Seconds of a search in texts of turns, and how many Records a page looked at."""
    found: Result = {}
    for name, text in (
        ("many turns", "answer"), ("few turns", "train-0-long"), ("no turn", "no turn says this"),
    ):  # fmt: skip
        path = f"/run/{LARGE}/records?text={text}"
        found[name] = _timed(client, lambda path=path: path, max(5, times // 3), processors)
        said = re.search(r"data-looked=\"(\d+)\"", client.get(path).text)
        found[name]["looked_at"] = int(said[1]) if said else None
    return found


def measure_long(
    client: httpx2.Client, address: str, times: int, folder: Path, processors: Processors
) -> Result:
    """The Record of 200 turns, as the server and a browser have it."""
    path = f"/run/{LARGE}/records/{LONG_RECORD}"
    tokens = client.get(f"{path}/tokens").json()
    result: Result = {
        "turns": len(tokens),
        "tokens": sum(len(turn["prompt_ids"]) + len(turn["output_ids"]) for turn in tokens),
        "page": _timed(client, lambda: path, times, processors),
        "tokens_page": _timed(client, lambda: f"{path}/tokens", times, processors),
    }
    if "BROWSER_PYTHON" not in os.environ:
        return result
    visits = [
        {"path": path, "name": "talk", "do": [["count", ".turn"]]},
        {"path": path, "name": "tokens", "do": [["timed", [["click", "#tab-tokens"],
         ["wait_for", ".t", 10000]]],
         ["timed", [["press", "End"], ["wait_for", "#tokens-199", 10000]]]]},
    ]  # fmt: skip
    done = subprocess.run(
        [os.environ["BROWSER_PYTHON"], str(VISIT), address, str(folder)],
        input=json.dumps(visits), capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    talk, shown = json.loads(done.stdout)
    assert talk["kept"] == [len(tokens)], talk["kept"]
    result["browser_s"] = {
        "conversation": round(talk["seconds"], 3),
        "tokens": round(shown["kept"][0], 3),
        "end of the tokens": round(shown["kept"][1], 3),
    }
    return result


def _timed(
    client: httpx2.Client, path: Callable[[], str], times: int, processors: Processors
) -> Result:
    paths = [path() for _ in range(times)]
    before = processors.seconds()
    seconds = []
    for asked in paths:
        began = time.monotonic()
        answer = client.get(asked)
        seconds.append(time.monotonic() - began)
        assert answer.status_code == 200, f"{asked}: {answer.status_code} {answer.text[:500]}"
    seconds.sort()
    return {
        "cpu_s": round((processors.seconds() - before) / times, 4),
        "median_s": round(median(seconds), 4),
        "p95_s": round(seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))], 4),
        "max_s": round(seconds[-1], 4),
    }


def resident_mb(pid: int, field: str = "VmHWM") -> float:
    """Resident memory of a process, the most so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    return round(int(re.search(rf"{field}:\s+(\d+)", status)[1]) / 1024, 1)  # type: ignore[index]


def measure_large(folder: Path, filled: Filled, times: int) -> Result:
    """All figures of the large run."""
    with (
        viewer(folder) as (address, pid),
        httpx2.Client(
            base_url=address.partition("/run/")[0], follow_redirects=True, timeout=60
        ) as client,
    ):
        at_start = resident_mb(pid)
        began = time.monotonic()
        assert client.get(address).status_code == 200
        first = time.monotonic() - began
        processors = Processors(folder, pid)
        pages = measure_pages(client, filled, times, processors)
        search = measure_search(client, times, processors)
        long = measure_long(client, address, max(5, times // 3), folder, processors)
        return {
            "first_page_s": round(first, 3),
            "pages": pages,
            "slowest_page_p95_s": max(each["p95_s"] for each in pages.values()),
            "search": search,
            "long_record": long,
            "memory_mb": {"start": at_start, "most": resident_mb(pid)},
        }


def measure_live(folder: Path) -> Result:
    """What an open page of a live run adds to mongod's CPU: rounds with and without it, in turn."""
    place = folder / "live"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (place / "assets").symlink_to(REPOSITORY / "assets")
    with (place / "launch.log").open("w") as log:
        training = subprocess.Popen(
            [sys.executable, "-m", "agentrl.cli", "launch", "grpo", LARGE, "--max_steps", "100000",
             "--eval_steps", "0"],
            cwd=place, env=ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not re.search(r"step=[1-9]", (place / "launch.log").read_text()):
            assert training.poll() is None and time.monotonic() < deadline, "no step was taken"
            time.sleep(1)
        lock = place / "output" / LARGE / "mongo" / "mongod.lock"
        clock = ServerClock(int(lock.read_text()))
        alone, watched = 0.0, 0.0
        with viewer(place) as (address, _), httpx2.Client(follow_redirects=True) as client:
            client.get(address)
            page = address.partition("?")[0]
            for _ in range(_LIVE_ROUNDS):
                alone += _cpu(clock, lambda: None)
                watched += _cpu(clock, lambda: client.get(page).raise_for_status())
        seconds = _LIVE_ROUNDS * _LIVE_S
        return {
            "mongod_cpu_alone": round(alone / seconds, 4),
            "mongod_cpu_watched": round(watched / seconds, 4),
            "page_adds_of_a_core": round((watched - alone) / seconds, 4),
            "page_share": round((watched - alone) / alone, 4),
        }
    finally:
        training.terminate()
        training.wait(timeout=120)


def _cpu(clock: ServerClock, look: Callable[[], object]) -> float:
    """Seconds of mongod's CPU in `_LIVE_S`, with `look` as often as the page does it."""
    began, deadline = clock.seconds(), time.monotonic() + _LIVE_S
    while time.monotonic() < deadline:
        look()
        time.sleep(_REFRESH_S)
    return clock.seconds() - began


def main(argv: Sequence[str] | None = None) -> None:
    def flags(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--folder", type=Path, help="keep the runs here")
        parser.add_argument("--live", action="store_true", help="a live run only")

    assert __doc__ is not None
    arguments = parse_flags(__doc__, list(argv) if argv is not None else None, flags)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if arguments.live:
            finish("viewer_live", measure_live(folder), ("pymongo", "aiohttp"), save=arguments.save)
            return
        known = folder / "filled.json"
        if not known.is_file():
            launch_demo(folder)
            began = time.monotonic()
            made = make_large(folder, QUICK_GROUPS if arguments.quick else GROUPS)
            known.write_text(json.dumps({**made.__dict__, "fill_s": time.monotonic() - began}))
        stored = json.loads(known.read_text())
        filled = Filled(stored["records"], stored["turns"], stored["steps"])
        result = measure_large(folder, filled, QUICK_TIMES if arguments.quick else TIMES)
        finish(
            "viewer",
            {"records": filled.records, "turns": filled.turns, "steps": filled.steps, **result},
            ("pymongo", "aiohttp"),
            save=arguments.save,
        )


if __name__ == "__main__":
    main()
