"""A message says the same in every form that people write it in, and says something."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.chat.turns import THOUGHT_FIELDS
from agentrl.rollout.demonstrations.messages import ReadMessage, read_message

CALL = {"name": "stock", "arguments": {"bin": "R5"}}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": CALL}],
}


def said(given: Any) -> dict[str, Any]:
    return read_message(1, given).message


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "function_call": CALL},
        {"role": "assistant", "function_call": {**CALL, "arguments": '{"bin": "R5"}'}},
        {"role": "assistant", "tool_calls": [{"function": CALL}]},
        {"role": "assistant", "tool_calls": json.dumps([CALL])},
        {"role": "assistant", "tool_calls": [{"name": "stock", "parameters": {"bin": "R5"}}]},
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "stock", "parameters": '{"bin": "R5"}'}}],
        },
        {"from": "gpt", "value": None, "tool_calls": [CALL]},
        {"from": "gpt", "value": "", "function_call": CALL},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "function_call", "value": json.dumps([CALL])},
        {"role": "function_call", "content": json.dumps(CALL)},
        # What a table has for a form that the message has not, and for fewer calls than another's.
        {
            "role": "assistant",
            "tool_calls": [CALL],
            "function_call": {"name": None, "arguments": None},
        },
        {
            "role": "assistant",
            "tool_calls": [
                {"function": {**CALL, "id": None}},
                {"id": None, "function": {"name": None, "arguments": {"bin": None}}},
                None,
            ],
        },
        {"role": "assistant", "tool_calls": [CALL], "function_call": "null", "tools": "[]"},
        {"role": "assistant", "tool_calls": " [ ]", "function_call": CALL, "functions": "null"},
    ],
)
def test_every_form_of_a_call_is_the_same_call(message: dict[str, Any]) -> None:
    assert read_message(1, message) == ReadMessage(CALLED, True, frozenset())


@pytest.mark.parametrize("nothing", ["[]", "null", [{"id": None}], [None], {"name": None}])
@pytest.mark.parametrize("field", ["tool_calls", "function_call"])
def test_a_field_of_calls_with_none_is_no_call(field: str, nothing: Any) -> None:
    answer = {"role": "assistant", "content": "46"}
    assert said({**answer, field: nothing}) == answer
    with pytest.raises(ValueError, match="says nothing"):
        said({"role": "assistant", field: nothing})


@pytest.mark.parametrize(("given", "read"), [(0, "0"), (7, "7"), ("a", "a"), ("", None)])
def test_ids_are_texts_and_an_empty_one_is_none(given: Any, read: str | None) -> None:
    turn = said({"role": "assistant", "tool_calls": [{"id": given, "function": CALL}]})
    assert turn["tool_calls"][0].get("id") == read
    assert said({"role": "tool", "content": "", "tool_call_id": given}).get("tool_call_id") == read


@pytest.mark.parametrize(
    ("message", "read"),
    [
        (
            {"role": "function", "name": "stock", "content": "46"},
            {"role": "tool", "content": "46", "name": "stock"},
        ),
        (
            {"from": "observation", "value": "46", "tool_call_id": "c1", "name": "stock"},
            {"role": "tool", "content": "46", "tool_call_id": "c1", "name": "stock"},
        ),
        ({"from": "tool", "value": ""}, {"role": "tool", "content": ""}),
        ({"role": "human", "value": "?"}, {"role": "user", "content": "?"}),
        ({"from": "human", "content": "?"}, {"role": "user", "content": "?"}),
        (
            {"from": "gpt", "value": "7", "reasoning_content": "hm"},
            {"role": "assistant", "content": "7", "reasoning_content": "hm"},
        ),
        (
            {"from": "gpt", "value": "7", "thinking": "hm", "reasoning": "hm"},
            {"role": "assistant", "content": "7", "reasoning_content": "hm"},
        ),
    ],
)
def test_what_one_form_may_say_any_may_say(message: dict[str, Any], read: dict[str, Any]) -> None:
    assert said(message) == read


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"role": "assistant", "text": "46"}, "message 1: says nothing; its fields are role, text"),
        ({"from": "gpt", "text": "46"}, "says nothing; its fields are from, text"),
        ({"role": "assistant", "content": None}, "says nothing"),
        ({"role": "assistant", "content": ""}, "says nothing"),
        ({"role": "assistant", "content": [], "tool_calls": []}, "says nothing"),
        ({"from": "human", "text": "?"}, "says nothing; its fields are from, text"),
        ({"role": "tool", "content": None}, "says nothing"),
        ({"content": "46"}, "role None is none of"),
        ({"role": ["assistant"], "content": "46"}, "role ['assistant'] is none of"),
        ({"role": "user", "from": "gpt", "value": "7"}, "has `role` and `from`, which differ"),
        (
            {"role": "assistant", "content": "7", "value": "8"},
            "has `content` and `value`, which differ",
        ),
        ({"role": "assistant", "content": 7}, "its content is no text (a int)"),
        (
            {"role": "user", "content": [{"type": "image", "text": "", "image": "a.png"}]},
            "its content is no text (a part of type 'image')",
        ),
        ({"role": "user", "content": ["?"]}, "its content is no text (a list with a str)"),
        ({"role": "user", "content": "<image>?", "images": ["a.png"]}, "has `images`, and only"),
        ({"role": "assistant", "content": "7", "thinking": True}, "thought is no text (a bool)"),
        (
            {"role": "assistant", "content": "7", "thinking": "a", "reasoning": "b"},
            "has `reasoning` and `thinking`, which differ",
        ),
        ({"role": "user", "content": "?", "tool_calls": [CALL]}, "only the assistant calls tools"),
        (
            {"role": "assistant", "tool_calls": [CALL], "function_call": CALL},
            "has calls both in `tool_calls` and in `function_call`",
        ),
        ({"from": "function_call", "value": "stock R5"}, "`value` is no call and no list of calls"),
        ({"role": "assistant", "tool_calls": "stock"}, "`tool_calls` is no call and no list"),
        ({"role": "assistant", "tool_calls": [{"name": ""}]}, "a tool call has no name"),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "arguments": []}]},
            "the arguments of stock are no JSON object but a list",
        ),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "arguments": "[]"}]},
            "the arguments of stock are no JSON object but a list",
        ),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "arguments": '{"a": 1, "a": 2}'}]},
            "the arguments of stock are no JSON object",
        ),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "arguments": '{"bin": "\\ud800"}'}]},
            "the arguments of stock are no JSON object",
        ),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "parameters": {"bin": "M1"}}]},
            "has `arguments` and `parameters`, which differ",
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "stock", "args": {"bin": "R5"}}]},
            "a call of stock has no arguments, but `args`, which is not read",
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "stock"}, "arguments": {"bin": "R5"}}],
            },
            "a call of stock has no arguments, but `arguments`, which is not read",
        ),
        ({"role": "user", "content": "?", "tools": [CALL]}, "has `tools`, which stand beside"),
        (
            {"from": "gpt", "value": "7, 8", "train_detail": [{"begin_offset": 0}]},
            "has `train_detail`, and a message is trained as a whole",
        ),
        ({"role": "assistant", "content": "", "refusal": "No."}, "has `refusal`"),
        (
            {"role": "assistant", "content": "7", "train": False, "weight": 1},
            "has `train` and `weight`, which differ",
        ),
    ],
)
def test_what_cannot_be_trained_as_it_is_written_is_refused(
    message: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError) as refused:
        read_message(1, message)
    assert str(refused.value).startswith("message 1: ") and why in str(refused.value)


@pytest.mark.parametrize(
    "arguments", [{"arguments": {}}, {"arguments": None}, {"arguments": ""}, {}]
)
def test_a_call_without_arguments_has_none(arguments: dict[str, Any]) -> None:
    message = said({"role": "assistant", "tool_calls": [{"name": "now", **arguments}]})
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}


@pytest.mark.parametrize("mark", ["train", "weight", "loss"])
def test_a_message_may_say_that_it_is_not_trained(mark: str) -> None:
    message = {"from": "gpt", "value": "7"}
    assert not read_message(1, {**message, mark: 0}).trained
    assert read_message(1, {**message, mark: 1}).trained
    assert read_message(1, {**message, mark: None}).trained


def test_a_call_that_says_that_it_has_no_arguments_may_have_more_fields() -> None:
    call = {"name": "now", "arguments": {}, "result": "noon"}
    read = read_message(1, {"role": "assistant", "tool_calls": [call]})
    assert read.unread == {"tool_calls.result"}


def test_fields_that_are_not_read_are_named_and_stop_nothing() -> None:
    call = {**CALL, "id": "c1", "result": "46"}
    message = {
        "role": "assistant", "content": "46", "id": "m1", "timestamp": 1.5, "prefix": False,
        "tool_calls": [call], "annotations": [],
    }  # fmt: skip
    read = read_message(1, message)
    assert read.unread == {"id", "timestamp", "prefix", "tool_calls.result"}
    assert read_message(1, {"role": "user", "content": "?", "thinking": "hm"}).unread == {
        "thinking"
    }


TEXTS = st.text(st.characters(codec="utf-8"), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=5,
)
SAID = st.fixed_dictionaries(
    {
        "content": TEXTS,
        "thought": TEXTS,
        "calls": st.lists(
            st.fixed_dictionaries(
                {
                    "name": TEXTS.filter(bool),
                    "arguments": st.dictionaries(TEXTS, VALUES, max_size=2),
                }
            ),
            max_size=2,
        ),
    }
)


@given(SAID, st.data())
def test_nothing_that_a_turn_says_is_lost_in_any_form(
    turn: dict[str, Any], data: st.DataObject
) -> None:
    openai, share_gpt = ("role", "content", "assistant"), ("from", "value", "gpt")
    names = data.draw(st.sampled_from([openai, share_gpt]))
    content = turn["content"] or data.draw(st.sampled_from(["", None]))
    message = {names[0]: names[2], names[1]: content}
    message[data.draw(st.sampled_from(THOUGHT_FIELDS))] = turn["thought"]
    calls = [
        {**call, "arguments": json.dumps(call["arguments"])} if data.draw(st.booleans()) else call
        for call in turn["calls"]
    ]
    if len(calls) == 1 and data.draw(st.booleans()):
        message["function_call"] = calls[0]
    else:
        message["tool_calls"] = [{"function": call} for call in calls]
    if not any(turn.values()):
        with pytest.raises(ValueError, match="says nothing"):
            said(message)
        return
    read = said(message)
    assert read["content"] == turn["content"]
    assert read.get("reasoning_content", "") == turn["thought"]
    assert [call["function"] for call in read.get("tool_calls", [])] == turn["calls"]


FIELDS = st.sampled_from(
    ["role", "from", "content", "value", "train", "weight", "tool_calls", "function_call",
     "reasoning", "thinking", "name", "tool_call_id", "text", "images", "id"]
)  # fmt: skip


@given(
    st.dictionaries(FIELDS, VALUES | st.sampled_from(["assistant", "gpt", "user", "function_call"]))
)
def test_any_object_is_a_message_that_says_something_or_is_refused(fields: dict[str, Any]) -> None:
    try:
        read = read_message(1, fields)
    except ValueError:
        return
    message = read.message
    if message["role"] == "assistant":
        assert any(message.get(part) for part in ("content", "reasoning_content", "tool_calls"))
    assert read.unread == {name for name in ("text", "images", "id") if fields.get(name)} | {
        name
        for name in ("reasoning", "thinking")
        if fields.get(name) and message["role"] != "assistant"
    }
