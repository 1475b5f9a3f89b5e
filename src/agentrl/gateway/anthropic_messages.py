"""Messages: https://docs.anthropic.com/en/api/messages. No I/O.

As in Chat Completions, the run's sampling parameters apply, and `tool_choice` forces no call.
"""

import json
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
    texts,
    tool_schemas,
)
from agentrl.rollout.chat import Message
from agentrl.rollout.chat.said import Said

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
    output = body.get("output_config")
    form = output.get("format") if isinstance(output, dict) else body.get("output_format")
    no_tools = isinstance(choice, dict) and choice.get("type") == "none"
    return ChatRequest(
        messages=messages,
        tools=[] if no_tools else tool_schemas(body.get("tools"), _tool),
        max_new_tokens=positive(body.get("max_tokens"), "max_tokens"),
        stop=texts(body.get("stop_sequences"), "stop_sequences"),
        model=str(body.get("model") or ""),
        json_schema=schema_of(form, "output_config.format"),
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


def message(request: ChatRequest, answer: ChatAnswer, name: str) -> dict[str, Any]:
    """The body of a whole answer. `name`: see `name_of`."""
    reason, sequence = _stop_reason(answer)
    return {
        **_head(request, name),
        "content": list(_blocks(answer)),
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": _usage(answer),
    }


class Events:
    """The answer as events: a block for the thought, one for the text, and one for each call."""

    def __init__(self, request: ChatRequest, name: str) -> None:
        self._request = request
        self._name = name
        self._sent: Said | None = None
        self._open: str | None = None  # the type of the block that has begun
        self._n_blocks = 0

    def so_far(self, said: Sequence[Said], prompt_tokens: int) -> Iterator[Event]:
        """Events of what was said since the last call."""
        [now] = said
        if self._sent is None:
            begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
            usage = _usage(ChatAnswer("", prompt_tokens=prompt_tokens))
            message = {**_head(self._request, self._name), **begun, "usage": usage}
            yield _event("message_start", message=message)
            self._sent = Said()
        sent, self._sent = self._sent, now
        if thought := added_to(sent.thought, now.thought):
            yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta(type="thinking_delta", thinking=thought)
        if text := added_to(sent.text, now.text):
            yield from self._begin({"type": "text", "text": ""})
            yield self._delta(type="text_delta", text=text)

    def end(self, answers: Sequence[ChatAnswer]) -> Iterator[Event]:
        """The last events."""
        [answer] = answers
        yield from self.so_far([answer.said], answer.prompt_tokens)
        if not answer.content and not answer.calls:
            yield from self._begin({"type": "text", "text": ""})
        yield from self._stop()
        for call in answer.calls:
            head = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield from self._begin(head)
            yield self._delta(type="input_json_delta", partial_json=call.arguments_json)
            yield from self._stop()
        reason, sequence = _stop_reason(answer)
        ended = {"stop_reason": reason, "stop_sequence": sequence}
        yield _event("message_delta", delta=ended, usage=_usage(answer))
        yield _event("message_stop")

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        """Begin a block, unless it is the one that has begun."""
        if self._open == block["type"]:
            return
        yield from self._stop()
        self._open = block["type"]
        yield _event("content_block_start", index=self._n_blocks, content_block=block)

    def _delta(self, **delta: str) -> Event:
        return _event("content_block_delta", index=self._n_blocks, delta=delta)

    def _stop(self) -> Iterator[Event]:
        if self._open is not None:
            yield _event("content_block_stop", index=self._n_blocks)
            self._open = None
            self._n_blocks += 1


def _event(name: str, /, **fields: Any) -> Event:
    return name, json.dumps({"type": name, **fields}, ensure_ascii=False)


def error(message: str, kind: str) -> dict[str, Any]:
    """The body of an error."""
    return {"type": "error", "error": {"type": kind, "message": message}}


def name_of(request: int, session: str) -> str:
    """The id of the answer to a request: the same whenever it is given."""
    return f"msg_{request}_{session}"


def _head(request: ChatRequest, name: str) -> dict[str, Any]:
    return {
        "id": name,
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
