"""Tests that need the reference servers: run_reference_servers.sh says where they are, in
`REFERENCE_SERVERS`. Without that, nothing here is collected."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "rollout" / "tools")]

collect_ignore_glob = [] if "REFERENCE_SERVERS" in os.environ else ["test_*.py"]


@pytest.fixture
def listening() -> Iterator[Callable[[str, int], Any]]:
    """Starts `server-everything` over `sse` or `streamableHttp`."""
    from node_servers import ListeningServer  # not before the path is set, above

    started: list[ListeningServer] = []

    def start(transport: str, port: int) -> ListeningServer:
        server = ListeningServer(transport, port)
        started.append(server)
        server.start()
        return server

    yield start
    for server in started:
        server.kill()
