"""What samplers with tools share: the tools of the MCP servers, and the models that browse."""

from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.configs import Config
from agentrl.databases.documents import Record, ToolCall
from agentrl.databases.tasks import Claim
from agentrl.failures import InfrastructureFailure
from agentrl.importing import importing
from agentrl.rollout.agents.base import AsyncSampler, SamplerResources
from agentrl.rollout.agents.recorded import Diverged
from agentrl.rollout.agents.repetition import call_key
from agentrl.rollout.llm.client import LLMClient
from agentrl.rollout.llm.models import AgentModels, load_agent_models
from agentrl.rollout.tool_calls import Call, MalformedCall, ParsedCall
from agentrl.rollout.tools.browse import BrowseAgent, BrowseRules
from agentrl.rollout.tools.catalogue import Effect

if TYPE_CHECKING:
    from agentrl.rollout.tools.toolbox import ToolBox, ToolSession


@dataclass(frozen=True)
class MCPResources(SamplerResources):
    """Resources of samplers with tools."""

    tools: "ToolBox"
    browse: BrowseAgent


@dataclass(frozen=True, slots=True)
class MadeCall:
    """A call with its result. `key`: equal for repeated calls (`repetition.call_key`)."""

    document: ToolCall
    key: bytes


class ToolSampler(AsyncSampler):
    """An attempt with tools, the base of `MCPSampler` and `FunctionSampler`.

    A subclass implements `converse()`, during which `self.tools` is open.
    """

    resources: MCPResources

    def __init__(self, claim: Claim, record: Record, resources: SamplerResources) -> None:
        assert isinstance(resources, MCPResources), f"{type(self).__name__} needs MCPResources"
        super().__init__(claim, record, resources)
        self.tools: ToolSession = resources.tools.session(claim.task, record.id, self.meet_outage)

    @classmethod
    @asynccontextmanager
    async def extend_resources(cls, shared: SamplerResources) -> AsyncIterator[MCPResources]:
        """Open the tools and the browse agent's models.

        Raises `ConfigError` or `AgentModelsError` for an unusable flag or file, and
        `ToolServerUnreachable` if an MCP server does not answer within `--startup_timeout`.
        """
        # Imported here: the MCP SDK takes a second to load, and a launch only looks agents up.
        with importing():
            from agentrl.rollout.tools.toolbox import open_tools

        agent, patience_s = shared.config.agent, shared.config.sampling.startup_timeout
        agents = load_agent_models(agent.agent_config_path)
        async with (
            open_tools(agent, patience_s, shared.records) as tools,
            LLMClient(agents.browse_agent, "the browse agent") as models,
        ):
            browse = BrowseAgent(models, _browse_rules(shared.config, agents))
            yield MCPResources(**vars(shared), tools=tools, browse=browse)

    async def run(self) -> Record:
        """Run the conversation with the tools open."""
        async with self.tools:
            return await self.converse()

    async def repeat_call(self, call: Call, recorded: ToolCall) -> MadeCall:
        """Give a call the result that it has in the rollout that is being forked.

        It is made again only for the state that it leaves in the record's own session. Raises
        `Diverged` if the tool then answers otherwise.
        """
        if isinstance(call, MalformedCall):
            return await self.make_call(call)
        result = recorded.result or ""
        if self.tools.effect(call.name) is Effect.REPEATABLE:
            asked = self._taken(self.resources.browse.with_purpose(call), call)
            answer = await self.tools.call(call.name, asked.arguments)
            if answer.text != result and recorded.summarised_by is None:
                raise Diverged(f"{call.name} answers otherwise than in the rollout that is forked")
        return MadeCall(recorded, call_key(call.name, call.arguments, result))

    async def make_call(self, call: Call) -> MadeCall:
        """Make a call. A malformed call gets its error as the result.

        The browse agent, if there is one, summarises a long result. Raises `InfrastructureFailure`
        for an outage of the tools or the browse agent.
        """
        if isinstance(call, MalformedCall):
            fault = f"Error: {call.error}."
            document = ToolCall(name="", arguments={}, result=fault, is_error=True)
            return MadeCall(document, call_key("", {}, fault))
        asked = self.resources.browse.with_purpose(call)
        answer = await self.tools.call(call.name, self._taken(asked, call).arguments)
        whole = answer.whole or answer.text
        document = ToolCall(
            name=call.name,
            arguments=call.arguments,
            result=answer.text,
            is_error=answer.is_error,
            started_at=answer.started_at,
            latency_s=answer.latency_s,
            kept=answer.kept,
            lasting=answer.lasting,
        )
        if not answer.is_error:
            try:
                summary = await self.resources.browse.summarise(self.record.query, asked, whole)
            except InfrastructureFailure as outage:
                self.meet_outage(outage)
                raise
            if summary is not None:
                document.result, document.summarised_by = summary.value, summary.model
                document.kept = answer.kept or await self.tools.keep(call.name, whole)
        # The key is of the whole result: summaries of the same result may differ.
        return MadeCall(document, call_key(call.name, call.arguments, whole))

    def _taken(self, asked: ParsedCall, call: ParsedCall) -> ParsedCall:
        """`asked`, a call with a purpose, if its tool takes one; else the call as it was."""
        for schema in self.resources.tools.schemas:
            function = schema["function"]
            if function["name"] == call.name:
                takes = function.get("parameters", {}).get("properties", {})
                return asked if "purpose" in takes else call
        return call

    @abstractmethod
    async def converse(self) -> Record:
        """Run the conversation, see `AsyncSampler.run`."""


def _browse_rules(config: Config, agents: AgentModels) -> BrowseRules:
    if agents.browsing is None or not agents.browse_agent:
        return BrowseRules.of_flags(config.context)
    return BrowseRules.of_settings(agents.browsing, str(config.model.model_name_or_path))
