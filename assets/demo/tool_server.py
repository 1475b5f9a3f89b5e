"""The demo's tools as an MCP server over streamable HTTP: `find`, `stock`, `add` and `sub`.

A call says which task it serves in its `_meta`, under `agentrl/task_id`: MCP's own place for what
a client tells a server beside the arguments. No session carries state, so clients may share one
session among many tasks, and reconnect at any time.

    python assets/demo/tool_server.py --port 8931        # then http://127.0.0.1:8931/mcp
"""

import argparse
from functools import lru_cache
from typing import Annotated

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import WithJsonSchema
from warehouse import Warehouse, draw_warehouse

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


def build_server(seed: int) -> MCPServer:
    """The four tools over the warehouses of world `seed`."""
    server = MCPServer("warehouse", log_level="WARNING")
    recent_warehouse = lru_cache(maxsize=4096)(draw_warehouse)

    def warehouse_of(ctx: Context) -> Warehouse:
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
        bin_name = warehouse_of(ctx).bin_of.get(name)
        if bin_name is None:
            raise ToolError(f"no item {name[:20]!r}")
        return bin_name

    @server.tool(structured_output=False)
    async def stock(bin: Text, ctx: Context) -> str:
        """The number of parts in a bin."""
        name = require_text("bin", bin)
        parts = warehouse_of(ctx).stock_of.get(name)
        if parts is None:
            raise ToolError(f"no bin {name[:20]!r}")
        return str(parts)

    @server.tool(structured_output=False)
    async def add(a: Integer, b: Integer, ctx: Context) -> str:
        """a plus b."""
        warehouse_of(ctx)
        return str(require_integer("a", a) + require_integer("b", b))

    @server.tool(structured_output=False)
    async def sub(a: Integer, b: Integer, ctx: Context) -> str:
        """a minus b."""
        warehouse_of(ctx)
        return str(require_integer("a", a) - require_integer("b", b))

    return server


def main() -> None:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0, help="the world's: as given to make_tasks")
    args = parser.parse_args()
    build_server(args.seed).run(
        "streamable-http",
        host=args.host,
        port=args.port,
        stateless_http=True,
        json_response=True,
    )


if __name__ == "__main__":
    main()
