"""What traces (`--otlp_endpoint`) cost a sampler process: CPU per turn with and without, in
alternating rounds of `sampler.py`'s real sampler.

The receiver is a process of its own, as are service, tools and mongod. Turns have a thought of 100
words and results of 200. All Records are traced.

    python benchmarks/traces.py [--quick] [--save]

`cpu_ratio`: CPU per turn with traces over that without, the median of pairs of rounds.
`thread_share`: CPU of the thread that makes and sends traces over all of the sampler, which is
hardly disturbed by other work on the machine.
"""

import asyncio
import logging
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import uvloop
from report import finish, parse_flags
from sampler import Addresses, run_sampler
from scripted_services import DEMO_MODEL, Script, model_service, tool_server, trace_receiver

from agentrl.databases.mongod import EmbeddedMongod
from agentrl.rollout.traces.export import COLLECT_S

SCRIPT = Script(latency_s=1.0, turns=4, tool_median_s=0.5, thought_words=100, result_words=200)
AT_ONCE, RECORDS = 128, 256
FLAGS = ("--max_tokens", "8000")


@dataclass
class ThreadWatch:
    """CPU seconds of the thread that sends traces, from here until the last record is sent.

    `late_s`: those of them after the records' end.
    """

    cpu_s: float = 0.0
    late_s: float = 0.0

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        """Watch."""
        [thread] = [thread for thread in threading.enumerate() if thread.name == "traces"]
        assert thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)
        before = time.clock_gettime(clock)
        yield
        ended = time.clock_gettime(clock)
        await asyncio.sleep(2 * COLLECT_S)
        self.cpu_s = time.clock_gettime(clock) - before
        self.late_s = self.cpu_s - (ended - before)


def measure(addresses: Addresses, receiver: str | None, records: int) -> tuple[float, float]:
    """CPU seconds of a run of the sampler, and of its thread for traces."""
    watch, flags = ThreadWatch(), FLAGS
    watches: list[Callable[[], AbstractAsyncContextManager[None]]] = []
    if receiver is not None:
        flags, watches = (*FLAGS, "--otlp_endpoint", receiver), [watch]
    run = run_sampler(addresses, AT_ONCE, records, DEMO_MODEL, flags, watches)
    return uvloop.run(run).cpu_s + watch.late_s, watch.cpu_s


def main() -> None:
    args = parse_flags(__doc__ or "")
    logging.disable(logging.WARNING)
    rounds, records = (2, AT_ONCE) if args.quick else (5, RECORDS)
    per_turn: dict[bool, list[float]] = {False: [], True: []}
    shares: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedMongod(Path(folder) / "data", Path(folder) / "mongod.log") as mongod,
        model_service(SCRIPT) as model,
        tool_server() as tools,
        trace_receiver() as receiver,
    ):
        addresses = Addresses(mongod.url, model, tools)
        measure(addresses, None, AT_ONCE)  # imports and caches
        for number in range(2 * rounds):
            traced = number % 4 in (1, 2)  # who is first alternates too
            cpu_s, thread_s = measure(addresses, receiver if traced else None, records)
            per_turn[traced].append(1000 * cpu_s / records / SCRIPT.turns)
            if traced:
                shares.append(thread_s / cpu_s)
            told = f"{'with' if traced else 'without'} traces: {per_turn[traced][-1]:.2f} ms a turn"
            print(told, f"{shares[-1]:.3f}" if traced else "", flush=True)
    without, with_traces = median(per_turn[False]), median(per_turn[True])
    pairs = zip(per_turn[True], per_turn[False], strict=True)
    result = {
        "cpu_ratio": round(median(one / other for one, other in pairs), 3),
        "thread_share": round(median(shares), 3),
        "cpu_ms_per_turn_without": round(without, 2),
        "cpu_ms_per_turn_with": round(with_traces, 2),
        "rounds": {"without": per_turn[False], "with": per_turn[True]},
    }
    packages = ("opentelemetry-exporter-otlp-proto-http", "opentelemetry-proto")
    finish("traces", result, packages, save=args.save)


if __name__ == "__main__":
    main()
