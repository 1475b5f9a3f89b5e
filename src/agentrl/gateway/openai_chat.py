"""Chat Completions: https://platform.openai.com/docs/api-reference/chat. No I/O.

The run's sampling parameters apply, whatever a request says, because the trainer computes logprobs
with them. `tool_choice` is a wish: "none" leaves the tools out of the prompt, and no other value
forces a call.
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
    texts,
    tool_schemas,
)
from agentrl.rollout.chat import Message
from agentrl.rollout.chat.said import Said

MOST_ANSWERS = 128


def parse(body: Mapping[str, Any]) -> ChatRequest:
    """The request in a body. Raises `BadRequest`."""
    sent = body.get("messages")
    if not isinstance(sent, list) or not sent:
        raise BadRequest("messages must be a list of messages, and not empty")
    n = positive(body.get("n"), "n") or 1
    if n > MOST_ANSWERS:
        raise BadRequest(f"n is {n}, and may be {MOST_ANSWERS} at most")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    return ChatRequest(
        messages=[_message(message, f"messages[{i}]") for i, message in enumerate(sent)],
        tools=[] if body.get("tool_choice") == "none" else tool_schemas(body.get("tools"), _tool),
        max_new_tokens=positive(limit, "max_completion_tokens"),
        stop=texts(body.get("stop"), "stop"),
        n=n,
        logprobs=bool(body.get("logprobs")),
        model=str(body.get("model") or ""),
        json_schema=schema_of(body.get("response_format"), "response_format"),
    )


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Whether a stream ends with its number of tokens. Raises `BadRequest`."""
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequest(f"stream_options must be an object, got {options!r:.40}")
    return bool(options.get("include_usage"))


def _message(message: object, where: str) -> Message:
    if not isinstance(message, dict):
        raise BadRequest(f"{where} must be an object")
    role = message.get("role")
    content = text_of_content(message.get("content"), f"{where}.content")
    if role in ("system", "developer"):
        return {"role": "system", "content": content}
    if role == "user":
        return {"role": "user", "content": content}
    if role == "tool":
        return {"role": "tool", "content": content, "tool_call_id": message.get("tool_call_id")}
    if role != "assistant":
        raise BadRequest(f"{where}.role is {role!r}: known are system, user, assistant and tool")
    calls = []
    sent = message.get("tool_calls") or []
    if not isinstance(sent, list):
        raise BadRequest(f"{where}.tool_calls must be a list, got {sent!r:.40}")
    for i, call in enumerate(sent):
        place = f"{where}.tool_calls[{i}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise BadRequest(f"{place} has no function")
        arguments = function.get("arguments")
        calls.append(sent_call(call.get("id"), function.get("name"), arguments, place))
    said: Message = {"role": "assistant", "content": content}
    return {**said, "tool_calls": calls} if calls else said


def _tool(sent: Mapping[str, Any], where: str) -> Tool:
    function = sent.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where} must be a function with a name")
    return Tool(function["name"], function.get("description"), function.get("parameters"))


def completion(request: ChatRequest, answers: Sequence[ChatAnswer], name: str) -> dict[str, Any]:
    """The body of a whole answer. `name`: see `name_of`."""
    return {
        **_head("chat.completion", request, name),
        "choices": [
            {
                "index": index,
                "message": _answer_message(answer),
                "finish_reason": _finish_reason(answer),
                "logprobs": _logprobs(answer) if request.logprobs else None,
            }
            for index, answer in enumerate(answers)
        ],
        "usage": _usage(answers),
    }


class Events:
    """The answers as chunks. Logprobs come with the last text."""

    def __init__(self, request: ChatRequest, name: str, *, with_usage: bool) -> None:
        self._request = request
        self._with_usage = with_usage
        self._head = _head("chat.completion.chunk", request, name)
        self._sent: list[Said | None] = [None] * request.n

    def so_far(self, said: Sequence[Said], prompt_tokens: int) -> Iterator[Event]:
        """Chunks of what was said since the last call."""
        for index, now in enumerate(said):
            sent = self._sent[index]
            if sent is None:
                yield self._chunk(index, {"role": "assistant", "content": ""})
                sent = Said()
            self._sent[index] = now
            if thought := added_to(sent.thought, now.thought):
                yield self._chunk(index, {"reasoning_content": thought})
            if text := added_to(sent.text, now.text):
                yield self._chunk(index, {"content": text})

    def end(self, answers: Sequence[ChatAnswer]) -> Iterator[Event]:
        """The last chunks."""
        yield from self.so_far([answer.said for answer in answers], 0)
        for index, answer in enumerate(answers):
            if self._request.logprobs:
                yield self._chunk(index, {"content": ""}, told=_logprobs(answer))
            for place, call in enumerate(_calls(answer)):
                yield self._chunk(index, {"tool_calls": [{"index": place, **call}]})
            yield self._chunk(index, {}, _finish_reason(answer))
        if self._with_usage:
            yield None, json.dumps({**self._head, "choices": [], "usage": _usage(answers)})
        yield None, "[DONE]"

    def _chunk(
        self, index: int, delta: object, reason: str | None = None, told: Any = None
    ) -> Event:
        choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": told}
        return None, json.dumps({**self._head, "choices": [choice]})


def error(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def name_of(request: int, session: str) -> str:
    """The id of the answer to a request: the same whenever it is given."""
    return f"chatcmpl-{request}-{session}"


def request_of(name: str, session: str) -> int | None:
    """The request that an answer of this id is to; None if it is no answer of the session."""
    number, _, of = name.removeprefix("chatcmpl-").partition("-")
    return int(number) if number.isdecimal() and of == session else None


def _head(kind: str, request: ChatRequest, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
    }


def _answer_message(answer: ChatAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.thought:
        message["reasoning_content"] = answer.thought
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = _calls(answer)
    return message


def _calls(answer: ChatAnswer) -> list[dict[str, Any]]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments_json},
        }
        for call in answer.calls
    ]


def _finish_reason(answer: ChatAnswer) -> str:
    if answer.cut_off:
        return "length"
    return "tool_calls" if answer.calls else "stop"


def _logprobs(answer: ChatAnswer) -> dict[str, Any]:
    told = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in answer.tokens
    ]
    return {"content": told, "refusal": None}


def _usage(answers: Sequence[ChatAnswer]) -> dict[str, Any]:
    prompt = answers[0].prompt_tokens
    made = sum(answer.completion_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": answers[0].cached_tokens},
    }
