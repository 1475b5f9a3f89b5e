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
    """Two calls with their results, and one more call of the first tool."""
    return [
        QUESTION, calls(stock=first, order=second),
        result("stock", first, "46"), result("order", second, "7"),
        calls(stock=third), result("stock", third, "47"), DONE,
    ]  # fmt: skip


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
WITHOUT_IDS = ["qwen3", "qwen3.5", "gemma4"]
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
    written = template_text(family, messages)
    assert prepared_text(family, two_turns(None, None, None)) == written
    # Ids of results without those of calls name nothing that could be found.
    nameless = two_turns(None, None, None)
    nameless[2]["tool_call_id"], nameless[3]["tool_call_id"] = "a", "b"
    assert prepared_text(family, nameless) == written


@pytest.mark.parametrize("family", [*OWN, *WITHOUT_IDS])
def test_results_are_in_the_order_of_their_calls_as_in_sampling(family: str) -> None:
    messages = two_turns(*OWN.get(family, ("a", "b", "c")))
    swapped = deepcopy(messages)
    swapped[2:4] = reversed(swapped[2:4])
    assert prepared_text(family, swapped) == prepared_text(family, messages)


@pytest.mark.parametrize("family", WITHOUT_IDS)
def test_a_result_that_would_be_read_as_another_calls_is_named(family: str) -> None:
    said = r"would be read as the result of another call, of stock, which has none before it"
    messages = two_turns("a", "b", "c")
    without = [*messages[:2], *messages[3:]]
    with pytest.raises(ValueError, match=rf"^message 3: {said}"):
        prepared_text(family, without)
    later = [*messages[:5], messages[3], DONE]  # again the result of a call of the turn before
    with pytest.raises(ValueError, match=rf"^message 6: {said}"):
        prepared_text(family, later)
    # The last call may lack its result: nothing is read as it.
    assert "46" in prepared_text(family, [*messages[:3], DONE])


@pytest.mark.parametrize("family", OWN)
def test_where_results_have_ids_those_before_may_be_missing(family: str) -> None:
    messages = two_turns(*OWN[family])
    del messages[2]
    assert prepared_text(family, messages) == template_text(family, messages)


@pytest.mark.parametrize("family", BY_NAME)
def test_whether_results_have_ids_is_found(family: str) -> None:
    assert renderer_of(family).capabilities.results_have_ids == (family in ("mistral", "kimi-k2"))


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


def test_ids_may_be_numbers_from_0() -> None:
    messages = two_turns("a", "b", "c")
    numbered = deepcopy(messages)
    for at, call in enumerate([*numbered[1]["tool_calls"], *numbered[4]["tool_calls"]]):
        call["id"] = at
    for at, number in ((2, 0), (3, 1), (5, 2)):
        numbered[at]["tool_call_id"] = number
    assert prepared_text("qwen3", numbered) == prepared_text("qwen3", messages)


def test_an_empty_id_of_a_result_is_none() -> None:
    messages = two_turns("a", "b", "c")
    for at in (2, 3, 5):
        messages[at]["tool_call_id"] = ""
    assert prepared_text("qwen3", messages) == prepared_text("qwen3", two_turns("a", "b", "c"))
