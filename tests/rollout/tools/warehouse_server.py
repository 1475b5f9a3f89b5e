"""Servers as objects, whose tools do what tools should not. Tests import a copy of it."""

import asyncio
import threading
import time

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

counts = {}


def a_server(*more):
    server = MCPServer("tools", log_level="CRITICAL")

    @server.tool(structured_output=False)
    async def count(ctx: Context) -> int:
        """How often this record called."""
        record = (ctx.request_context.meta or {})["agentrl/record_id"]
        counts[record] = counts.get(record, 0) + 1
        return counts[record]

    @server.tool(structured_output=False)
    async def place() -> str:
        """Where it runs."""
        return threading.current_thread().name

    @server.tool(structured_output=False)
    async def sleep(seconds: float) -> str:
        """Takes its time."""
        await asyncio.sleep(seconds)
        return "slept"

    @server.tool(structured_output=False)
    async def block(seconds: float) -> str:
        """Blocks its event loop."""
        time.sleep(seconds)
        return "blocked"

    @server.tool(structured_output=False)
    async def block_in_task(seconds: float) -> str:
        """Blocks its event loop in a task that it begins."""
        await asyncio.gather(block(seconds))

    @server.tool(structured_output=False)
    async def fail() -> str:
        """Fails."""
        raise ToolError("no such bin")

    @server.tool(structured_output=False)
    async def leave(error: str = "SystemExit") -> str:
        """Raises what ends a process."""
        raise {
            "SystemExit": SystemExit(3),
            "KeyboardInterrupt": KeyboardInterrupt(),
            "GeneratorExit": GeneratorExit(),
        }[error]

    for tool in more:
        server.tool(structured_output=False)(tool)
    return server


server = a_server()

opened = []


async def create_session(room: str) -> str:
    """Opens a room."""
    opened.append(room)
    return "opened"


async def close_session() -> str:
    """Closes it."""
    opened.append("closed")
    return "closed"


async def rooms() -> str:
    """What was opened."""
    return ",".join(opened)


with_sessions = a_server(create_session, close_session, rooms)
