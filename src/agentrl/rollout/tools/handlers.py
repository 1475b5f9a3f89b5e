"""Tool handlers of the original AgentRL: Python classes that offer tools and call them.

    class Tools:
        async def initialize(self) -> bool: ...             # may be left out
        openai_tools: list[dict]                            # OpenAI's function schemas
        async def call_tool(self, name, arguments) -> dict: # {"status": ..., "content": ...}
        async def close(self) -> None: ...                  # may be left out

    --mcp_manager_url FILE.py:Tools

Such an object becomes an MCP server, which samplers run in their own process like any other
(`in_process.py`).
"""

import inspect
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from mcp.server import Server, ServerRequestContext
from mcp_types import (
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    Tool,
)

from agentrl.rollout.tools.status_answers import read_answer


def is_handler(found: object) -> bool:
    """Whether an object, or what a class makes, offers tools as a handler does."""
    return callable(getattr(found, "call_tool", None)) and (
        inspect.isclass(found) or hasattr(found, "openai_tools")
    )


def server_of(handler: Any, name: str) -> Server[Any]:
    """An MCP server with the tools of a handler, or of an object of a handler class."""
    if inspect.isclass(handler):
        handler = handler()

    @asynccontextmanager
    async def lifespan(_: Server[Any]) -> AsyncIterator[None]:
        if hasattr(handler, "initialize") and not await _awaited(handler.initialize()):
            raise RuntimeError(f"{name}: initialize() did not return True")
        try:
            yield
        finally:
            if hasattr(handler, "close"):
                await _awaited(handler.close())

    async def listed(
        _: ServerRequestContext[Any], __: PaginatedRequestParams | None
    ) -> ListToolsResult:
        return ListToolsResult(tools=[_tool(schema) for schema in handler.openai_tools])

    async def called(_: ServerRequestContext[Any], params: CallToolRequestParams) -> CallToolResult:
        return read_answer(await _awaited(handler.call_tool(params.name, params.arguments or {})))

    return Server(name, lifespan=lifespan, on_list_tools=listed, on_call_tool=called)


def _tool(schema: Mapping[str, Any]) -> Tool:
    function = schema.get("function", schema)
    parameters = function.get("parameters") or {"type": "object"}
    return Tool(
        name=function["name"], description=function.get("description"), input_schema=parameters
    )


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result
