"""The demo's scripts, importable by name, and its tool server as a process of its own."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "assets" / "demo"
sys.path.insert(0, str(DEMO))  # its scripts import each other as a script does

START_TIMEOUT = 30.0  # seconds


def read_tasks(split: str) -> list[dict[str, str]]:
    """The committed task lines of a split."""
    lines = (DEMO / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    return DEMO


@pytest.fixture(scope="session")
def train_tasks() -> list[dict[str, str]]:
    return read_tasks("train")


@pytest.fixture(scope="session")
def heldout_tasks() -> list[dict[str, str]]:
    return read_tasks("heldout")


@pytest.fixture(scope="session")
def tool_server_url() -> Iterator[str]:
    """URL of a running tool server over the world of the committed tasks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(DEMO / "tool_server.py"), "--port", str(port)])
    try:
        wait_for_port(port, process)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        process.wait(timeout=10)


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """Return once the port accepts connections; fail when the process ended or took too long."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the tool server exited with {process.returncode}"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"the tool server did not listen on port {port} in {START_TIMEOUT} s")
