"""A manager of tools with an HTTP API under `/mcpapi`, in front of the demo's warehouse.

python warehouse_manager.py PORT
"""

import sys
from contextlib import AsyncExitStack
from pathlib import Path

from aiohttp import web
from mcp import Client

DEMO = Path(__file__).resolve().parents[2] / "assets" / "demo"
sys.path.insert(0, str(DEMO))

from warehouse_tools import TASK_ID_KEY, build_server  # noqa: E402


class Manager:
    """The handlers, around a client of the warehouse's server."""

    def __init__(self) -> None:
        self.app = web.Application()
        self.app.cleanup_ctx.append(self.connected)
        self.app.add_routes(
            [
                web.get("/mcpapi/servers", self.servers),
                web.get("/mcpapi/server/warehouse/tools", self.tools),
                web.post("/mcpapi/tool/{tool}", self.call),
            ]
        )

    async def connected(self, _: web.Application):
        async with AsyncExitStack() as stack:
            self.client = await stack.enter_async_context(Client(build_server(0)))
            yield

    async def servers(self, _: web.Request) -> web.Response:
        return web.json_response({"servers": ["warehouse"]})

    async def tools(self, _: web.Request) -> web.Response:
        listed = (await self.client.list_tools()).tools
        functions = [
            {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
            for tool in listed
        ]
        return web.json_response(
            {"tools": [{"type": "function", "function": each} for each in functions]}
        )

    async def call(self, request: web.Request) -> web.Response:
        name = request.match_info["tool"].removeprefix("warehouse.")
        meta = {TASK_ID_KEY: request.headers["X-AgentRL-Task-Id"]}
        result = await self.client.call_tool(name, await request.json(), meta=meta)
        text = "".join(part.text for part in result.content)
        if result.is_error:
            return web.json_response({"status": "error", "content": {"error": text}})
        return web.json_response({"status": "success", "content": text})


if __name__ == "__main__":
    web.run_app(Manager().app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
