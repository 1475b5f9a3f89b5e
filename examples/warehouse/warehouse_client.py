"""The demo's tools, as a program of its own would call them: by MCP."""

import sys
from pathlib import Path
from typing import Any

from mcp import Client

sys.path.append(str(Path(__file__).parents[2] / "assets" / "demo"))

from warehouse_tools import TASK_ID_KEY, build_server


class Warehouse:
    """The warehouse of one task."""

    def __init__(self, task_id: str) -> None:
        self._meta = {TASK_ID_KEY: task_id}

    async def call(self, tool: str, **arguments: Any) -> str:
        """The text that a tool answers; of an error too, for the model to read."""
        async with Client(build_server(seed=0)) as client:
            result = await client.call_tool(tool, arguments, meta=self._meta)
        return "".join(part.text for part in result.content if part.type == "text")
