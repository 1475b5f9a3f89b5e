"""The tools of an agent: MCP servers and aggregators, as each record uses them.

    transports.py  the wires to a server: HTTP, SSE, stdio
    connection.py  one connection over them
    session.py     a session that outlives its connection: shared, or a record's own
    server.py      one MCP server and its sessions
    aggregator.py  servers behind one HTTP API (`/mcpapi`)
    calls.py       what a call is, and how calls fail
    catalogue.py   which tools the model gets, and under which names
    sandboxes.py   what a task gives its tools on the way
    results.py     a result as text for the model, and what else it held
    toolbox.py     all of them together: `open_tools`, `ToolBox`, `ToolSession`

Which servers there are is read in `tool_servers.py` beside this package, so that it can be checked
without the SDK.
"""

from agentrl.rollout.mcp.tools.calls import ToolServerUnreachable, ToolSessionFailed
from agentrl.rollout.mcp.tools.results import ToolAnswer
from agentrl.rollout.mcp.tools.toolbox import ToolBox, ToolSession, open_tools

__all__ = [
    "ToolAnswer",
    "ToolBox",
    "ToolServerUnreachable",
    "ToolSession",
    "ToolSessionFailed",
    "open_tools",
]
