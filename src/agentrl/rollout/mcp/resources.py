"""What samplers with tools share: the MCP servers' tools, and the parser of the model's calls."""

from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agentrl.databases.documents import Record
from agentrl.databases.tasks import Claim
from agentrl.rollout.mcp.tools import ToolBox, ToolSession, open_tools
from agentrl.rollout.sampler import AsyncSampler, SamplerResources
from agentrl.rollout.tool_calls import ToolCallParser, choose_parser


@dataclass(frozen=True)
class MCPResources(SamplerResources):
    """What samplers with tools share."""

    tools: ToolBox
    parse_calls: ToolCallParser


class ToolSampler(AsyncSampler):
    """An attempt in which tools may be used: the base of `MCPSampler` and its like.

    A subclass implements `converse()`, during which `self.tools` is open.
    """

    resources: MCPResources

    def __init__(self, claim: Claim, record: Record, resources: SamplerResources) -> None:
        assert isinstance(resources, MCPResources), f"{type(self).__name__} needs MCPResources"
        super().__init__(claim, record, resources)
        self.tools: ToolSession = resources.tools.session(claim.task, record.id)

    @classmethod
    @asynccontextmanager
    async def extend_resources(cls, shared: SamplerResources) -> AsyncIterator[MCPResources]:
        """Open the tools and choose the parser.

        Raises `ConfigError` for a flag that cannot be used, and `ToolServerUnreachable` if an MCP
        server does not answer within `--startup_timeout`.
        """
        agent, patience_s = shared.config.agent, shared.config.sampling.startup_timeout
        parse_calls = choose_parser(agent.tool_call_parser, shared.renderer.render_text)
        async with open_tools(agent, patience_s, shared.records) as tools:
            yield MCPResources(**vars(shared), tools=tools, parse_calls=parse_calls)

    async def run(self) -> Record:
        """Hold the conversation, with the tools open."""
        async with self.tools:
            return await self.converse()

    @abstractmethod
    async def converse(self) -> Record:
        """What `run()` of an agent without tools does."""
