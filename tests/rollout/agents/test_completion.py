"""What servers that call themselves compatible answer, as a turn or as one sentence."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.llm.completion import EndpointCall, EndpointTurn, NoTurn, read_turn

FAULT = 'a tool call must have a "function" with a "name" and "arguments"'
FUNCTION = {"name": "stock", "arguments": '{"bin":"R5"}'}
CALL = EndpointCall("c", "stock", '{"bin":"R5"}')


def read(message: Any, **fields: Any) -> EndpointTurn:
    answer = {"choices": [{"message": message, "finish_reason": "stop"}], **fields}
    return read_turn(json.dumps(answer).encode())


def calls(*given: Any) -> tuple[EndpointCall, ...]:
    return read({"content": None, "tool_calls": list(given)}).calls


def test_a_call_of_a_function_is_read_whatever_its_type() -> None:
    for kind in ({"type": "function"}, {}, {"type": None}, {"type": "tool"}):
        assert calls({"id": "c", "function": FUNCTION, **kind}) == (CALL,)
    [older] = read({"content": None, "function_call": FUNCTION}).calls
    assert (older.id, older.name, older.arguments) == ("", "stock", '{"bin":"R5"}')
    [dumped] = calls({"id": None, "function": {**FUNCTION, "arguments": {"bin": "ä"}}})
    assert (dumped.id, dumped.arguments) == ("", '{"bin": "ä"}')
    assert calls({"function": {"name": "find", "arguments": None}})[0].arguments == ""
    for none in (None, [], {}, ""):
        assert read({"content": "x", "tool_calls": none, "function_call": none}).calls == ()


@pytest.mark.parametrize(
    "call",
    [
        {"id": "c", "type": "custom", "custom": {"name": "x", "input": "y"}},
        {"id": "c", "type": "function", "function": None},
        {"id": "c", "function": {"name": None, "arguments": "{}"}},
    ],
)
def test_a_call_that_is_not_understood_stays_a_call(call: dict[str, Any]) -> None:
    [read_call] = calls(call)
    assert (read_call.id, read_call.name, read_call.fault) == ("c", "", FAULT)
    assert json.loads(read_call.arguments) == call


def test_content_is_joined_from_its_texts() -> None:
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "so"}]},
        {"type": "text", "text": "4"}, {"type": "output_text", "text": "6"}, "!",
    ]  # fmt: skip
    turn = read({"content": parts})
    assert (turn.content, turn.reasoning) == ("46!", "so")
    assert read({"content": {"text": "46"}}).content == "46"
    assert read({"content": {"answer": 46}}).content == '{"answer": 46}'
    assert read({"content": None}).content == read({}).content == ""
    assert read({"content": "a\ud800"}).content == "a?"
    assert read({"content": "x", "reasoning": "so"}).reasoning == "so"


def test_counts_that_are_not_given_are_0() -> None:
    def counts(usage: Any) -> tuple[int, int, int]:
        turn = read({"content": "x"}, usage=usage)
        return turn.prompt_tokens, turn.completion_tokens, turn.cached_tokens

    cached = {"cached_tokens": 3}
    usual = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": cached}
    assert counts(usual) == (5, 2, 3)
    assert counts({"prompt_tokens": None, "prompt_tokens_details": None}) == (0, 0, 0)
    assert counts({"prompt_tokens": 5.5, "completion_tokens": "2"}) == (5, 0, 0)
    assert counts({"prompt_tokens": -1, "completion_tokens": 10**400}) == (0, 0, 0)
    assert counts(None) == counts([]) == (0, 0, 0)


def test_what_is_no_completion_is_told_in_one_sentence() -> None:
    def said(body: bytes) -> str:
        with pytest.raises(NoTurn) as error:
            read_turn(body)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "it is no JSON: it begins '<html> <p>'" in said(b"<html>\n<p>")
    assert "it is no JSON" in said(b"\xff") and "it is no JSON" in said(b"1" * 5000)
    assert "nested too deeply" in said(b"[" * 100_000)
    assert "it has no choices" in said(b'{"choices": null, "error": {"message": "busy"}}')
    assert "has no message" in said(b'{"choices": [{"message": null}]}')
    assert "its tool_calls are no list" in said(
        b'{"choices": [{"message": {"tool_calls": {"name": "x"}}}]}'
    )
    for content in (46, False, [1], [{"type": "image_url"}], [{"type": []}]):
        body = {"choices": [{"message": {"content": content}}]}
        assert "neither a text nor a list of texts" in said(json.dumps(body).encode())


WORDS = st.sampled_from(
    ["type", "text", "thinking", "function", "custom", "name", "arguments", "id", "content",
     "tool_calls", "function_call", "message", "choices", "usage", "reasoning"]
)  # fmt: skip
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)


def objects(*names: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects that may have these fields; anything in their place too."""
    known = {**dict.fromkeys(names, ANY), **fields}
    return ANY | st.fixed_dictionaries({}, optional=known)


FUNCTIONS = objects("name", "arguments")
MESSAGES = objects(
    "content", "reasoning", tool_calls=st.lists(objects("id", "type", function=FUNCTIONS)),
    function_call=FUNCTIONS,
)  # fmt: skip
CHOICES = st.lists(objects("finish_reason", message=MESSAGES), min_size=1, max_size=2)
USAGES = objects("prompt_tokens", "completion_tokens", "prompt_tokens_details")


@given(objects(choices=CHOICES, usage=USAGES))
def test_whatever_is_answered_is_a_turn_or_none(answer: Any) -> None:
    try:
        turn = read_turn(json.dumps(answer).encode())
    except NoTurn:
        return
    texts = [turn.content, turn.reasoning, turn.finish_reason]
    texts += [text for call in turn.calls for text in (call.id, call.name, call.arguments)]
    assert all(type(text) is str and text.encode() is not None for text in texts)
    counts = (turn.prompt_tokens, turn.completion_tokens, turn.cached_tokens)
    assert all(type(count) is int and count >= 0 for count in counts)


@given(st.binary(max_size=60))
def test_whatever_bytes_are_answered_are_a_turn_or_none(body: bytes) -> None:
    with pytest.raises(NoTurn):
        read_turn(body)
