"""An agent of a program that another model answers (`--agent_models`): its turns have no tokens."""

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import orjson

from agentrl.databases.documents import NO_SEGMENT, DispatchedSamplingTask, Rewrite, ToolCall
from agentrl.failures import InfrastructureFailure
from agentrl.gateway.exchange import Call, ChatAnswer, ChatRequest
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.agents.endpoint import endpoint_turn, text_turn
from agentrl.rollout.chat import Message
from agentrl.rollout.llm.completion import EndpointTurn
from agentrl.rollout.llm.endpoint import ChatEndpoint
from agentrl.rollout.tool_calls import ParsedCall
from agentrl.rollout.tool_calls.calls import make_call


async def ask_other(
    sampler: AsyncSampler, endpoint: ChatEndpoint, request: ChatRequest, said: Sequence[Message]
) -> tuple[ChatAnswer, DispatchedSamplingTask]:
    """The answer to a request, and the turn to be stored, which is counted in the Record.

    `said`: messages that are stored already. Raises `LimitReached` at the Record's `--max_turns`,
    and the errors of `ChatEndpoint.complete`.
    """
    sampler.limits.room(sampler.context.n_turns + sampler.n_running, 0)
    params = {"request": _digest(request)}
    recorded = sampler.take_recorded((), params)
    if recorded is not None:
        made = endpoint_turn(recorded.stored)
        sampler.count_replayed(0)
    else:
        sampler.n_running += 1
        try:
            made = await _complete(sampler, endpoint, request)
        finally:
            sampler.n_running -= 1
    number = sampler.context.pass_turn()
    sampler.record.n_turns = sampler.context.n_turns
    answer = _answer(made, number)
    calls = [ToolCall(name=call.name, arguments=dict(call.arguments)) for call in answer.calls]
    added = [message for message in request.messages if message not in said]
    service = endpoint.model.base_url
    turn = text_turn(sampler.record.id, number, made, service, added, calls)
    told: dict[str, Any] = {
        "segment": NO_SEGMENT, "agent": request.agent, "trained": False, "params": params,
        "replayed": recorded.stored.id if recorded is not None else None,
        "rewrite": Rewrite.AGENT if number else None,
    }  # fmt: skip
    return answer, turn.model_copy(update=told)


def answer_of(turn: DispatchedSamplingTask) -> ChatAnswer:
    """The answer that a stored turn of another model holds."""
    return _answer(endpoint_turn(turn), turn.turn)


async def _complete(
    sampler: AsyncSampler, endpoint: ChatEndpoint, request: ChatRequest
) -> EndpointTurn:
    try:
        return await endpoint.complete(
            [_sent(message) for message in request.messages],
            request.tools,
            request.max_new_tokens,
            model=request.model or None,
            stop=request.stop,
            json_schema=request.json_schema,
        )
    except InfrastructureFailure as outage:
        sampler.meet_outage(outage)
        raise


def _digest(request: ChatRequest) -> str:
    """Equal for requests that the other model would answer alike."""
    asked = [
        request.agent, request.model, list(request.messages), list(request.tools),
        request.max_new_tokens, request.stop, request.json_schema,
    ]  # fmt: skip
    return blake2b(orjson.dumps(asked, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()


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
        turn=number,
    )


def _arguments(text: str) -> object:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
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
