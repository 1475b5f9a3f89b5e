"""The reference servers as processes."""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx2


def reference_server(name: str) -> str:
    """The program of a reference server."""
    return str(Path(os.environ["REFERENCE_SERVERS"]) / f"server-{name}" / "dist" / "index.js")


class ListeningServer:
    """`server-everything` over HTTP or SSE; may be killed and started again at its port."""

    def __init__(self, transport: str, port: int) -> None:
        self.port = port
        self._command = ["node", reference_server("everything"), transport]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, env={**os.environ, "PORT": str(self.port)},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self._process.poll() is None, "the server ended at once"
            try:
                httpx2.get(f"http://127.0.0.1:{self.port}/")
                return
            except httpx2.TransportError:
                time.sleep(0.05)
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def node(name: str, *arguments: str) -> dict[str, Any]:
    """A reference server as a config file starts it."""
    return {"command": "node", "args": [reference_server(name), *arguments]}
