"""An MCP server whose tools hang, die, answer garbage and demand a bearer token. Run by tests.

    python hostile_mcp_server.py PORT [--token T] [--sessions]

`--sessions`: keeps a session for each client and answers as event streams, as older servers do.
"""

import argparse
import asyncio
import json
import os

import uvicorn
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CallToolResult, ImageContent, TextContent
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class OneToken:
    """Accepts a single bearer token."""

    def __init__(self, token: str) -> None:
        self.token = token

    async def verify_token(self, token: str) -> AccessToken | None:
        if token != self.token:
            return None
        return AccessToken(token=token, client_id="test", scopes=["user"])


def build_server(port: int, token: str | None) -> MCPServer:
    if token is None:
        server = MCPServer("hostile", log_level="ERROR")
    else:
        settings = AuthSettings(
            issuer_url="http://127.0.0.1:1",
            resource_server_url=f"http://127.0.0.1:{port}/mcp",
            required_scopes=["user"],
        )
        verifier = OneToken(token)
        server = MCPServer("hostile", log_level="ERROR", token_verifier=verifier, auth=settings)

    waiting, met = 0, asyncio.Event()

    @server.tool(structured_output=False)
    async def echo(text: str) -> str:
        """The text itself."""
        return text

    @server.tool(structured_output=False)
    async def whoami(ctx: Context) -> str:
        """What the caller says that the call serves."""
        meta = {**(ctx.request_context.meta or {})}
        return json.dumps({key: meta[key] for key in sorted(meta) if key.startswith("agentrl/")})

    n_tallied = 0

    @server.tool(structured_output=False)
    async def tally() -> str:
        """How often it was called."""
        nonlocal n_tallied
        n_tallied += 1
        return str(n_tallied)

    @server.tool(structured_output=False)
    async def hang(seconds: float) -> str:
        """Takes its time."""
        await asyncio.sleep(seconds)
        return "slept"

    @server.tool(structured_output=False)
    async def meet(n: int) -> str:
        """Waits until `n` calls wait."""
        nonlocal waiting
        waiting += 1
        if waiting == n:
            met.set()
        await met.wait()
        return "met"

    @server.tool(structured_output=False)
    async def fail(reason: str) -> str:
        """Fails."""
        raise ToolError(reason)

    @server.tool(structured_output=False)
    async def die() -> str:
        """Takes the server with it."""
        os._exit(1)

    @server.tool(structured_output=False)
    async def big(n: int) -> str:
        """A long text."""
        return "x" * n

    @server.tool(structured_output=False)
    async def picture() -> CallToolResult:
        """A text and a picture."""
        image = ImageContent(type="image", data="AAAA", mime_type="image/png")
        return CallToolResult(content=[TextContent(type="text", text="see:"), image])

    @server.tool()
    async def table() -> dict[str, int]:
        """Structured content."""
        return {"a": 1}

    @server.tool(structured_output=False)
    async def garbage(kind: str) -> str:
        """Answered by `Garbage`, below."""
        raise AssertionError(kind)

    return server


class Garbage:
    """Answers calls of the tool `garbage` with what no MCP server should send."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        request = json.loads(body) if body else {}
        if request.get("params", {}).get("name") == "garbage":
            await self.answer(request, send)
            return
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return given.pop() if given else await receive()

        await self.app(scope, replay, send)

    async def answer(self, request: dict, send: Send) -> None:
        kind = request["params"]["arguments"]["kind"]
        envelope = {"jsonrpc": "2.0", "id": request["id"]}
        status, content_type, body, length = 200, "application/json", b"", None
        if kind == "no json":
            body = b"\x00\xff<garbage>"
        elif kind == "no result":
            body = json.dumps({**envelope, "result": {"content": 7, "isError": "perhaps"}}).encode()
        elif kind == "no envelope":
            body = b"[1, 2, 3]"
        elif kind == "html":
            status, content_type, body = 500, "text/html", b"<h1>Internal Server Error</h1>"
        elif kind == "cut off":
            body, length = b'{"jsonrpc": "2.0", ', 4000
        elif kind == "surrogate":
            content = [{"type": "text", "text": "half \ud83d of a pair"}]
            result = {"content": content, "isError": False, "resultType": "complete"}
            body = json.dumps({**envelope, "result": result}).encode()
        elif kind == "empty error":
            result = {"content": [], "isError": True, "resultType": "complete"}
            body = json.dumps({**envelope, "result": result}).encode()
        headers = [
            (b"content-type", content_type.encode()),
            (b"content-length", str(length or len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--token")
    parser.add_argument("--sessions", action="store_true")
    args = parser.parse_args()
    stateless = not args.sessions
    app = build_server(args.port, args.token).streamable_http_app(
        json_response=stateless, stateless_http=stateless
    )
    uvicorn.run(Garbage(app), host="127.0.0.1", port=args.port, log_level="critical")


if __name__ == "__main__":
    main()
