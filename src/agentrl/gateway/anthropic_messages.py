"""Messages: https://docs.anthropic.com/en/api/messages. No I/O.

As in Chat Completions, the run's sampling parameters apply, and `tool_choice` forces no call.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.gateway.exchange import (
    BadRequest,
    ChatAnswer,
    ChatRequest,
    Tool,
    positive,
    sent_call,
    text_of_content,
    texts,
    tool_schemas,
)
from agentrl.rollout.chat import Message

_THOUGHTS = ("thinking", "redacted_thinking")


def parse(body: Mapping[str, Any]) -> ChatRequest:
    """The request in a body. Raises `BadRequest`."""
    sent = body.get("messages")
    if not isinstance(sent, list) or not sent:
        raise BadRequest("messages must be a list of messages, and not empty")
    messages: list[Message] = []
    if system := text_of_content(body.get("system"), "system"):
        messages.append({"role": "system", "content": system})
    for i, message in enumerate(sent):
        messages += _messages(message, f"messages[{i}]")
    choice = body.get("tool_choice")
    no_tools = isinstance(choice, dict) and choice.get("type") == "none"
    return ChatRequest(
        messages=messages,
        tools=[] if no_tools else tool_schemas(body.get("tools"), _tool),
        max_new_tokens=positive(body.get("max_tokens"), "max_tokens"),
        stop=texts(body.get("stop_sequences"), "stop_sequences"),
        model=str(body.get("model") or ""),
    )


def _messages(message: object, where: str) -> Iterator[Message]:
    """The messages that one of the API stands for: results of tools are messages of their own."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise BadRequest(f"{where}.role must be user or assistant")
    role, content = message["role"], message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise BadRequest(f"{where}.content must be a text or a list of blocks")
    said: list[str] = []
    calls: list[Message] = []
    for i, block in enumerate(blocks):
        place, kind = f"{where}.content[{i}]", block.get("type")
        if kind in _THOUGHTS and role == "assistant":
            continue
        if kind == "tool_use" and role == "assistant":
            call = sent_call(block.get("id"), block.get("name"), block.get("input"), place)
            calls.append(call)
        elif kind == "tool_result" and role == "user":
            result = text_of_content(block.get("content"), f"{place}.content")
            yield {"role": "tool", "content": result, "tool_call_id": block.get("tool_use_id")}
        else:
            said.append(text_of_content([block], place))
    if role == "assistant":
        spoken: Message = {"role": "assistant", "content": "".join(said)}
        yield {**spoken, "tool_calls": calls} if calls else spoken
    elif said:
        yield {"role": role, "content": "\n".join(said)}


def _tool(sent: Mapping[str, Any], where: str) -> Tool:
    if isinstance(sent.get("name"), str) and "input_schema" not in sent:
        raise BadRequest(f"{where} ({sent['name']}) is a tool of the provider's servers")
    return Tool(sent.get("name"), sent.get("description"), sent.get("input_schema"))


def message(request: ChatRequest, answer: ChatAnswer, session: str) -> dict[str, Any]:
    """The body of a whole answer."""
    reason, sequence = _stop_reason(answer)
    return {
        **_head(request, answer, session),
        "content": list(_blocks(answer)),
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": _usage(answer),
    }


def events(request: ChatRequest, answer: ChatAnswer, session: str) -> Iterator[tuple[str, str]]:
    """The answer as server-sent events: their names and data."""

    def event(name: str, /, **fields: Any) -> tuple[str, str]:
        return name, json.dumps({"type": name, **fields})

    begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    usage = {**_usage(answer), "output_tokens": 0}
    yield event(
        "message_start", message={**_head(request, answer, session), **begun, "usage": usage}
    )
    for index, block in enumerate(_blocks(answer)):
        match block["type"]:
            case "thinking":
                empty: dict[str, Any] = {"thinking": "", "signature": ""}
                delta = {"type": "thinking_delta", "thinking": block["thinking"]}
            case "text":
                empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
            case _:
                empty = {"input": {}}
                delta = {
                    "type": "input_json_delta",
                    "partial_json": json.dumps(block["input"], ensure_ascii=False),
                }
        yield event("content_block_start", index=index, content_block={**block, **empty})
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    reason, sequence = _stop_reason(answer)
    ended = {"stop_reason": reason, "stop_sequence": sequence}
    yield event("message_delta", delta=ended, usage={"output_tokens": answer.completion_tokens})
    yield event("message_stop")


def error(message: str, kind: str) -> dict[str, Any]:
    """The body of an error."""
    return {"type": "error", "error": {"type": kind, "message": message}}


def _head(request: ChatRequest, answer: ChatAnswer, session: str) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.turn}_{session}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
    }


def _blocks(answer: ChatAnswer) -> Iterator[dict[str, Any]]:
    if answer.thought:
        yield {"type": "thinking", "thinking": answer.thought, "signature": ""}
    if answer.content or not answer.calls:
        yield {"type": "text", "text": answer.content}
    for call in answer.calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}


def _stop_reason(answer: ChatAnswer) -> tuple[str, str | None]:
    if answer.cut_off:
        return "max_tokens", None
    if answer.calls:
        return "tool_use", None
    return ("stop_sequence", answer.stopped_by) if answer.stopped_by else ("end_turn", None)


def _usage(answer: ChatAnswer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": answer.completion_tokens,
    }
