"""Flags and output of benchmarks: one line of JSON, written to `results/` with `--save`."""

import argparse
import datetime
import json
import os
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def parse_flags(
    description: str,
    argv: list[str] | None = None,
    add: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> argparse.Namespace:
    """`--quick` and `--save`, and what `add` adds."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less of everything, < 60 s")
    parser.add_argument("--save", action="store_true", help="write the results beside this")
    add(parser)
    return parser.parse_args(argv)


def finish(
    name: str, result: Mapping[str, object], packages: tuple[str, ...], *, save: bool
) -> None:
    """Print the result, with date, machine and versions of `packages`."""
    whole = {
        "benchmark": name,
        **result,
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }
    if save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(whole, indent=2) + "\n")
    print(json.dumps(whole))


def machine() -> str:
    """Processor, cores and memory."""
    info = Path("/proc/cpuinfo").read_text()
    model = next((x.partition(":")[2].strip() for x in info.splitlines() if "model name" in x), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{platform.machine()} {model}, {os.cpu_count()} cores, {memory:.0f} GiB"
