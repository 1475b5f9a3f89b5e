"""The `tools` of an agent function: the run's MCP tools, as one record uses them."""

import asyncio
from collections.abc import Mapping
from typing import Any

from agentrl.databases.documents import ToolCall
from agentrl.rollout.agents.llm import ChatModel, ChatReply, OpenTurn
from agentrl.rollout.agents.tool_sampler import ToolSampler
from agentrl.rollout.chat import Message, ToolSchema
from agentrl.rollout.tools.results import ToolAnswer


class AgentTools:
    """The run's tools. Each call is stored with its turn, or with the record."""

    def __init__(self, sampler: ToolSampler, llm: ChatModel) -> None:
        self._sampler = sampler
        self._llm = llm

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        """The tools as OpenAI's function schemas, for `llm.chat`."""
        return self._sampler.resources.tools.schemas

    async def answer(self, reply: ChatReply) -> list[Message]:
        """Make a reply's calls concurrently; returns the messages with their results, in order.

        Malformed calls and failed tools give an error text. Raises `InfrastructureFailure` if a
        tool server is unreachable. The attempt is then handed back, even if the agent catches it.
        With `--on_tool_outage text` the model gets an error text instead.
        """
        made = await asyncio.gather(*map(self._sampler.make_call, reply.tool_calls))
        for call in made:
            self._keep(call.document, reply.turn)
        return [{"role": "tool", "content": call.document.result or ""} for call in made]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Call a tool. Raises `InfrastructureFailure` as `answer` does, but not if the tool fails.

        The call is stored with the latest reply, or with the record if no turn is open.
        """
        answer = await self._sampler.tools.call(name, dict(arguments))
        call = ToolCall(
            name=name,
            arguments=dict(arguments),
            result=answer.text,
            is_error=answer.is_error,
            started_at=answer.started_at,
            latency_s=answer.latency_s,
            kept=answer.kept,
            by_agent=True,
            lasting=answer.lasting,
        )
        self._keep(call, self._llm.last)
        return answer

    def _keep(self, call: ToolCall, turn: OpenTurn | None) -> None:
        self._sampler.record.n_tool_calls += 1
        self._sampler.record.n_tool_errors += call.is_error
        self._llm.keep_call(call, turn)
