"""An agent in the OpenAI Agents SDK on the demo's warehouse. Not one line of it is about training.

README.md beside it has the commands. The tools are those of an MCP server, which the SDK starts and
asks. It is started once, and so is the HTTP client made: loading certificates takes longer than a
conversation.
"""

import asyncio
import sys
from functools import cache
from pathlib import Path
from typing import Any

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
)
from agents.mcp import MCPServerStdio, MCPToolMetaContext
from openai import AsyncOpenAI

DEMO = Path(__file__).parents[2] / "assets" / "demo"
MOST_TURNS = 6


def task_of(call: MCPToolMetaContext) -> dict[str, Any]:
    """Says to the tools whose warehouse they show: the run's context is the task's id."""
    return {"agentrl/task_id": call.run_context.context}


async def serve_tools(opened: "asyncio.Future[MCPServerStdio]") -> None:
    """Hold the tool server of this process open."""
    command = {
        "command": sys.executable,
        "args": ["-c", "from warehouse_tools import server; server.run('stdio')"],
        "cwd": str(DEMO),
    }
    try:
        async with MCPServerStdio(
            command,
            cache_tools_list=True,
            client_session_timeout_seconds=60,
            tool_meta_resolver=task_of,
        ) as server:
            opened.set_result(server)
            await asyncio.Event().wait()
    except Exception as error:
        if opened.done():
            raise
        opened.set_exception(error)


@cache
def tools() -> "tuple[asyncio.Future[MCPServerStdio], asyncio.Task[None]]":
    """The tool server of all conversations of the process, and the task that holds it."""
    opened: asyncio.Future[MCPServerStdio] = asyncio.get_running_loop().create_future()
    return opened, asyncio.create_task(serve_tools(opened))


@cache
def client() -> AsyncOpenAI:
    """For all conversations of the process, each of which has an address and a key."""
    return AsyncOpenAI(api_key="of each conversation")


async def run(task: dict[str, Any], session: Any) -> str:
    """Answer the task's question."""
    own = client().with_options(base_url=session.base_url, api_key=session.api_key)
    opened, _ = tools()
    server = await asyncio.shield(opened)  # others wait for it too
    model = OpenAIResponsesModel(session.model, own)
    agent = Agent(name="clerk", model=model, mcp_servers=[server])
    quiet = RunConfig(tracing_disabled=True)
    try:
        result = await Runner.run(
            agent, task["query"], context=task["id"], max_turns=MOST_TURNS, run_config=quiet
        )
    except (MaxTurnsExceeded, ModelBehaviorError):  # the latter: a turn that a limit cut
        return "no answer"
    return str(result.final_output)
