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
    Tool,
    positive,
    sent_call,
    text_of_content,
    texts,
    tool_schemas,
)
from agentrl.rollout.chat import Message

MOST_ANSWERS = 128


def parse(body: Mapping[str, Any]) -> ChatRequest:
    """The request in a body. Raises `BadRequest`."""
    sent = body.get("messages")
    if not isinstance(sent, list) or not sent:
        raise BadRequest("messages must be a list of messages, and not empty")
    form = body.get("response_format") or {"type": "text"}
    if not isinstance(form, dict) or form.get("type") != "text":
        raise BadRequest(
            "response_format: the gateway gives text only; describe the form in the prompt, so "
            "that the model learns it"
        )
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
    )


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
    for i, call in enumerate(message.get("tool_calls") or ()):
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


def completion(request: ChatRequest, answers: Sequence[ChatAnswer], session: str) -> dict[str, Any]:
    """The body of a whole answer."""
    return {
        **_head("chat.completion", request, answers, session),
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


def chunks(
    request: ChatRequest, answers: Sequence[ChatAnswer], session: str, with_usage: bool
) -> Iterator[str]:
    """The answers as the data of server-sent events."""
    head = _head("chat.completion.chunk", request, answers, session)

    def chunk(index: int, delta: object, reason: str | None = None, told: Any = None) -> str:
        choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": told}
        return json.dumps({**head, "choices": [choice]})

    for index, answer in enumerate(answers):
        yield chunk(index, {"role": "assistant", "content": ""})
        if answer.thought:
            yield chunk(index, {"reasoning_content": answer.thought})
        if answer.content or request.logprobs:
            told = _logprobs(answer) if request.logprobs else None
            yield chunk(index, {"content": answer.content}, told=told)
        for place, call in enumerate(_calls(answer)):
            yield chunk(index, {"tool_calls": [{"index": place, **call}]})
        yield chunk(index, {}, _finish_reason(answer))
    if with_usage:
        yield json.dumps({**head, "choices": [], "usage": _usage(answers)})
    yield "[DONE]"


def error(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def turn_of(completion: str, session: str) -> int | None:
    """The turn of an answer with this id; None if it is no answer of the session."""
    number, _, of = completion.removeprefix("chatcmpl-").partition("-")
    return int(number) if number.isdecimal() and of == session else None


def _head(
    kind: str, request: ChatRequest, answers: Sequence[ChatAnswer], session: str
) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answers[0].turn}-{session}",
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
