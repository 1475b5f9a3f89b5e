"""Mistakes of clients: each is told in a sentence, and is never repeated by a client."""

import json
from typing import Any

import pytest
from open_session import opened
from stage import Stage
from test_clients import QUESTION
from test_reported import told

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def with_arguments(arguments: str) -> dict[str, Any]:
    """A request whose history has a call with these arguments."""
    call = {"id": "1", "function": {"name": "find", "arguments": arguments}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    return {"messages": [QUESTION, said, {"role": "tool", "content": "B7", "tool_call_id": "1"}]}


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (CHAT, {"messages": [QUESTION], "stream_options": "abc"}, "stream_options must be an obj"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": 5}]}, "tool_calls must be a list"),
        (CHAT, with_arguments('{"a": "\\ud800"}'), "surrogates"),
        (CHAT, with_arguments(f'{{"a": 1{"0" * 30}}}'), "64-bit"),
        (CHAT, with_arguments(f'{{"a": 1{"0" * 5000}}}'), "is not valid JSON"),
        (CHAT, with_arguments("[" * 50_000), "is nested too deeply"),
        (CHAT, f'{{"messages": [], "metadata": {nested(300)}}}', "messages must be a list"),
        (CHAT, f'{{"messages": [{json.dumps(QUESTION)}], "metadata": {nested(300)}}}', "limit"),
        (RESPONSES, {"input": "x", "previous_response_id": f"resp_{'9' * 5000}-x"}, "no answer of"),
        (RESPONSES, {"input": "x", "text": 5}, "text must be an object"),
        (MESSAGES, {"max_tokens": 9, "messages": [{"role": "user", "content": 5}]}, "content must"),
    ],
)
async def test_a_request_that_cannot_be_read_is_the_client_s_mistake(
    stage: Stage, path: str, body: object, said: str
) -> None:
    async with opened(stage) as there:
        status, text = await told(there, path, body)
        assert status == 400 and said in json.loads(text)["error"]["message"]
        stage.lines = ["one"]
        assert (await told(there, CHAT, {"messages": [QUESTION]}))[0] == 200
