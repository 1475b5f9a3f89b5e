"""An aggregator's HTTP API over two servers with a few tools, for tests. Run by aiohttp."""

import asyncio

from aiohttp import web

SERVERS = ("web", "files")


def _tool(name: str, /, **properties: str) -> dict:
    schema = {"type": "object", "properties": {key: {"type": t} for key, t in properties.items()}}
    function = {"name": name, "description": f"The tool {name}.", "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = {
    "web": [_tool("search", query="string"), _tool("fetch"), _tool("whose"), _tool("hang")],
    "files": [_tool("search", name="string"), _tool("answer", body="object")],
}


class AggregatorAPI:
    """The handlers. `token`: the bearer token it wants, if any."""

    def __init__(self, token: str | None = None) -> None:
        self.token = token
        self.closing = asyncio.Event()
        self.app = web.Application(middlewares=[self.check])
        self.app.on_shutdown.append(self.release)
        self.app.add_routes(
            [
                web.get("/mcpapi/servers", self.servers),
                web.get("/mcpapi/tools", self.tools),
                web.get("/mcpapi/server/{server}/tools", self.server_tools),
                web.post("/mcpapi/tool/{tool}", self.call),
            ]
        )

    @web.middleware
    async def check(self, request: web.Request, handler) -> web.StreamResponse:
        wanted = f"Bearer {self.token}"
        if self.token is not None and request.headers.get("Authorization") != wanted:
            return web.json_response({"detail": "no"}, status=401)
        return await handler(request)

    async def release(self, _: web.Application) -> None:
        self.closing.set()

    async def servers(self, _: web.Request) -> web.Response:
        return web.json_response({"servers": list(SERVERS)})

    async def tools(self, _: web.Request) -> web.Response:
        return web.json_response({"tools": [tool for name in SERVERS for tool in TOOLS[name]]})

    async def server_tools(self, request: web.Request) -> web.Response:
        return web.json_response({"tools": TOOLS[request.match_info["server"]]})

    async def call(self, request: web.Request) -> web.Response:
        arguments = await request.json()
        match request.match_info["tool"]:
            case "web.search":
                return web.json_response(
                    {"status": "success", "content": f"web: {arguments['query']}"}
                )
            case "files.search":
                content = [{"type": "text", "text": f"files: {arguments['name']}"}]
                return web.json_response({"status": "success", "content": content})
            case "web.whose":
                names = ("X-AgentRL-Task-Id", "X-AgentRL-Record-Id")
                return web.json_response({"content": [request.headers[name] for name in names]})
            case "web.hang":
                await self.closing.wait()
            case "files.answer":
                body = arguments["body"]
                return web.json_response(body["json"], status=body.get("status", 200))
            case "web.fetch":
                return web.Response(text="<h1>Bad gateway</h1>", status=502)
        raise web.HTTPNotFound(text='{"detail": "no such tool"}', content_type="application/json")
