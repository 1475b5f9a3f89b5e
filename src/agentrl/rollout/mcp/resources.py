"""What samplers with tools share: the MCP server's tools, and the parser of the model's calls."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from agentrl.databases.documents import Record
from agentrl.databases.tasks import Claim
from agentrl.rollout.mcp.tools import ToolServer
from agentrl.rollout.sampler import AsyncSampler, SamplerResources
from agentrl.rollout.tool_calls import ToolCallParser, choose_parser


@dataclass(frozen=True)
class MCPResources(SamplerResources):
    """What samplers with tools share. `tools` is None for agents without tools."""

    tools: ToolServer | None
    parse_calls: ToolCallParser


class ToolSampler(AsyncSampler):
    """An attempt in which tools may be used: the base of `MCPSampler` and its like."""

    resources: MCPResources

    def __init__(self, claim: Claim, record: Record, resources: SamplerResources) -> None:
        assert isinstance(resources, MCPResources), f"{type(self).__name__} needs MCPResources"
        super().__init__(claim, record, resources)

    @classmethod
    @asynccontextmanager
    async def extend_resources(cls, shared: SamplerResources) -> AsyncIterator[MCPResources]:
        """Open the tools and choose the parser.

        Raises `ConfigError` for a flag that cannot be used, and `ToolServerUnreachable` if the MCP
        server does not answer within `--startup_timeout`.
        """
        agent = shared.config.agent
        parse_calls = choose_parser(agent.tool_call_parser, shared.renderer.render_text)
        tools = None
        if agent.mcp_manager_url is not None:
            tools = ToolServer(
                agent.mcp_manager_url,
                token=agent.mcp_auth_token,
                name=agent.mcp_server_name,
                call_timeout_s=agent.tool_timeout,
                startup_timeout_s=shared.config.sampling.startup_timeout,
            )
        async with AsyncExitStack() as stack:
            if tools is not None:
                await stack.enter_async_context(tools)
            yield MCPResources(**vars(shared), tools=tools, parse_calls=parse_calls)
