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
    """Tools whose calls are kept with the turn that they belong to, or with the record."""

    def __init__(self, sampler: ToolSampler, llm: ChatModel) -> None:
        self._sampler = sampler
        self._llm = llm

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        """The tools as OpenAI's function schemas, for `llm.chat`."""
        return self._sampler.resources.tools.schemas

    async def answer(self, reply: ChatReply) -> list[Message]:
        """Make a reply's calls, all at once; returns the messages that answer them, in order.

        A call that cannot be made, and a tool that fails, are answered with what was wrong. Raises
        `InfrastructureFailure` for a tool server that is out of reach: the attempt is handed back,
        whatever the agent makes of that (`--on_tool_outage text`: the model reads of it).
        """
        made = await asyncio.gather(*map(self._sampler.make_call, reply.tool_calls))
        for call in made:
            self._keep(call.document, reply.turn)
        return [{"role": "tool", "content": call.document.result or ""} for call in made]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Call a tool. Raises `InfrastructureFailure` as `answer` does, and nothing else for what
        tool or server do.

        The call is kept with the latest reply, or with the record where no turn is open.
        """
        answer = await self._sampler.tools.call(name, dict(arguments))
        call = ToolCall(
            name=name,
            arguments=dict(arguments),
            result=answer.text,
            is_error=answer.is_error,
            latency_s=answer.latency_s,
            kept=answer.kept,
            by_agent=True,
        )
        self._keep(call, self._llm.last)
        return answer

    def _keep(self, call: ToolCall, turn: OpenTurn | None) -> None:
        self._sampler.record.n_tool_calls += 1
        self._sampler.record.n_tool_errors += call.is_error
        self._llm.keep_call(call, turn)
