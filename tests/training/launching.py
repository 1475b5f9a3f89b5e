"""Several processes of a program at once, as `accelerate launch` starts them."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CONFIG = HERE.parents[1] / "assets" / "fsdp2_cpu.yml"


def launch(program: Path, processes: int, out: Path, **environment: str) -> subprocess.Popen[bytes]:
    """Start `program` with the argument `out`, which is made for it and gets its `log`."""
    out.mkdir(exist_ok=True)
    log = (out / "log").open("wb")
    return subprocess.Popen(
        [
            sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIG),
            "--num_processes", str(processes), "--main_process_port", "0", str(program), str(out),
        ],
        stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def on_two_processes(flags: list[str]) -> "subprocess.CompletedProcess[str]":
    """The trainer with these flags, as two processes, until they end."""
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIG),
        "--num_processes", "2", "--main_process_port", "0", "-m", "agentrl.training.trainer",
    ]  # fmt: skip
    return subprocess.run(
        [*command, *flags], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=100, check=False,
    )  # fmt: skip
