"""An MCP server over its pipes that writes lines without an end. Run by tests.

python endless_process.py JOURNAL

The journal has a line for every call.
"""

import os
import sys
from pathlib import Path

import anyio
from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("endless", log_level="ERROR")
journal = Path(sys.argv[1])
wire = os.dup(1)  # the SDK leaves 1 for what tools print


def write(call: str) -> None:
    with journal.open("a") as file:
        file.write(f"{call}\n")


@server.tool(structured_output=False)
async def big(size: int) -> str:
    """So many characters."""
    write("big")
    return "x" * size


@server.tool(structured_output=False)
async def hang() -> str:
    """Never answers."""
    write("hang")
    await anyio.sleep_forever()
    return ""


@server.tool(structured_output=False)
async def endless(ctx: Context, id_first: bool) -> str:
    """An answer that goes on for ever."""
    write("endless")
    start = f'{{"jsonrpc":"2.0","id":{ctx.request_id},' if id_first else "{"
    await anyio.to_thread.run_sync(_write_for_ever, start + '"result":{"text":"')
    return ""


def _write_for_ever(start: str) -> None:
    os.write(wire, start.encode())
    while True:
        os.write(wire, b"x" * 65536)


if __name__ == "__main__":
    server.run("stdio")
