"""Mistakes of clients: each is told in a sentence, and is never repeated by a client."""

import json
from typing import Any

import aiohttp
import pytest
from open_session import opened
from stage import Stage
from test_clients import QUESTION
from test_reported import told

from agentrl.gateway.server import Gateway
from agentrl.gateway.session_keys import SessionKeys

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


@pytest.mark.parametrize("run_is_over", [True, False])
async def test_a_client_learns_whether_its_attempt_ended_with_the_run(run_is_over: bool) -> None:
    keys = SessionKeys()
    headers = {"Authorization": f"Bearer {keys.key_of('r1')}"}
    async with (
        Gateway(keys, run_is_over=lambda: run_is_over).running() as gateway,
        aiohttp.ClientSession() as http,
        http.post(f"{gateway.url}/s/r1/reward", json={"reward": 1.0}, headers=headers) as answer,
    ):
        said = (await answer.json())["error"]
    assert answer.status == 410 and said["code"] == "session_over"
    assert ("the run is finished" in said["message"]) == run_is_over
    assert ("others have it by now" in said["message"]) != run_is_over
