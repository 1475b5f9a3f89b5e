"""A result names its call by the id that the call has, in the row and in what is trained."""

from copy import deepcopy
from typing import Any

import pytest
from families import BY_NAME, renderer_of, tokenizer_of

from agentrl.rollout.demonstrations import Demonstration, demonstrated_tree, read_demonstration

QUESTION = {"role": "user", "content": "bins R5 and M1?"}
DONE = {"role": "assistant", "content": "53"}
SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Counts.",
            "parameters": {"type": "object", "properties": {"bin": {"type": "string"}}},
        },
    }
    for name in ("stock", "order")
]


def calls(**called: str | None) -> dict[str, Any]:
    """A turn that calls tools, with these ids."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                **({"id": given} if given else {}),
                "type": "function",
                "function": {"name": name, "arguments": {"bin": "R5"}},
            }
            for name, given in called.items()
        ],
    }


def result(name: str, given: str | None, content: str) -> dict[str, Any]:
    message = {"role": "tool", "name": name, "content": content}
    return message if given is None else {**message, "tool_call_id": given}


def two_turns(first: str | None, second: str | None, third: str | None) -> list[dict[str, Any]]:
    """Two calls whose results come in the other order, and one more call of the first tool."""
    messages = [QUESTION, calls(stock=first, order=second)]
    results = [result("stock", first, "46"), result("order", second, "7")]
    messages += reversed(results) if first else results
    return [*messages, calls(stock=third), result("stock", third, "47"), DONE]


def prepared_text(family: str, messages: list[dict[str, Any]]) -> str:
    shown = read_demonstration({"messages": messages, "tools": SCHEMAS})
    assert isinstance(shown, Demonstration)
    tree = demonstrated_tree(renderer_of(family), shown)
    return str(tokenizer_of(family).decode(tree["ids"]))


def template_text(family: str, messages: list[dict[str, Any]]) -> str:
    """transformers' own text."""
    text = tokenizer_of(family).apply_chat_template(messages, SCHEMAS, tokenize=False)
    assert isinstance(text, str)
    return text


OWN = {
    "mistral": ("abcdefghi", "abcdefghj", "abcdefghk"),
    "kimi-k2": ("functions.stock:0", "functions.order:1", "functions.stock:2"),
}
# As the renderer numbers calls: over the whole conversation.
MADE = {**OWN, "mistral": ("call00000", "call00001", "call00002")}


@pytest.mark.parametrize("family", OWN)
def test_the_rows_ids_are_kept_where_the_template_takes_them(family: str) -> None:
    messages = two_turns(*OWN[family])
    assert prepared_text(family, messages) == template_text(family, messages)


@pytest.mark.parametrize("family", OWN)
@pytest.mark.parametrize("ids", [("call_1", "call_2", "call_3"), ("call_1", "call_2", "call_1")])
def test_other_ids_are_replaced_in_calls_and_results_alike(
    family: str, ids: tuple[str, str, str]
) -> None:
    written = template_text(family, two_turns(*MADE[family]))
    assert prepared_text(family, two_turns(*ids)) == written


@pytest.mark.parametrize("family", OWN)
def test_results_without_ids_are_those_of_the_calls_in_order(family: str) -> None:
    messages = two_turns(*MADE[family])
    messages[2:4] = reversed(messages[2:4])
    written = template_text(family, messages)
    assert prepared_text(family, two_turns(None, None, None)) == written
    # Ids of results without those of calls name nothing that could be found.
    nameless = two_turns(None, None, None)
    nameless[2]["tool_call_id"], nameless[3]["tool_call_id"] = "a", "b"
    assert prepared_text(family, nameless) == written


@pytest.mark.parametrize("family", ["kimi-k2", "gemma4"])
def test_a_result_without_a_name_has_that_of_its_call(family: str) -> None:
    messages = two_turns(*OWN["kimi-k2"])
    nameless = deepcopy(messages)
    for message in nameless:
        message.pop("name", None)
    assert prepared_text(family, nameless) == prepared_text(family, messages)


@pytest.mark.parametrize("family", ["mistral", "kimi-k2", "qwen2.5"])
def test_a_result_of_no_call_and_two_calls_with_one_id_are_named(family: str) -> None:
    assert BY_NAME[family].calls > 1
    other = [QUESTION, calls(stock="call_1"), result("stock", "call_9", "46"), DONE]
    with pytest.raises(ValueError, match=r"^message 3: its `tool_call_id` 'call_9' is of no call"):
        prepared_text(family, other)
    twice = [QUESTION, calls(stock="call_1", order="call_1"), result("stock", "call_1", "4"), DONE]
    with pytest.raises(ValueError, match=r"^message 2: has two calls with one `id`"):
        prepared_text(family, twice)
