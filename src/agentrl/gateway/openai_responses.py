"""Responses: https://platform.openai.com/docs/api-reference/responses. No I/O.

`previous_response_id` continues the conversation of an answer of the same session. As in Chat
Completions, the run's sampling parameters apply, and `tool_choice` forces no call.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.gateway.exchange import (
    BadRequest,
    ChatAnswer,
    ChatRequest,
    Tool,
    positive,
    sent_call,
    text_of_content,
    tool_schemas,
)
from agentrl.rollout.chat import Message

_OWN_ITEMS = ("reasoning", "item_reference")


def parse(body: Mapping[str, Any], previous: Sequence[Message]) -> ChatRequest:
    """The request in a body. `previous`: messages of `previous_response_id`.

    Raises `BadRequest`.
    """
    form = (body.get("text") or {}).get("format") or {"type": "text"}
    if form.get("type") != "text":
        raise BadRequest(
            "text.format: the gateway gives text only; describe the form in the prompt, so that "
            "the model learns it"
        )
    conversation = [*previous, *_messages(body.get("input"))]
    if not conversation:
        raise BadRequest("input must be a text or a list of items, and not empty")
    instructions = text_of_content(body.get("instructions"), "instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    return ChatRequest(
        messages=[*system, *conversation],
        tools=[] if body.get("tool_choice") == "none" else tool_schemas(body.get("tools"), _tool),
        max_new_tokens=positive(body.get("max_output_tokens"), "max_output_tokens"),
        model=str(body.get("model") or ""),
    )


def _messages(given: object) -> list[Message]:
    """The messages of an input. What the model said in one turn are several items."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if given is None:
        return []
    if not isinstance(given, list):
        raise BadRequest("input must be a text or a list of items")
    messages: list[Message] = []
    spoken: Message | None = None  # the turn of the model that the last items are of
    for i, item in enumerate(given):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise BadRequest(f"{where} must be an object")
        kind = item.get("type") or "message"
        if kind in _OWN_ITEMS:
            continue
        if kind == "function_call_output":
            result = text_of_content(item.get("output"), f"{where}.output")
            messages.append(
                {"role": "tool", "content": result, "tool_call_id": item.get("call_id")}
            )
            spoken = None
            continue
        if kind == "message" and item.get("role") != "assistant":
            role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
            if role not in ("user", "system"):
                raise BadRequest(f"{where}.role is {role!r}: known are user, system and assistant")
            content = text_of_content(item.get("content"), f"{where}.content")
            messages.append({"role": role, "content": content})
            spoken = None
            continue
        if spoken is None:
            spoken = {"role": "assistant", "content": ""}
            messages.append(spoken)
        if kind == "message":
            spoken["content"] += text_of_content(item.get("content"), f"{where}.content")
        elif kind == "function_call":
            call = sent_call(item.get("call_id"), item.get("name"), item.get("arguments"), where)
            spoken.setdefault("tool_calls", []).append(call)
        else:
            raise BadRequest(f"{where}.type is {kind!r}: the gateway knows no such item")
    return messages


def _tool(sent: Mapping[str, Any], where: str) -> Tool:
    kind = sent.get("type")
    if kind != "function":
        raise BadRequest(f"{where} is of type {kind!r}, a tool of the provider's servers")
    return Tool(sent.get("name"), sent.get("description"), sent.get("parameters"))


def response(
    body: Mapping[str, Any], answer: ChatAnswer, session: str, *, status: str = ""
) -> dict[str, Any]:
    """The body of a whole answer. `status`: of one that has only begun."""
    response_id = _id(body, answer, session)
    begun = bool(status)
    ended = "incomplete" if answer.cut_off else "completed"
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": status or ended,
        "error": None,
        "incomplete_details": (
            {"reason": "max_output_tokens"} if answer.cut_off and not begun else None
        ),
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "model": str(body.get("model") or ""),
        "output": [] if begun else list(_items(answer, response_id)),
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": None,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": None,
        "max_output_tokens": body.get("max_output_tokens"),
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "usage": None if begun else _usage(answer),
    }


def events(body: Mapping[str, Any], answer: ChatAnswer, session: str) -> Iterator[tuple[str, str]]:
    """The answer as server-sent events: their names and data."""
    number = -1

    def event(name: str, /, **fields: Any) -> tuple[str, str]:
        nonlocal number
        number += 1
        return name, json.dumps({"type": name, "sequence_number": number, **fields})

    begun = response(body, answer, session, status="in_progress")
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(_items(answer, _id(body, answer, session))):
        place = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            [part] = item["content"]
            empty = {**item, "status": "in_progress", "content": []}
            yield event("response.output_item.added", output_index=index, item=empty)
            place["content_index"] = 0
            yield event("response.content_part.added", **place, part={**part, "text": ""})
            text: dict[str, Any] = {"logprobs": []}
            yield event("response.output_text.delta", **place, delta=part["text"], **text)
            yield event("response.output_text.done", **place, text=part["text"], **text)
            yield event("response.content_part.done", **place, part=part)
        elif item["type"] == "function_call":
            empty = {**item, "status": "in_progress", "arguments": ""}
            yield event("response.output_item.added", output_index=index, item=empty)
            said = item["arguments"]
            yield event("response.function_call_arguments.delta", **place, delta=said)
            done = {"name": item["name"], "arguments": said}
            yield event("response.function_call_arguments.done", **place, **done)
        else:
            yield event("response.output_item.added", output_index=index, item=item)
        yield event("response.output_item.done", output_index=index, item=item)
    name = "response.incomplete" if answer.cut_off else "response.completed"
    yield event(name, response=response(body, answer, session))


# The id of an answer tells its turn, and whether there were instructions: their message is the
# first of its conversation.
_INSTRUCTED, _PLAIN = "resp_i", "resp_p"


def _id(body: Mapping[str, Any], answer: ChatAnswer, session: str) -> str:
    kind = _INSTRUCTED if body.get("instructions") else _PLAIN
    return f"{kind}{answer.turn}_{session}"


def turn_of(response: str, session: str) -> int | None:
    """The turn of an answer with this id; None if it is no answer of the session."""
    number, _, of = response.removeprefix(_INSTRUCTED).removeprefix(_PLAIN).partition("_")
    return int(number) if number.isdecimal() and of == session else None


def was_instructed(response: str) -> bool:
    """Whether the request of an answer with this id had instructions."""
    return response.startswith(_INSTRUCTED)


def _items(answer: ChatAnswer, response_id: str) -> Iterator[dict[str, Any]]:
    # Ids follow from the answer's, so that a stream and its end agree.
    tail = response_id.removeprefix("resp_")
    if answer.thought:
        yield {
            "id": f"rs_{tail}",
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": answer.thought}],
        }
    if answer.content or not answer.calls:
        part = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
        yield {
            "id": f"msg_{tail}",
            "type": "message",
            "role": "assistant",
            "status": "incomplete" if answer.cut_off else "completed",
            "content": [part],
        }
    for place, call in enumerate(answer.calls):
        yield {
            "id": f"fc_{tail}_{place}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments_json,
            "status": "completed",
        }


def _usage(answer: ChatAnswer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
