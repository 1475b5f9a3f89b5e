"""The server of `deploy/sandbox` as a process of its own, and clients of it."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import psutil
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "sandbox"
SERVER = FOLDER / "server.py"
TOKEN = "token-that-no-program-may-see"
_START_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Answer:
    """What a tool gave."""

    text: str
    is_error: bool


class Sandbox:
    """An MCP session with the server, as a test uses it."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def call(self, name: str, timeout_s: float = 60.0, /, **arguments: Any) -> Answer:
        result = await self._client.call_tool(name, arguments, read_timeout_seconds=timeout_s)
        (part,) = result.content
        assert part.type == "text"
        return Answer(part.text, bool(result.is_error))

    async def shell(self, command: str) -> str:
        return (await self.call("shell", command=command)).text

    async def python(self, code: str) -> str:
        return (await self.call("python", code=code)).text


@dataclass(frozen=True)
class Server:
    """A running server."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    @asynccontextmanager
    async def session(self, token: str = TOKEN) -> AsyncIterator[Sandbox]:
        """A session of its own, which ends with the block."""
        headers = {"Authorization": f"Bearer {token}"}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=60) as http,
            Client(streamable_http_client(self.url, http_client=http)) as client,
        ):
            yield Sandbox(client)

    def descendants(self) -> list[psutil.Process]:
        """Keepers, and what runs in their sandboxes."""
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def running_server(*flags: str) -> Iterator[Server]:
    """A server on a free port, with a token in its environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(SERVER), "--port", str(port), *flags],
        env={**os.environ, "SANDBOX_TOKEN": TOKEN},
    )
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            assert process.poll() is None, f"the server ended with {process.returncode}"
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.02)
        yield Server(port, process)
    finally:
        process.terminate()
        process.wait(timeout=20)
