"""The demo's tools `find`, `stock`, `add` and `sub`: a server that samplers run in their process.

    --mcp_manager_url assets/demo/warehouse_tools.py:server

A call says which task it serves in its `_meta`, under `agentrl/task_id`: MCP's own place for what
a client tells a server beside the arguments. The server keeps nothing between calls, so that every
sampler may have a copy of it. `tool_server.py` serves it over HTTP.
"""

import asyncio
from functools import lru_cache
from typing import Annotated

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import WithJsonSchema
from warehouse import Warehouse, draw_seconds, draw_warehouse

TASK_ID_KEY = "agentrl/task_id"
MAX_INTEGER = 10**15  # answers stay short

# The schema states the types; the tools check them, because a model reads their one short line
# more easily than pydantic's report.
Text = Annotated[object, WithJsonSchema({"type": "string"})]
Integer = Annotated[object, WithJsonSchema({"type": "integer"})]


def require_text(name: str, value: object) -> str:
    """`value` itself, or a ToolError that tells the model what to pass as argument `name`."""
    if not isinstance(value, str):
        raise ToolError(f"{name} must be a string")
    return value


def require_integer(name: str, value: object) -> int:
    """`value` itself, or a ToolError that tells the model what to pass as argument `name`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ToolError(f"{name} must be an integer")
    if abs(value) > MAX_INTEGER:
        raise ToolError(f"{name} is too large")
    return value


def build_server(seed: int, seconds: float = 0.0) -> MCPServer:
    """The four tools over the warehouses of world `seed`; a call takes a median of `seconds`."""
    server = MCPServer("warehouse", log_level="WARNING")
    recent_warehouse = lru_cache(maxsize=4096)(draw_warehouse)

    async def warehouse_of(ctx: Context) -> Warehouse:
        if seconds:
            await asyncio.sleep(draw_seconds(seconds))
        # Typed as the keys that the protocol reserves; clients may add their own.
        meta: dict[str, object] = {**(ctx.request_context.meta or {})}
        task_id = meta.get(TASK_ID_KEY)
        if not isinstance(task_id, str) or not task_id:
            raise ToolError(f"the request names no task: put its id in _meta under {TASK_ID_KEY!r}")
        return recent_warehouse(seed, task_id)

    # Coroutines, because plain functions would each be sent to a thread.
    @server.tool(structured_output=False)
    async def find(item: Text, ctx: Context) -> str:
        """The bin that holds an item."""
        name = require_text("item", item)
        bin_name = (await warehouse_of(ctx)).bin_of.get(name)
        if bin_name is None:
            raise ToolError(f"no item {name[:20]!r}")
        return bin_name

    @server.tool(structured_output=False)
    async def stock(bin: Text, ctx: Context) -> str:
        """The number of parts in a bin."""
        name = require_text("bin", bin)
        parts = (await warehouse_of(ctx)).stock_of.get(name)
        if parts is None:
            raise ToolError(f"no bin {name[:20]!r}")
        return str(parts)

    @server.tool(structured_output=False)
    async def add(a: Integer, b: Integer, ctx: Context) -> str:
        """a plus b."""
        await warehouse_of(ctx)
        return str(require_integer("a", a) + require_integer("b", b))

    @server.tool(structured_output=False)
    async def sub(a: Integer, b: Integer, ctx: Context) -> str:
        """a minus b."""
        await warehouse_of(ctx)
        return str(require_integer("a", a) - require_integer("b", b))

    return server


server = build_server(seed=0)
