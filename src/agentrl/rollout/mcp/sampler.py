"""The MCP agent: a model that works on a query with the tools of an MCP server.

    system prompt and query -> turn -> tool calls -> results -> turn -> ... -> answer

A turn without tool calls is the answer. Calls of one turn run at the same time; a call that the
model wrote wrongly, and a tool that fails, are answered with the error, for the model to read.
"""

import asyncio
import time
from collections.abc import Sequence

from agentrl.databases.documents import Record, StopReason, ToolCall
from agentrl.databases.tasks import Claim
from agentrl.rollout.answers import extract_answer
from agentrl.rollout.chat import Message
from agentrl.rollout.mcp.resources import ToolSampler
from agentrl.rollout.sampler import GeneratedTurn, SamplerResources
from agentrl.rollout.tool_calls import MalformedCall, ParsedCall


class MCPSampler(ToolSampler):
    """One attempt at one task with the tools of an MCP server."""

    def __init__(self, claim: Claim, record: Record, resources: SamplerResources) -> None:
        super().__init__(claim, record, resources)
        tools = self.resources.tools
        self._session = tools.session(claim.task.task_id, record.id) if tools else None

    async def run(self) -> Record:
        """Hold the conversation until the model answers or a limit is reached."""
        messages = self.opening_messages()
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
        results = [call.result or "" for call in made]
        self.continue_conversation(turn, results)
        return [{"role": "tool", "content": result} for result in results]

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
