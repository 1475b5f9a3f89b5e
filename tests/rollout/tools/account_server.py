"""An account that tools read and change, which keeps what was asked of it in a file.

`python account_server.py FILE` serves it over standard input and output. Tests import a copy of it,
which has the file beside it.
"""

import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations

asked = Path(sys.argv[1] if __name__ == "__main__" else __file__).with_suffix(".log")


def note(tool):
    with asked.open("a") as file:
        file.write(f"{tool}\n")


def an_account(*more):
    server = MCPServer("account", log_level="CRITICAL")
    held = [100]

    @server.tool(structured_output=False, annotations=ToolAnnotations(read_only_hint=True))
    async def balance() -> int:
        """What is there."""
        note("balance")
        return held[0]

    @server.tool(structured_output=False, annotations=ToolAnnotations(read_only_hint=False))
    async def withdraw(amount: int) -> str:
        """Takes some of it."""
        note("withdraw")
        held[0] -= amount
        return "done"

    @server.tool(structured_output=False)
    async def rate() -> str:
        """The interest."""
        note("rate")
        return "2%"

    for tool in more:
        server.tool(structured_output=False)(tool)
    return server


async def create_session() -> str:
    """Opens an account."""
    return "opened"


shared = an_account()
with_sessions = an_account(create_session)

if __name__ == "__main__":
    shared.run("stdio")
