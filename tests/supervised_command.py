"""`agentrl sft` and `agentrl dpo` of the demo's model, started in a folder as people start them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parents[1] / "assets" / "demo" / "model"


def start(
    verb: str, folder: Path, rows: Path, *flags: str, processes: int = 1
) -> subprocess.Popen[str]:
    """Train on `rows`, which are held out, too."""
    command = [
        sys.executable, "-m", "agentrl.cli", verb, "--model", str(DEMO), "--train_file", str(rows),
        "--eval_file", str(rows), "--per_device_train_batch_size", "8", "--learning_rate", "1e-3",
        "--max_tokens", "384", "--use_cpu", *flags,
    ]  # fmt: skip
    return subprocess.Popen(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "NUM_PROCESSES": str(processes)},
    )  # fmt: skip


def said(started: subprocess.Popen[str], status: int = 0) -> str:
    """What the command prints until it ends with `status`."""
    text = started.communicate(timeout=240)[0]
    assert started.returncode == status, text
    return text


def metrics(folder: Path, run: str) -> list[dict[str, Any]]:
    """The lines of the run's `metrics.jsonl`."""
    file = folder / "output" / run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def runs(folder: Path) -> list[str]:
    """The lines of `agentrl runs` there."""
    command = [sys.executable, "-m", "agentrl.cli", "runs"]
    listed = subprocess.run(command, cwd=folder, text=True, capture_output=True, check=True)
    return listed.stdout.splitlines()
