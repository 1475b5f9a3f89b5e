"""All tools of a process, and the tools as one record uses them."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from agentrl.configs import AgentConfig
from agentrl.databases.documents import Task
from agentrl.databases.records import RecordLedger
from agentrl.rollout.mcp.tools.results import ToolAnswer
from agentrl.rollout.mcp.tools.server import RECORD_ID_KEY, TASK_ID_KEY, ToolServer


@dataclass(frozen=True)
class ToolBox:
    """The tools of all servers of a run. Without servers it is empty, and as good."""

    servers: tuple[ToolServer, ...]
    records: RecordLedger | None

    @property
    def schemas(self) -> tuple[dict[str, Any], ...]:
        """The tools as OpenAI's function schemas, which chat templates expect."""
        return tuple(schema for server in self.servers for schema in server.schemas)

    def session(self, task: Task, record_id: str) -> "ToolSession":
        """The tools for one record: an async context manager around its conversation."""
        return ToolSession(self, task, record_id)


class ToolSession:
    """The tools as one record uses them; what it opens for the record is closed with it."""

    def __init__(self, box: ToolBox, task: Task, record_id: str) -> None:
        self._box = box
        self._meta = {TASK_ID_KEY: task.task_id, RECORD_ID_KEY: record_id}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        """Call a tool. Never raises for anything that tool or server do."""
        for server in self._box.servers:
            return await server.call(name, arguments, self._meta)
        return ToolAnswer("There are no tools.", True, 0.0)

    async def keep(self, tool: str, whole: str) -> str:
        """Store a text in `tool_results` that the model does not read as it is; returns its `_id`.

        `call` does so itself for what it cuts."""
        raise NotImplementedError


@asynccontextmanager
async def open_tools(
    agent: AgentConfig, startup_timeout_s: float, records: RecordLedger | None
) -> AsyncIterator[ToolBox]:
    """Connect to the servers that the flags name. `records`: where whole results are kept.

    Raises `ToolServerUnreachable` for a server that does not answer within `startup_timeout_s`.
    """
    servers = []
    if agent.mcp_manager_url is not None:
        servers.append(
            ToolServer(
                agent.mcp_manager_url,
                token=agent.mcp_auth_token,
                name=agent.mcp_server_name,
                call_timeout_s=agent.tool_timeout,
                startup_timeout_s=startup_timeout_s,
            )
        )
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
        yield ToolBox(tuple(servers), records)
