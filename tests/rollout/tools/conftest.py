"""Servers for tests of the tools, in processes of their own."""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # `tool_session` and `aggregator_server`


@pytest.fixture
def counting_server(own_server: Any) -> Iterator[Callable[..., Any]]:
    """Starts the server of `counting_mcp_server.py`: `counting_server("http", "--create")`."""

    def start(transport: str, *flags: str) -> Any:
        own_server.program = (str(HERE / "counting_mcp_server.py"), transport)
        own_server.flags = flags
        own_server.start()
        return own_server

    yield start


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A file of its own with the servers of `warehouse_server.py`."""
    return Path(shutil.copy(HERE / "warehouse_server.py", tmp_path / "warehouse.py"))
