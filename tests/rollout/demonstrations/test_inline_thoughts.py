"""A thought within the content is trained as the chat template writes it, as one in a field is."""

from typing import Any

import pytest
from families import BY_NAME, renderer_of, tokenizer_of

from agentrl.databases.token_tree import TokenTree
from agentrl.rollout.demonstrations import Demonstration, demonstrated_tree, read_demonstration

QUESTION = {"role": "user", "content": "bin 3?"}
THINKING = ["qwen3", "qwen3.5", "qwen3.6", "glm4.5"]


def tree_of(family: str, turns: list[dict[str, Any]]) -> TokenTree:
    messages = [each for turn in turns for each in (QUESTION, {"role": "assistant", **turn})]
    shown = read_demonstration({"messages": messages})
    assert isinstance(shown, Demonstration)
    return demonstrated_tree(renderer_of(family), shown)


def trained(family: str, tree: TokenTree) -> str:
    return str(tokenizer_of(family).decode(tree["ids"][tree["mask"] == 1]))


@pytest.mark.parametrize("family", THINKING)
@pytest.mark.parametrize("thought", ["hm", "hm\n\nho", ""])
def test_an_inline_thought_is_trained_as_the_template_writes_it(family: str, thought: str) -> None:
    inline = {"content": f"<think>\n{thought}\n</think>\n\nA"}
    tree = tree_of(family, [inline, inline])
    field = {"content": "A", "reasoning_content": thought}
    assert tree == tree_of(family, [field, field])
    # transformers' own text of the message as the row has it.
    tokenizer, options = tokenizer_of(family), BY_NAME[family].options
    prompt, whole = (
        tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=messages == [QUESTION], **options
        )
        for messages in ([QUESTION], [QUESTION, {"role": "assistant", **inline}])
    )
    said = trained(family, tree_of(family, [inline])).removesuffix(BY_NAME[family].stops[0])
    written = whole.removeprefix(prompt).rstrip().removesuffix(BY_NAME[family].stops[0])
    assert said == written


@pytest.mark.parametrize("family", THINKING)
@pytest.mark.parametrize("thought", ["hm", " hm\n"])
def test_a_thought_in_the_content_and_in_a_field_is_trained_once(family: str, thought: str) -> None:
    field = {"content": "A", "reasoning_content": thought}
    for inline in ("hm", ""):
        twice = {**field, "content": f"<think>\n{inline}\n</think>\n\nA"}
        assert tree_of(family, [twice, twice]) == tree_of(family, [field, field])
    other = {**field, "content": "<think>\nho\n</think>\n\nA"}
    with pytest.raises(ValueError, match=r"^message 4: has a thought in its content, and another"):
        tree_of(family, [field, other])


@pytest.mark.parametrize("family", [*THINKING, "qwen2.5", "llama3.1"])
@pytest.mark.parametrize("content", ["use <think> so", "<think>", "<think>open"])
def test_marks_that_are_no_thought_stay_in_the_content(family: str, content: str) -> None:
    assert content in trained(family, tree_of(family, [{"content": content}]))


@pytest.mark.parametrize("family", ["qwen2.5", "llama3.1", "gpt-oss"])
def test_where_the_template_has_no_such_thoughts_the_content_stays_as_it_is(family: str) -> None:
    content = "<think>\nhm\n</think>\n\nA"
    assert content in trained(family, tree_of(family, [{"content": content}]))
