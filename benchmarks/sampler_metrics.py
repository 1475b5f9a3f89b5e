"""What `--metrics_port` costs a sampler: CPU per turn, in interleaved rounds with and without it.

The run is that of `sampler.py`. Another process reads the figures, as often as Prometheus does in
our example.

    python benchmarks/sampler_metrics.py [--quick] [--save] [--every SECONDS]

`ratio` is the median of the rounds' own ratios. On a machine that others use it is noise: `share`
is the CPU time of the reads themselves over that of the sampler.
"""

import logging
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import median

import uvloop
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry
from report import finish, parse_flags
from sampler import PACKAGES, SCRIPT, Addresses, run_sampler
from scripted_services import model_service, tool_server

from agentrl.databases.mongod import EmbeddedMongod
from agentrl.metrics import exposure

AT_ONCE = 64
_READER = """
import json, sys, time
from pathlib import Path
from urllib.request import urlopen
targets = Path(sys.argv[1])
while not targets.exists():
    time.sleep(0.1)
[entry] = json.loads(targets.read_text())
while True:
    began = time.monotonic()
    text = urlopen(f"http://{entry['targets'][0]}/metrics").read()
    print(len(text), flush=True)
    time.sleep(max(0.0, float(sys.argv[2]) - (time.monotonic() - began)))
"""


@asynccontextmanager
async def reading(targets: Path, every_s: float, sizes: list[int]) -> AsyncIterator[None]:
    """Read the figures meanwhile, in another process; `sizes` gets those of the answers."""
    command = [sys.executable, "-c", _READER, str(targets), str(every_s)]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield
    finally:
        reader.terminate()
        output, _ = reader.communicate()
        sizes += map(int, output.split())


def timed(make: Callable[..., Handler], seconds: list[float]) -> Callable[..., Handler]:
    """`make`, whose handlers add the CPU time of each answer to `seconds`."""

    def make_timed(registry: CollectorRegistry) -> Handler:
        answer = make(registry)

        async def handler(request: web.Request) -> web.StreamResponse:
            began = time.thread_time()
            response = await answer(request)  # it awaits nothing
            seconds.append(time.thread_time() - began)
            return response

        return handler

    return make_timed


def main() -> None:
    def add(parser: ArgumentParser) -> None:
        parser.add_argument("--every", type=float, default=15.0, help="seconds between two reads")

    args = parse_flags(__doc__ or "", add=add)
    logging.disable(logging.WARNING)
    rounds, records = (1, AT_ONCE) if args.quick else (8, 2 * AT_ONCE)
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedMongod(Path(folder) / "data", Path(folder) / "mongod.log") as mongod,
        model_service(SCRIPT) as model,
        tool_server() as tools,
    ):
        addresses = Addresses(mongod.url, model, tools)
        output = Path(folder) / "run"
        targets = output.with_name("run.metrics_targets.json")
        sizes: list[int] = []
        seconds: list[float] = []
        exposure.make_aiohttp_handler = timed(exposure.make_aiohttp_handler, seconds)
        cpu_with = 0.0
        metrics = ("--metrics_port", "0", "--output_dir", str(output))
        uvloop.run(run_sampler(addresses, AT_ONCE, AT_ONCE))  # what is loaded once, is now
        pairs: list[tuple[float, float]] = []
        for number in range(rounds):
            found = {}
            # Which comes first changes, so that a machine that slows down favours neither.
            for on in (False, True) if number % 2 else (True, False):
                flags = ("--max_tokens", "2000", *(metrics if on else ()))
                # Beside both rounds, as it takes a core's time to start; here it finds nothing.
                read = targets if on else output / "nothing"
                watches = [partial(reading, read, args.every, sizes)]
                measured = uvloop.run(
                    run_sampler(addresses, AT_ONCE, records, flags=flags, watches=watches)
                )
                cpu_with += measured.cpu_s if on else 0.0
                found[on] = 1000 * measured.cpu_s / measured.records / SCRIPT.turns
            pairs.append((found[False], found[True]))
            print(f"CPU ms per turn without and with: {pairs[-1]}", flush=True)
    assert sizes, "nothing was read"
    result = {
        "ratio": round(median(on / off for off, on in pairs), 4),
        "ratios": [round(on / off, 4) for off, on in pairs],
        "cpu_ms_per_turn": [[round(each, 3) for each in pair] for pair in pairs],
        "share": round(sum(seconds) / cpu_with, 5),
        "cpu_ms_per_read": round(1000 * median(seconds), 2),
        "reads": len(seconds),
        "bytes_of_a_read": sizes[-1],
        "seconds_between_reads": args.every,
        "at_once": AT_ONCE,
        "records": records,
    }
    finish("sampler_metrics", result, PACKAGES, save=args.save)


if __name__ == "__main__":
    main()
