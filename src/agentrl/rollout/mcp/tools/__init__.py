"""The tools of an agent: MCP servers and aggregators, as each record uses them.

specs.py       which servers: --mcp_manager_url and the `mcpServers` config file
connection.py  one connection to a server, over HTTP, SSE or stdio
server.py      one MCP server: connections that all records share, sessions of single records
aggregator.py  servers behind one HTTP API (`/mcpapi`)
catalogue.py   which tools the model gets, and under which names
results.py     a tool's result as text for the model, and what else it held
toolbox.py     all of them together: `open_tools`, `ToolBox`, `ToolSession`
"""

from agentrl.rollout.mcp.tools.results import ToolAnswer
from agentrl.rollout.mcp.tools.server import ToolServerUnreachable
from agentrl.rollout.mcp.tools.toolbox import ToolBox, ToolSession, open_tools

__all__ = ["ToolAnswer", "ToolBox", "ToolServerUnreachable", "ToolSession", "open_tools"]
