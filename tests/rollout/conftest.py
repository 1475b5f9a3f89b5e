"""What the rollout's tests share: the demo's model folder and MCP servers in own processes."""

import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agentrl.databases.connection import RunDatabase
from agentrl.rollout.chat import ChatRenderer

DEMO_MODEL = Path(__file__).parents[2] / "assets" / "demo" / "model"
sys.path.insert(0, str(Path(__file__).parent))  # `scripted_run`, which processes import too

from forked import Forked, preload  # noqa: E402
from scripted_service import ScriptedService, Talk, serving, talk_with  # noqa: E402

preload("mcp.server.mcpserver", "uvicorn")
HOSTILE_SERVER = Path(__file__).with_name("hostile_mcp_server.py")


@dataclass
class HostileServer:
    """The MCP server of `hostile_mcp_server.py`, or of another program that takes a port; it may be
    killed and started again."""

    flags: tuple[str, ...] = ()
    program: tuple[str, ...] = (str(HOSTILE_SERVER),)
    port: int = 0
    _process: Forked | None = field(default=None)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    def start(self) -> None:
        if not self.port:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = probe.getsockname()[1]
        self._process = Forked([*self.program, str(self.port), *self.flags])
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            assert self._process.poll() is None, "the MCP server ended at once"
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError("the MCP server did not start")

    @property
    def pid(self) -> int:
        assert self._process is not None and self._process.pid is not None
        return self._process.pid

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def wait_for_its_end(self, timeout_s: float = 10) -> None:
        assert self._process is not None
        self._process.wait(timeout=timeout_s)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """A folder with a small model, its tokenizer and chat template."""
    return DEMO_MODEL


@pytest.fixture(scope="session")
def demo_renderer() -> ChatRenderer:
    return ChatRenderer.load(DEMO_MODEL)


@pytest.fixture(scope="session")
def hostile_server() -> Iterator[HostileServer]:
    """A running server, shared: tests that kill it take `own_server`."""
    server = HostileServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def own_server() -> Iterator[HostileServer]:
    """A server of the test's own, not yet started."""
    server = HostileServer()
    yield server
    server.stop()


@pytest.fixture
async def service(demo_renderer: ChatRenderer) -> AsyncIterator[ScriptedService]:
    async with serving(ScriptedService(demo_renderer)) as service:
        yield service


@pytest.fixture
def talk(hostile_server: HostileServer, service: ScriptedService, database: RunDatabase) -> Talk:
    """Samplers whose model speaks a script and whose tools are the hostile server's."""
    return talk_with(service, hostile_server.url, database)
