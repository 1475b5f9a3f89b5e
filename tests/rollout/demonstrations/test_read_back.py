"""What a row's turn says is what is read of the turn as it is written, or the row is named."""

from copy import deepcopy
from typing import Any

import pytest
from families import FAMILIES, Family, renderer_of, tokenizer_of

from agentrl.databases.token_tree import TokenTree
from agentrl.rollout.chat import ChatRenderer
from agentrl.rollout.demonstrations import Demonstration, demonstrated_tree, read_demonstration

QUESTION = {"role": "user", "content": "bin 3?"}
WRITING = [family for family in FAMILIES if family.structured]
# Every family's notation has these.
ARGUMENTS: list[dict[str, Any]] = [
    {}, {"b": "R5"}, {"b": "007"}, {"b": "5"}, {"b": "true"}, {"b": True}, {"b": "null"},
    {"b": None}, {"b": "[1]"}, {"b": '{"a": 1}'}, {"b": {"a": [1, None, True, {"b": "c"}]}},
    {"b": [1, {"a": 2}]}, {"b": 0.1}, {"b": 1.0}, {"b": 2**63 - 1}, {"b": 'a"b\\c'}, {"b": ""},
    {"b": "\n\nline\n"}, {"b": " x "}, {"b": "a</tool_call>b"}, {"b": "é<&>\"'☃"},
    {"b": "it's {x: 1}, ok"}, {"b": "def f():\n    return 'x'\n"}, {"b": "1", "c": 2, "d": "x y"},
]  # fmt: skip


def called(arguments: dict[str, Any], schemas: dict[str, Any] | None = None) -> dict[str, Any]:
    """A row with one call. `schemas`: of the tool's parameters; without them there are no tools."""
    call = {"id": "abcdefghi", "function": {"name": "stock", "arguments": arguments}}
    function = {"name": "stock", "description": "Counts.",
                "parameters": {"type": "object", "properties": schemas}}  # fmt: skip
    return {
        "messages": [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}],
        "tools": [] if schemas is None else [{"type": "function", "function": function}],
    }


def tree_of(renderer: ChatRenderer, row: dict[str, Any]) -> TokenTree:
    shown = read_demonstration(row)
    assert isinstance(shown, Demonstration)
    return demonstrated_tree(renderer, shown)


def refusal(renderer: ChatRenderer, row: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as refused:
        tree_of(renderer, row)
    return str(refused.value)


@pytest.mark.parametrize("family", WRITING, ids=str)
@pytest.mark.parametrize("typed", [False, True])
def test_calls_are_trained_to_their_end_in_every_notation(family: Family, typed: bool) -> None:
    renderer, tokenizer = renderer_of(family.name), tokenizer_of(family.name)
    ends = [end for end, _ in renderer.capabilities.turn_ends]

    def bare(text: str) -> str:
        """The turn without the token that ends it."""
        text = text.strip()
        return next((text.removesuffix(end) for end in ends if text.endswith(end)), text).strip()

    for arguments in ARGUMENTS:
        schemas = {key: {"type": kind_of(value)} for key, value in arguments.items()}
        row = called(arguments, schemas if typed else None)
        tree = tree_of(renderer, row)
        # transformers' own text of the same messages.
        prompt, whole = (
            tokenizer.apply_chat_template(
                messages, row["tools"] or None, tokenize=False,
                add_generation_prompt=messages == [QUESTION], **family.options,
            )
            for messages in ([QUESTION], row["messages"])
        )  # fmt: skip
        trained = str(tokenizer.decode(tree["ids"][tree["mask"] == 1]))
        trained = trained.replace("functions.stock:0", "abcdefghi")  # which Kimi K2 has instead
        assert bare(trained) == bare(whole.removeprefix(prompt)), arguments


def kind_of(value: Any) -> str:
    """The name of a JSON value's type."""
    kinds = {str: "string", dict: "object", list: "array", bool: "boolean", int: "integer"}
    return "null" if value is None else kinds.get(type(value), "number")


@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize("number", [12345678901234567890, 10**25])
def test_a_call_that_no_parser_reads_is_named(family: Family, number: int) -> None:
    said = refusal(renderer_of(family.name), called({"b": number}))
    assert said.startswith("message 2: the call of stock ")


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_no_turn_says_the_token_that_ends_it(family: Family) -> None:
    renderer = renderer_of(family.name)
    for end, _ in renderer.capabilities.turn_ends:
        why = f"message 2: says {end!r}, which ends a turn"
        text = f"a chat ends with {end} here"
        assert refusal(renderer, called({"b": text})) == why
        assert refusal(renderer, called({text: "b"})) == why
        for field in ("content", "reasoning_content"):
            turn = {"role": "assistant", "content": "A", field: text}
            assert refusal(renderer, {"messages": [QUESTION, turn]}) == why


def test_a_further_token_that_ends_turns_counts_and_one_without_a_text_does_not() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    stops = [tokenizer.convert_tokens_to_ids("<|endoftext|>"), 10**6]
    renderer = ChatRenderer(tokenizer, stops)
    assert tree_of(renderer, called({"b": "R5"}))
    said = refusal(renderer, called({"b": "a text ends with <|endoftext|>"}))
    assert said == "message 2: says '<|endoftext|>', which ends a turn"


# A template that writes the arguments of calls by an expression.
CALLING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ EXPRESSION }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("(c.function.arguments | tojson)[:40]", "the chat template leaves out 'stock'"),
        # No parser reads what this one writes of any call.
        ("(c.function.arguments | tojson)[:20]", "the chat template leaves out 'stock'"),
        (
            "dict((c.function.arguments.items() | list)[:2]) | tojson",
            "the chat template leaves out 'stock'",
        ),
        (
            "dict((c.function.arguments.items() | list)[:2] + (c.function.arguments.items() | list)"
            "[3:]) | tojson",
            'is read as another one, as the chat template writes it: stock with {"bin": "R5", "d',
        ),
    ],
)
def test_a_call_of_which_the_template_writes_a_part_is_named(arguments: str, why: str) -> None:
    tokenizer = deepcopy(tokenizer_of("qwen2.5"))
    tokenizer.chat_template = CALLING.replace("EXPRESSION", arguments)
    renderer = ChatRenderer(tokenizer)
    assert tree_of(renderer, called({"bin": "R5"}))
    long = {"bin": "R5", "depth": 12345, "hall": "the third", "side": "at the door, on the left"}
    assert why in refusal(renderer, called(long))
