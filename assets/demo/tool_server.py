"""The demo's tools as an MCP server over streamable HTTP: `find`, `stock`, `add` and `sub`.

A call says which task it serves in its `_meta`, under `agentrl/task_id`: MCP's own place for what
a client tells a server beside the arguments. No session carries state, so clients may share one
session among many tasks, and reconnect at any time.

    python assets/demo/tool_server.py --port 8931        # then http://127.0.0.1:8931/mcp

Clients must show the bearer token in TOOLS_TOKEN, if it is set. It must be set where other machines
reach --host.
"""

import argparse
import os
import sys
from functools import lru_cache
from typing import Annotated

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import WithJsonSchema
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from warehouse import Warehouse, draw_warehouse

from agentrl import KeyNeeded, admits, require_key

TOKEN_VARIABLE = "TOOLS_TOKEN"
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


class Gate:
    """An ASGI application around the server's: whoever does not show the token is refused."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shown = Headers(scope=scope).get("authorization") if scope["type"] == "http" else None
        if scope["type"] == "http" and not admits(shown, self._token):
            await PlainTextResponse("another bearer token is needed", 401)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def main() -> None:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0, help="the world's: as given to make_tasks")
    args = parser.parse_args()
    token = os.environ.get(TOKEN_VARIABLE)
    try:
        how = f"set {TOKEN_VARIABLE} to one, and MCP_AUTH_TOKEN in the runs"
        require_key(args.host, token, how)
    except KeyNeeded as error:
        sys.exit(f"tool_server.py: {error}")
    app: ASGIApp = build_server(args.seed).streamable_http_app(
        host=args.host, stateless_http=True, json_response=True
    )
    uvicorn.run(
        Gate(app, token) if token else app, host=args.host, port=args.port, log_level="warning"
    )


if __name__ == "__main__":
    main()
