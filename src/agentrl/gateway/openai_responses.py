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
    Event,
    Tool,
    added_to,
    positive,
    schema_of,
    sent_call,
    text_of_content,
    tool_schemas,
)
from agentrl.rollout.chat import Message
from agentrl.rollout.chat.said import Said

_PARTS = {"message": "content", "reasoning": "summary"}  # the field of an item's parts
_OWN_ITEMS = ("reasoning", "item_reference")


def parse(body: Mapping[str, Any], previous: Sequence[Message]) -> ChatRequest:
    """The request in a body. `previous`: messages of `previous_response_id`.

    Raises `BadRequest`.
    """
    text = body.get("text") or {}
    if not isinstance(text, dict):
        raise BadRequest("text must be an object")
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
        json_schema=schema_of(text.get("format"), "text.format"),
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
    body: Mapping[str, Any], answer: ChatAnswer, response_id: str, *, status: str = ""
) -> dict[str, Any]:
    """The body of a whole answer. `status`: of one that has only begun."""
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
        "text": body.get("text") or {"format": {"type": "text"}},
        "truncation": "disabled",
        "usage": None if begun else _usage(answer),
    }


class Events:
    """The answer as events: an item for the thought, one for the text, and one for each call."""

    def __init__(self, body: Mapping[str, Any], response_id: str) -> None:
        self._body = body
        self._id = response_id
        self._sent: Said | None = None
        self._open: dict[str, Any] | None = None  # the item that has begun
        self._n_items = 0
        self._number = -1

    def so_far(self, said: Sequence[Said], prompt_tokens: int) -> Iterator[Event]:
        """Events of what was said since the last call."""
        [now] = said
        if self._sent is None:
            begun = response(self._body, ChatAnswer(""), self._id, status="in_progress")
            yield self._event("response.created", response=begun)
            yield self._event("response.in_progress", response=begun)
            self._sent = Said()
        sent, self._sent = self._sent, now
        if thought := added_to(sent.thought, now.thought):
            yield from self._begin(_thought_item(self._id, ""))
            yield self._part("response.reasoning_summary_text.delta", delta=thought)
        if text := added_to(sent.text, now.text):
            yield from self._begin(_text_item(self._id, "", "in_progress"))
            yield self._part("response.output_text.delta", delta=text, logprobs=[])

    def end(self, answers: Sequence[ChatAnswer]) -> Iterator[Event]:
        """The last events."""
        [answer] = answers
        yield from self.so_far([answer.said], answer.prompt_tokens)
        if not answer.content and not answer.calls:
            yield from self._begin(_text_item(self._id, "", "in_progress"))
        yield from self._done("incomplete" if answer.cut_off else "completed")
        for item in _items(answer, self._id):
            if item["type"] == "function_call":
                yield from self._call(item)
        name = "response.incomplete" if answer.cut_off else "response.completed"
        yield self._event(name, response=response(self._body, answer, self._id))

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        """Begin an item and its one part, unless it is the one that has begun."""
        if self._open is not None and self._open["id"] == item["id"]:
            return
        yield from self._done("completed")
        self._open = item
        kind, [part] = _PARTS[item["type"]], item[_PARTS[item["type"]]]
        yield self._event("response.output_item.added", item={**item, kind: []})
        added = "content_part" if kind == "content" else "reasoning_summary_part"
        yield self._part(f"response.{added}.added", part=part)

    def _done(self, status: str) -> Iterator[Event]:
        """End the item that has begun."""
        if self._open is None:
            return
        assert self._sent is not None, "an item has begun"
        if self._open["type"] == "message":
            item = _text_item(self._id, self._sent.text, status)
            yield self._part("response.output_text.done", text=self._sent.text, logprobs=[])
            yield self._part("response.content_part.done", part=item["content"][0])
        else:
            item = _thought_item(self._id, self._sent.thought)
            yield self._part("response.reasoning_summary_text.done", text=self._sent.thought)
            yield self._part("response.reasoning_summary_part.done", part=item["summary"][0])
        yield self._event("response.output_item.done", item=item)
        self._open = None
        self._n_items += 1

    def _call(self, item: dict[str, Any]) -> Iterator[Event]:
        empty = {**item, "status": "in_progress", "arguments": ""}
        said = item["arguments"]
        yield self._event("response.output_item.added", item=empty)
        name = "response.function_call_arguments"
        yield self._event(f"{name}.delta", item_id=item["id"], delta=said)
        done = {"name": item["name"], "arguments": said}
        yield self._event(f"{name}.done", item_id=item["id"], **done)
        yield self._event("response.output_item.done", item=item)
        self._n_items += 1

    def _part(self, name: str, /, **fields: Any) -> Event:
        """An event of the one part of the item that has begun."""
        assert self._open is not None, "an item has begun"
        index = "content_index" if self._open["type"] == "message" else "summary_index"
        return self._event(name, item_id=self._open["id"], **{index: 0}, **fields)

    def _event(self, name: str, /, **fields: Any) -> Event:
        self._number += 1
        told = {"type": name, "sequence_number": self._number}
        if "response" not in fields:
            told["output_index"] = self._n_items
        return name, json.dumps({**told, **fields})


# The id of an answer tells its request, and whether that had instructions: their message is then
# the first of the conversation.
_INSTRUCTED, _PLAIN = "resp_i", "resp_p"


def name_of(body: Mapping[str, Any], request: int, session: str) -> str:
    """The id of the answer to a request: the same whenever it is given."""
    return f"{_INSTRUCTED if body.get('instructions') else _PLAIN}{request}_{session}"


def request_of(name: str, session: str) -> int | None:
    """The request that an answer of this id is to; None if it is no answer of the session."""
    number, _, of = name.removeprefix(_INSTRUCTED).removeprefix(_PLAIN).partition("_")
    return int(number) if number.isdecimal() and of == session else None


def was_instructed(name: str) -> bool:
    """Whether the request of an answer with this id had instructions."""
    return name.startswith(_INSTRUCTED)


def _items(answer: ChatAnswer, response_id: str) -> Iterator[dict[str, Any]]:
    tail = response_id.removeprefix("resp_")
    if answer.thought:
        yield _thought_item(response_id, answer.thought)
    if answer.content or not answer.calls:
        status = "incomplete" if answer.cut_off else "completed"
        yield _text_item(response_id, answer.content, status)
    for place, call in enumerate(answer.calls):
        yield {
            "id": f"fc_{tail}_{place}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments_json,
            "status": "completed",
        }


# Ids of items follow from the answer's, so that a stream and its end agree.


def _thought_item(response_id: str, thought: str) -> dict[str, Any]:
    return {
        "id": f"rs_{response_id.removeprefix('resp_')}",
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": thought}],
    }


def _text_item(response_id: str, text: str, status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{response_id.removeprefix('resp_')}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [part],
    }


def _usage(answer: ChatAnswer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
