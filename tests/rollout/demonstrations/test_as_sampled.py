"""A row's tokens are those of a sampled conversation in which the model says the same."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import takewhile

import pytest
from families import BY_NAME, FAMILIES, Family, Said, renderer_of, tokenizer_of

from agentrl.rollout.chat import ChatRenderer, Conversation, Message
from agentrl.rollout.demonstrations import Demonstration, demonstrated_tree, read_demonstration
from agentrl.rollout.tool_calls import ParsedCall

SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "bin 3?"}
RESULT = {"role": "tool", "content": "46"}
FUNCTION = {
    "name": "stock",
    "description": "Counts.",
    "parameters": {"type": "object", "properties": {"bin": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
ANSWER = Said(content="46 parts.")
CALLING = Said(calls=(ParsedCall("stock", {"bin": "R5"}),))

Talk = Sequence[Message | Said]


def sampled(family: Family, talk: Talk) -> list[list[int]]:
    """The ids of a sampled conversation: of each segment, up to the end of its last turn."""
    renderer, tokenizer = renderer_of(family.name), tokenizer_of(family.name)
    first = next(at for at, each in enumerate(talk) if isinstance(each, Said))
    begin = [each for each in talk[:first] if isinstance(each, dict)]
    conversation = Conversation(renderer, begin, TOOLS)
    segments, ids = [], list(conversation.prompt_ids)
    for at, said in enumerate(talk):
        if not isinstance(said, Said):
            continue
        text = family.write(said, renderer.begins_thought(ids))
        stop = family.stop(said, "tool" if said.calls else "user")
        output = [*renderer.encode_inside(text), tokenizer.convert_tokens_to_ids(stop)]
        ids = [*ids, *output]
        added = [
            each
            for each in takewhile(lambda each: not isinstance(each, Said), talk[at + 1 :])
            if isinstance(each, dict)
        ]
        if added:
            onward = conversation.extend(output, added)
            segments += [] if onward.extends else [ids]
            ids = [*ids, *onward.ids] if onward.extends else list(onward.ids)
    return [*segments, ids]


def row_of(family: Family, talk: Talk) -> list[Message]:
    """The talk as a row's messages. Ids of calls are as the family's models write them."""
    messages = list[Message]()
    for each in talk:
        if isinstance(each, dict):
            messages.append(each)
            continue
        ids = [
            f"functions.{call.name}:{at}" if family.name == "kimi-k2" else f"call{at:05}"
            for at, call in enumerate(each.calls)
        ]
        message = family.message(replace(each, thought=""), ids)
        messages.append({**message, "reasoning_content": each.thought} if each.thought else message)
    return messages


def demonstrated(renderer: ChatRenderer, messages: Sequence[Message]) -> list[list[int]]:
    shown = read_demonstration({"messages": messages, "tools": TOOLS})
    assert isinstance(shown, Demonstration)
    tree = demonstrated_tree(renderer, shown)
    return [tree["ids"][tree.places(path)].tolist() for path in tree.paths()]


def thinking(family: Family, talk: Talk) -> Talk:
    """The talk with a thought in each turn. DeepSeek V3's models have none behind results."""

    def thinks(said: Said, before: Message | Said) -> Said:
        by_results = isinstance(before, dict) and before["role"] == "tool"
        without = by_results and family.name == "deepseekv3"
        return said if without else replace(said, thought="I count.")

    pairs = zip(talk, [QUESTION, *talk], strict=False)
    return [thinks(each, before) if isinstance(each, Said) else each for each, before in pairs]


TALKS: list[Talk] = [
    [QUESTION, ANSWER],
    [SYSTEM, QUESTION, ANSWER, QUESTION, ANSWER],
    [QUESTION, CALLING, RESULT, ANSWER],
    [SYSTEM, QUESTION, CALLING, RESULT, ANSWER, QUESTION, ANSWER],
    [QUESTION, CALLING, RESULT, CALLING, RESULT, ANSWER],
]


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_a_row_has_the_tokens_of_a_sampled_conversation(family: Family, talk: Talk) -> None:
    talks = [talk] if family.name != "qwen3" else []  # which writes an empty thought without one
    talks += [thinking(family, talk)] if family.thoughts else []
    for each in talks:
        assert demonstrated(renderer_of(family.name), row_of(family, each)) == sampled(family, each)


def test_what_gpt_oss_says_beside_a_call_is_its_thought() -> None:
    family, said = BY_NAME["gpt-oss"], "I look."
    talk = [QUESTION, replace(CALLING, content=said), RESULT, replace(ANSWER, thought="so")]
    thought = [QUESTION, replace(CALLING, thought=said), *talk[2:]]
    assert demonstrated(renderer_of(family.name), row_of(family, talk)) == sampled(family, thought)


def test_a_call_behind_a_thought_that_the_template_does_not_write_has_its_answer() -> None:
    """Mistral's takes such a turn, which is put as text, for an answer, and refuses another."""
    own = BY_NAME["mistral"]

    def write(said: Said, opened: bool) -> str:
        thought = f"<think>\n{said.thought}\n</think>" if said.thought else ""
        return thought + own.write(said, opened)

    thinker = replace(own, write=write)
    talk = [QUESTION, replace(CALLING, thought="I count."), RESULT, ANSWER]
    assert demonstrated(renderer_of(own.name), row_of(own, talk)) == sampled(thinker, talk)


@pytest.mark.parametrize(
    ("family", "talk", "why"),
    [
        ("llama3.1", [QUESTION, Said(calls=CALLING.calls * 2), RESULT, RESULT, ANSWER],
         "message 2: the chat template refuses the messages: This model only supports single "
         "tool-calls at once!"),
        ("mistral", [QUESTION, ANSWER, ANSWER],
         "message 3: the chat template refuses the messages: After the optional system message, "
         "conversation roles must alternate user/assistant"),
        ("gemma3", [QUESTION, ANSWER, ANSWER],
         "message 3: the chat template refuses the messages: Conversation roles must alternate "
         "user/assistant/user/assistant/..."),
    ],
)  # fmt: skip
def test_a_refusal_has_the_template_s_own_words(family: str, talk: Talk, why: str) -> None:
    with pytest.raises(ValueError) as refused:
        demonstrated(renderer_of(family), row_of(BY_NAME[family], talk))
    assert str(refused.value) == why


# Templates that write another header once the turn is there; an opened thought is written anew.
RENAMING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
REOPENING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think>none</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# It drops the system message once there is an answer, and opens a thought only behind one.
OPENING = (
    "{% for m in messages if m.role != 'system' or messages[-1].role != 'assistant' %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ '<think>\n' if messages[0].role == 'system' }}{% endif %}"
)


@pytest.mark.parametrize("template", [RENAMING, REOPENING, OPENING])
def test_a_turn_that_no_conversation_has_behind_such_a_prompt_is_refused(template: str) -> None:
    tokenizer = deepcopy(tokenizer_of("qwen2.5"))
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=r"^message 3: .* so that no mask of it is exact$"):
        demonstrated(
            ChatRenderer(tokenizer), row_of(BY_NAME["qwen2.5"], [SYSTEM, QUESTION, ANSWER])
        )
