"""What is told while a turn is sampled is a beginning of what the whole turn says."""

import random
from itertools import pairwise

import pytest
from families import BY_NAME, FAMILIES, Family, Said, tokenizer_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from agentrl.rollout.chat import ChatRenderer
from agentrl.rollout.chat.said import Said as Told
from agentrl.rollout.chat.said import TurnReader
from agentrl.rollout.tool_calls import ParsedCall
from agentrl.rollout.tool_calls.parser_registry import CALL_STARTS, PARSERS

TOOLS = [
    {"type": "function", "function": {
        "name": "weight", "description": "", "parameters": {
            "type": "object", "properties": {"text": {"type": "string"}}}}}
]  # fmt: skip
quick = settings(
    max_examples=settings.default.max_examples // 10,
    suppress_health_check=[HealthCheck.differing_executors],
)
RENDERERS: dict[str, ChatRenderer] = {}


def renderer_of(family: Family) -> ChatRenderer:
    if family.name not in RENDERERS:
        tokenizer = tokenizer_of(family.name)
        RENDERERS[family.name] = ChatRenderer(tokenizer, template_options=family.options)
    return RENDERERS[family.name]


def made_ids(source: random.Random, family: Family, renderer: ChatRenderer) -> list[int]:
    """A turn: something that the family writes, pieces of marks, words, and any tokens at all."""
    marks = [*renderer.capabilities.thought_marks, *family.special, *family.tags, "{", "[",
             "<tool_call>", "[TOOL_CALLS]", "STOP", "\n\n", " ", "assistant"]  # fmt: skip
    call = ParsedCall("weight", {"text": source.choice(["a", "é</think>", "STOP [1]"])})
    said = Said(
        thought=source.choice(["", "I look.", "ü 家 <tool"]) if family.thoughts else "",
        content=source.choice(["", "It is in B7.", "家 €", " STO P\n", "a [b] {c}"]),
        calls=(call,) * source.randint(0, min(1, family.calls)),
    )
    if said.calls and not family.mixed:
        said = Said(said.thought, "", said.calls)
    ids: list[int] = []
    for _ in range(source.randint(1, 5)):
        mark = source.choice(marks)
        text = source.choice([
            family.write(said, family.opened), mark, mark[: source.randint(0, len(mark))],
            "Where is the 家?", " ", "€\n",
        ])  # fmt: skip
        ids += renderer.encode(text)
        if source.random() < 0.3:  # bytes of a character among them
            ids += [source.randrange(850) for _ in range(source.randint(1, 3))]
    ends = set(renderer.stop_token_ids)
    return [token for token in ids if token not in ends] or renderer.encode("x")


@pytest.mark.parametrize("family", FAMILIES, ids=str)
@quick
@given(source=st.randoms(use_true_random=False), tools=st.booleans(), thinking=st.booleans())
def test_what_is_told_along_the_way_begins_what_the_turn_says(
    family: Family, source: random.Random, tools: bool, thinking: bool
) -> None:
    renderer = renderer_of(family)
    ids, schemas = made_ids(source, family, renderer), TOOLS if tools else []
    stop = source.choice([(), ("STOP",), ("O P", "\n\n")])
    reader = TurnReader(renderer, schemas, stop, thinking=thinking)
    text = renderer.codec.decode(ids)
    calls = renderer.parse_calls(text, schemas).calls if tools else ()
    with_calls = bool(calls) and all(isinstance(call, ParsedCall) for call in calls)
    said = reader.whole(text, with_calls=with_calls)
    ends = [place for end in stop if not with_calls and (place := said.text.find(end)) >= 0]
    final = Told(said.thought, said.text[: min(ends)] if ends else said.text)
    told = [Told(), *(reader.so_far(renderer.codec.decode_so_far(ids[: end + 1]))
                      for end in range(len(ids)))]  # fmt: skip
    for before, now in pairwise([*told, final]):  # so that any chunks give the same
        assert now.thought.startswith(before.thought) and now.text.startswith(before.text)
        assert now.thought == before.thought or not before.text, "the thought comes first"
    for now in told:
        assert now.text == now.text.rstrip()


@pytest.mark.parametrize("name", ["qwen3", "llama3.1", "mistral", "deepseekv3", "glm4.5", "gemma4"])
def test_words_leave_as_they_come(name: str) -> None:
    renderer = renderer_of(BY_NAME[name])
    reader = TurnReader(renderer, TOOLS)
    assert reader.so_far("The bin is B") == Told("", "The bin is B")
    start = renderer.parser_choice.starts[0]
    assert reader.so_far(f"The bin {start[: len(start) // 2]}").text == "The bin"
    assert reader.so_far(f"The bin {start} of which").text == "The bin"


def test_a_thought_leaves_as_it_comes_and_one_that_never_ends_is_one() -> None:
    reader = TurnReader(renderer_of(BY_NAME["qwen3"]), TOOLS)
    opened = TurnReader(renderer_of(BY_NAME["qwen3"]), TOOLS, thinking=True)
    text = "<think>\nI look. </think>\n\nIn bin"
    told = {reader.so_far(text[:end]) for end in range(len(text) + 1)}
    assert {Told(), Told("I loo"), Told("I look.", ""), Told("I look.", "In")} <= told
    assert opened.so_far("I look. </thi") == Told("I look.")
    assert reader.so_far("I look. </thi") == Told("", "I look. </thi")
    assert opened.whole("I look", with_calls=False) == Told("I look")
    called = 'I look <tool_call>\n{"name": "weight", "arguments": {}}\n</tool_call> so'
    assert opened.whole(called, with_calls=True) == Told("I look", "so")


def test_every_parser_says_where_its_calls_may_begin() -> None:
    # gpt-oss: calls and content are messages, whose kind stands in their heads.
    assert PARSERS.keys() - CALL_STARTS.keys() == {"gpt-oss"}


@pytest.mark.parametrize("family", ["qwen3", "gemma3"], ids=str)
def test_a_character_of_several_tokens_comes_whole(family: str) -> None:
    codec = renderer_of(BY_NAME[family]).codec
    ids = codec.encode("a 家 b")
    told = [codec.decode_so_far(ids[: end + 1]) for end in range(len(ids))]
    assert told[-1] == "a 家 b" and not any("\ufffd" in text for text in told)
    assert isinstance(codec._codec, Tokenizer) and len(ids) > len("a 家 b")
