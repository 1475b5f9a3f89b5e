"""The MCP agent: a model that works on a query with the tools of an MCP server.

    system prompt and query -> turn -> tool calls -> results -> turn -> ... -> answer

A turn without tool calls is the answer. Calls of one turn run at the same time; a call that the
model wrote wrongly, and a tool that fails, are answered with the error, for the model to read.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from agentrl.configs import Config
from agentrl.databases.documents import Record, StopReason, ToolCall
from agentrl.databases.records import RecordLedger
from agentrl.databases.tasks import Claim
from agentrl.inference.pool import ServicePool
from agentrl.rollout.answers import extract_answer
from agentrl.rollout.chat import Message
from agentrl.rollout.mcp.agent_config import load_agent_config
from agentrl.rollout.mcp.scorers import MCPScorerFactory
from agentrl.rollout.mcp.tools import ToolServer
from agentrl.rollout.sampler import AsyncSampler, GeneratedTurn, SamplerResources, load_renderer
from agentrl.rollout.tool_calls import MalformedCall, ParsedCall, ToolCallParser, choose_parser


@dataclass(frozen=True)
class MCPResources(SamplerResources):
    """What all MCP samplers of a process share. `tools` is None for an agent without tools."""

    tools: ToolServer | None
    parse_calls: ToolCallParser
    scorers: MCPScorerFactory


class MCPSampler(AsyncSampler):
    """One attempt at one task with the tools of an MCP server."""

    resources: MCPResources

    def __init__(self, claim: Claim, record: Record, resources: SamplerResources) -> None:
        assert isinstance(resources, MCPResources), "an MCPSampler needs MCPSampler's resources"
        super().__init__(claim, record, resources)
        self._session = (
            resources.tools.session(claim.task.task_id, record.id) if resources.tools else None
        )

    @classmethod
    @asynccontextmanager
    async def open_resources(
        cls, config: Config, pool: ServicePool, records: RecordLedger
    ) -> AsyncIterator[MCPResources]:
        """Open tokenizer, tools and scorers.

        Raises `ConfigError` or `AgentConfigError` for a flag or file that cannot be used, and
        `ToolServerUnreachable` if the MCP server does not answer within `--startup_timeout`.
        """
        agent = config.agent
        renderer = load_renderer(config)
        parse_calls = choose_parser(agent.tool_call_parser, renderer.render_text)
        scorers = MCPScorerFactory(load_agent_config(agent.agent_config_path))
        tools = None
        if agent.mcp_manager_url is not None:
            tools = ToolServer(
                agent.mcp_manager_url,
                token=agent.mcp_auth_token,
                name=agent.mcp_server_name,
                call_timeout_s=agent.tool_timeout,
                startup_timeout_s=config.sampling.startup_timeout,
            )
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(scorers)
            if tools is not None:
                await stack.enter_async_context(tools)
            yield MCPResources(
                config=config,
                pool=pool,
                renderer=renderer,
                records=records,
                tools=tools,
                parse_calls=parse_calls,
                scorers=scorers,
            )

    async def run(self) -> Record:
        """Hold the conversation until the model answers or a limit is reached."""
        system = self.resources.config.agent.system_prompt
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": self.record.query})
        tools = self.resources.tools
        self.begin_conversation(messages, tools.schemas if tools else None)
        while (reason := self.limit_reached()) is None:
            turn = await self.generate()
            parsed = self.resources.parse_calls(turn.text, tools.schemas if tools else ())
            reason = turn.stop_reason or self.limit_reached()
            if not parsed.calls and turn.stop_reason is None:
                reason = StopReason.ANSWERED
                schema = self.claim.task.answer_schema
                self.record.final_answer = extract_answer(parsed.content, schema)
            if reason is not None:
                await self.write_turn(turn, messages, _unanswered(parsed.calls))
                break
            messages = await self._use_tools(turn, parsed.calls, messages)
        self.record.stop_reason = reason
        return self.record

    async def evaluate_record(self, record: Record) -> Record:
        """Score the Record by its task's scorer; no answer in the asked form scores 0."""
        task = self.claim.task
        score = 0.0
        if record.final_answer is not None:
            score = await self.resources.scorers.score(
                task.scorer,
                question=task.query,
                model_answer=record.final_answer,
                ground_truth=task.answer,
            )
        return record.model_copy(
            update={"score": score, "scores": {**record.scores, task.scorer: score}}
        )

    async def _use_tools(
        self,
        turn: GeneratedTurn,
        calls: Sequence[ParsedCall | MalformedCall],
        messages: Sequence[Message],
    ) -> list[Message]:
        """Make a turn's calls, store the turn, append the results; returns them as messages."""
        began = time.monotonic()
        try:
            made = await asyncio.gather(*(self._call(call) for call in calls))
        except asyncio.CancelledError:  # the record took too long: show what it waited for
            await self.write_turn(turn, messages, _unanswered(calls))
            raise
        self.record.n_tool_calls += len(made)
        self.record.n_tool_errors += sum(call.is_error for call in made)
        faults = [call.error for call in calls if isinstance(call, MalformedCall)]
        await self.write_turn(
            turn,
            messages,
            tool_calls=made,
            format_error="; ".join(faults) or None,
            tools_latency_s=time.monotonic() - began,
        )
        results: list[Message] = [{"role": "tool", "content": call.result or ""} for call in made]
        self.continue_conversation(turn, results)
        return results

    async def _call(self, call: ParsedCall | MalformedCall) -> ToolCall:
        if isinstance(call, MalformedCall):
            return ToolCall(name="", arguments={}, result=f"Error: {call.error}.", is_error=True)
        if self._session is None:
            error = "Error: there are no tools."
            return ToolCall(name=call.name, arguments=call.arguments, result=error, is_error=True)
        answer = await self._session.call(call.name, call.arguments)
        return ToolCall(
            name=call.name,
            arguments=call.arguments,
            result=answer.text,
            is_error=answer.is_error,
            latency_s=answer.latency_s,
        )


def _unanswered(calls: Sequence[ParsedCall | MalformedCall]) -> list[ToolCall]:
    """Calls that were written but not made."""
    return [
        ToolCall(name=call.name, arguments=call.arguments)
        for call in calls
        if isinstance(call, ParsedCall)
    ]
