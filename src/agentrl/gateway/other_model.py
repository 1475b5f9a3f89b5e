"""An agent of a program that another model answers (`--agent_models`): its turns have no tokens."""

import json
from collections.abc import Sequence
from typing import Any

from agentrl.databases.documents import DispatchedSamplingTask, Rewrite, ToolCall
from agentrl.failures import InfrastructureFailure
from agentrl.gateway.exchange import Call, ChatAnswer, ChatRequest
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.agents.endpoint import text_turn
from agentrl.rollout.chat import Message
from agentrl.rollout.llm.endpoint import ChatEndpoint, EndpointTurn
from agentrl.rollout.tool_calls import ParsedCall
from agentrl.rollout.tool_calls.calls import make_call

_NO_SEGMENT = -1


async def ask_other(
    sampler: AsyncSampler, endpoint: ChatEndpoint, request: ChatRequest, said: Sequence[Message]
) -> tuple[ChatAnswer, DispatchedSamplingTask]:
    """The answer to a request, and the turn to be stored, which is counted in the Record.

    `said`: messages that are stored already. Raises `LimitReached` at the Record's `--max_turns`,
    and the errors of `ChatEndpoint.complete`.
    """
    sampler.limits.room(sampler.context.n_turns, 0)
    try:
        made = await endpoint.complete(
            [_sent(message) for message in request.messages],
            request.tools,
            request.max_new_tokens,
            model=request.model or None,
            stop=request.stop,
        )
    except InfrastructureFailure as outage:
        sampler.meet_outage(outage)
        raise
    number = sampler.context.pass_turn()
    sampler.record.n_turns = sampler.context.n_turns
    answer = _answer(made, number)
    calls = [ToolCall(name=call.name, arguments=dict(call.arguments)) for call in answer.calls]
    added = [message for message in request.messages if message not in said]
    service = endpoint.model.base_url
    turn = text_turn(sampler.record.id, number, made, service, added, calls)
    told: dict[str, Any] = {
        "segment": _NO_SEGMENT, "agent": request.agent, "trained": False,
        "rewrite": Rewrite.AGENT if number else None,
    }  # fmt: skip
    return answer, turn.model_copy(update=told)


def _answer(made: EndpointTurn, number: int) -> ChatAnswer:
    """The answer that the client gets. A call that cannot be read is left out."""
    read = [make_call(call.name, _arguments(call.arguments)) for call in made.calls]
    calls = tuple(
        Call(f"call_{number}_{place}", call.name, call.arguments)
        for place, call in enumerate(read)
        if isinstance(call, ParsedCall)
    )
    return ChatAnswer(
        content=made.content,
        thought=made.reasoning,
        calls=calls,
        cut_off=made.finish_reason == "length",
        prompt_tokens=made.prompt_tokens,
        cached_tokens=made.cached_tokens,
        completion_tokens=made.completion_tokens,
    )


def _arguments(text: str) -> object:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return None


def _sent(message: Message) -> Message:
    """A message as the API reads it: the arguments of calls are text."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {
            **call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]  # fmt: skip
    return {**message, "tool_calls": calls}
