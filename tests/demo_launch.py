"""A whole launch of the demo in a folder of a test's own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl.launcher.deployment import REPOSITORY


def demo_lines(count: int) -> list[str]:
    """The first lines of the demo's task file."""
    return (REPOSITORY / "assets/demo/train.jsonl").read_text().splitlines()[:count]


def launch_demo(
    folder: Path, *flags: str, python_path: Sequence[Path] = ()
) -> "subprocess.CompletedProcess[str]":
    """`agentrl launch grpo demo` in `folder`, which has nothing but a test's files, to its end.

    `python_path`: folders with modules that the run imports, beside AgentRL's and the test's.
    """
    path = (REPOSITORY / "src", folder, *python_path)
    if not (folder / "assets").exists():
        (folder / "assets").symlink_to(REPOSITORY / "assets")
    return subprocess.run(
        [sys.executable, "-m", "agentrl.cli", "launch", "grpo", "demo", "--eval_steps", "0",
         *flags],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        timeout=400,
    )  # fmt: skip
