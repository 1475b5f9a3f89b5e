"""A training step over two processes, by every arrangement of them: NCCL between GPUs, else gloo.

`tests/dtensor_bench.py` launches the processes as a run does. Each of its arrangements is compared
with this process alone.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from dtensor_bench import difference, measure
from machine import CheckFailed, Figures, Machine, require
from on_device import mesh_of

_BENCH = Path(__file__).parents[1] / "dtensor_bench.py"
_ALLOWED = {True: 2e-2, False: 1e-4}  # relative, in bfloat16 and in float32


def two_processes(machine: Machine, figures: Figures) -> None:
    """Loss and gradient norm of a step, and tokens a second of each arrangement."""
    command = [sys.executable, str(_BENCH), "--world-size", "2", "--warmup", "0", "--steps", "1"]
    if not machine.on_gpu:
        command += ["--only", "data", "tensor"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise CheckFailed(f"two processes ended with status {ended.returncode} and no figures")
    arrangements = json.loads(lines[-1])["arrangements"]
    figures.add(**{
        f"{name}_tokens_per_s".replace(" ", "_"): found["tokens_per_s"]
        for name, found in arrangements.items()
    })  # fmt: skip
    alone = measure(mesh_of(machine), argparse.Namespace(experts=False, warmup=0, steps=1))
    largest = difference({"alone": alone} | arrangements)
    figures.add(largest_difference=largest)
    allowed = _ALLOWED[machine.on_gpu]
    require(
        largest <= allowed,
        f"loss or gradient norm of two processes differs by {largest:.2g} from one's, allowed are "
        f"{allowed:g}",
    )
