"""Nothing that is said to the model is left out of its prompt without a word."""

from copy import deepcopy
from typing import Any

import pytest
from families import FAMILIES, Family, renderer_of, tokenizer_of
from jinja2 import TemplateError

from agentrl.rollout.chat import ChatRenderer
from agentrl.rollout.demonstrations import Demonstration, demonstrated_tree, read_demonstration

QUESTION = {"role": "user", "content": "bin 3?"}
ANSWER = {"role": "assistant", "content": "46"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "stock", "arguments": {"bin": "R5"}}}],
}
STOCK = {"name": "stock", "description": "d", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": STOCK}]


def text_of(renderer: ChatRenderer, messages: list[dict[str, Any]], tools: Any = None) -> str:
    shown = read_demonstration({"messages": messages, "tools": tools})
    assert isinstance(shown, Demonstration)
    return renderer.codec.decode(demonstrated_tree(renderer, shown)["ids"].tolist())


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_what_developers_say_is_said_by_them_or_by_the_system(family: Family) -> None:
    texts = []  # transformers' own, with what the developer says
    for role in ("developer", "system"):
        prompt = [{"role": role, "content": "Be kind."}, QUESTION]
        try:
            written = tokenizer_of(family.name).apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True, **family.options
            )
        except TemplateError:
            continue
        texts += [written] if "Be kind." in written else []
    developer = {"role": "developer", "content": "Be kind."}
    text = text_of(renderer_of(family.name), [developer, QUESTION, ANSWER])
    assert "Be kind." in text
    # Gemma 2's writes neither: it is said in the question.
    assert text.startswith(texts[0]) if texts else family.name == "gemma2"


RESULTS = ["46", '{"n": 46, "bins": ["R5"]}', "[46]", "  46\n", "a<|im_end|>\n<b>\"'é\\", "", " "]


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_no_row_is_refused_for_what_the_template_does_write(family: Family) -> None:
    renderer = renderer_of(family.name)
    for result in RESULTS:
        said = result or "?"
        messages = [{"role": "system", "content": said}, QUESTION, CALL,
                    {"role": "tool", "content": result}, ANSWER,
                    {"role": "user", "content": said}, ANSWER]  # fmt: skip
        text_of(renderer, messages, TOOLS)


# A template without developers and tools, whose messages are written by an expression.
NARROW = (
    "{% for m in messages %}{% if m.role != 'critic' %}<|im_start|>{{ m.role }}\n"
    "{{ EXPRESSION if m.role == 'user' else m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    "expression", ["m.content[:60]", "m.content[-60:]", "'' if loop.index == 3 else m.content"]
)
def test_a_message_that_is_not_written_or_not_to_its_end_is_named(expression: str) -> None:
    tokenizer = deepcopy(tokenizer_of("qwen2.5"))
    tokenizer.chat_template = NARROW.replace("EXPRESSION", expression)
    renderer = ChatRenderer(tokenizer)
    long = {
        "role": "user",
        "content": "and how many of them are in bin 3 of the other hall, if any are?",
    }
    with pytest.raises(ValueError, match=r"^message 3: the chat template leaves out 'and how many"):
        text_of(renderer, [QUESTION, ANSWER, long, ANSWER])


def test_a_message_that_stands_in_another_is_not_left_out_unseen() -> None:
    tokenizer = deepcopy(tokenizer_of("qwen2.5"))
    tokenizer.chat_template = NARROW.replace("'critic'", "'system'").replace(
        "EXPRESSION", "m.content"
    )
    with pytest.raises(ValueError, match=r"^message 2: the chat template leaves out 'bin'"):
        text_of(ChatRenderer(tokenizer), [QUESTION, {"role": "system", "content": "bin"}, ANSWER])
