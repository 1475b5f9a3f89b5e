"""An MCP server that counts, for each session. Run by tests, over every transport.

    python counting_mcp_server.py stdio
    python counting_mcp_server.py http|sse PORT [--create] [--journal FILE]

`--create`: has the tools `create_session` and `close_session`. `--journal`: a line for every
session that is created, closed by its tool, and deleted over HTTP.
"""

import argparse
import asyncio
import json
import os
from collections import Counter
from pathlib import Path

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from starlette.types import ASGIApp, Receive, Scope, Send


def build_server(create: bool, journal: Path | None) -> MCPServer:
    server = MCPServer("counting", log_level="ERROR")
    counts: Counter[str] = Counter()

    def write(line: str) -> None:
        if journal is not None:
            with journal.open("a") as file:
                file.write(f"{line}\n")

    def session_of(ctx: Context) -> str:
        return (ctx.headers or {}).get("mcp-session-id", "the only one")

    @server.tool(structured_output=False)
    async def count(ctx: Context, by: int = 1) -> str:
        """Adds to the count of the session."""
        counts[session_of(ctx)] += by
        return str(counts[session_of(ctx)])

    @server.tool(structured_output=False)
    async def meta(ctx: Context) -> str:
        """What the caller says of the call."""
        given = {**(ctx.request_context.meta or {})}
        return json.dumps({key: given[key] for key in sorted(given) if key.startswith("agentrl/")})

    @server.tool(structured_output=False)
    async def environment(name: str) -> str:
        """A variable of the server's environment."""
        return os.environ.get(name, "not set")

    @server.tool(structured_output=False)
    async def pid() -> str:
        """The server's process."""
        return str(os.getpid())

    @server.tool(structured_output=False)
    async def hang() -> str:
        """Never answers."""
        await asyncio.Event().wait()
        return ""

    @server.tool(structured_output=False)
    async def die() -> str:
        """Takes the server with it."""
        os._exit(1)

    if create:

        @server.tool(structured_output=False)
        async def create_session(ctx: Context, start: int = 0) -> str:
            """Where the count begins."""
            if start < 0:
                raise ToolError("start must not be negative")
            counts[session_of(ctx)] = start
            write(f"created {start}")
            return "ready"

        @server.tool(structured_output=False)
        async def close_session(ctx: Context) -> str:
            """What the count was."""
            write(f"closed {counts[session_of(ctx)]}")
            return "bye"

    return server


class Deletions:
    """Writes a line for each session that a client ends."""

    def __init__(self, app: ASGIApp, journal: Path | None) -> None:
        self.app, self.journal = app, journal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "DELETE" and self.journal is not None:
            # Before the answer: who has it may look at the journal at once.
            with self.journal.open("a") as file:
                file.write("deleted\n")
        await self.app(scope, receive, send)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("transport", choices=["stdio", "http", "sse"])
    parser.add_argument("port", type=int, nargs="?")
    parser.add_argument("--create", action="store_true")
    parser.add_argument("--journal", type=Path)
    args = parser.parse_args()
    server = build_server(args.create, args.journal)
    if args.transport == "stdio":
        server.run("stdio")
        return
    app = server.sse_app() if args.transport == "sse" else server.streamable_http_app()
    uvicorn.run(
        Deletions(app, args.journal), host="127.0.0.1", port=args.port, log_level="critical"
    )


if __name__ == "__main__":
    main()
