"""Parsing of tool calls."""

import bson
import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentrl.rollout.tool_calls import MalformedCall, ParsedCall, tool_call_parser

parse = tool_call_parser("qwen25")


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def error_of(text: str) -> str:
    (malformed,) = parse(text).calls
    assert isinstance(malformed, MalformedCall)
    return malformed.error


def test_several_calls_of_a_turn_are_read_in_order_and_the_text_around_them_is_kept() -> None:
    text = (
        "I look.\n"
        + call('{"name": "stock", "arguments": {"bin": "B7"}}')
        + call('{"name": "now"}')
        + "\nThen I wait."
    )
    turn = parse(text)
    assert turn.content == "I look.\n\nThen I wait."
    assert turn.calls == (ParsedCall("stock", {"bin": "B7"}), ParsedCall("now", {}))


def test_a_malformed_call_stands_in_its_place_among_the_others() -> None:
    turn = parse(call('{"name": "a", "arguments": {}}') + call("{nonsense}") + call('{"name":"b"}'))
    assert [type(made) for made in turn.calls] == [ParsedCall, MalformedCall, ParsedCall]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (call("{name: add}"), "not valid JSON"),
        (call("[1, 2]"), "not a JSON object"),
        (call('{"arguments": {}}'), 'no "name"'),
        (call('{"name": 3, "arguments": {}}'), 'no "name"'),
        (call('{"name": "add", "arguments": "a"}'), "not a JSON object"),
        (call('{"name": "add", "arguments": {"a": NaN}}'), "not valid JSON"),
        (call('{"name": "add", "arguments": {"a": 9223372036854775808}}'), "64 bits"),
        (call('{"name": "add", "arguments": {"a\\u0000": 1}}'), "NUL"),
        (call('{"name": "add", "arguments": {"a": ' + "[" * 40 + "]" * 40 + "}}"), "nesting"),
        (call('{"name": "add", "arguments": {"a": "\\ud800"}}'), "not valid JSON"),
        ('<tool_call>\n{"name": "add"}', "not closed"),
    ],
)
def test_a_call_that_cannot_be_made_says_why(text: str, reason: str) -> None:
    assert reason in error_of(text)


def test_text_without_calls_is_content_only() -> None:
    turn = parse(" <answer>42</answer></tool_call> ")
    assert turn.content == "<answer>42</answer></tool_call>"
    assert turn.calls == ()


def test_an_unknown_parser_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"unknown tool call parser 'hermes'; known: .*, qwen25"):
        tool_call_parser("hermes")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
PIECES = st.one_of(
    st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "a", "arguments": ', "}", "\n"]),
    st.text(max_size=12),
    st.builds(lambda value: call(orjson.dumps(value).decode()), JSON.filter(lambda v: _is_json(v))),
)


def _is_json(value: object) -> bool:
    try:
        orjson.dumps(value)
    except TypeError:  # an integer or a text that JSON text cannot hold
        return False
    return True


@given(st.lists(PIECES, max_size=12).map("".join))
@example(call('{"name":"a","arguments":' + "[" * 100_000))
@example(call('{"name":"a","arguments":{"a":' + "9" * 10_000 + "}}"))
def test_any_text_is_parsed_without_an_error_into_calls_that_mongodb_can_store(text: str) -> None:
    turn = parse(text)
    assert len(turn.calls) <= text.count("<tool_call>")
    for made in turn.calls:
        if isinstance(made, ParsedCall):
            bson.encode(made.arguments)
            made.name.encode()


@given(st.dictionaries(st.text(max_size=5), st.integers(-(2**63) + 1, 2**63 - 1) | st.text()))
def test_arguments_come_back_as_they_were_written(arguments: dict[str, object]) -> None:
    if any("\0" in key for key in arguments):
        return
    body = orjson.dumps({"name": "tool", "arguments": arguments}).decode()
    if "tool_call>" in body:
        return
    assert parse(call(body)).calls == (ParsedCall("tool", arguments),)
