"""Random conversations, and holding them turn by turn as a sampler does.

`hold` gives the tokens that a sampler would have, and what happened at each prompt_change. The fuzz
program (`tests/fuzz/chat_families.py`) and the properties (`test_families.py`) share it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from families import Family, Said, renderer_of, tokenizer_of
from writers import dumps

from agentrl.rollout.chat import Conversation, Message, NextPrompt
from agentrl.rollout.tool_calls import ParsedCall

WORDS = ("one", "two three", "12", "x", "日本", "🙂", "e\u0301", "ß", "{}", "()", "'", "a\\b", '"')
SPACES = (" ", "\n", "\n\n", "  \n ", "\t", "\r\n", "\u00a0")
ESCAPE_MARKS = ("\ufdd0", "\ufdd1")
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {name} of a thing.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "description": "A text."},
                    "count": {"type": "integer", "description": "A number."},
                },
                "required": ["text"],
            },
        },
    }
    for name in ("weight", "find_it")
]


@dataclass(frozen=True)
class Exchange:
    """A turn, and the messages that follow it."""

    said: Said
    added: tuple[Message, ...]


@dataclass(frozen=True)
class Talk:
    """A conversation that is to be held."""

    begin: tuple[Message, ...]
    exchanges: tuple[Exchange, ...]


@dataclass
class Held:
    """A conversation that was held.

    ids: the next prompt; messages: the structured conversation; kinds: what happened, counted.
    """

    ids: list[int]
    messages: list[Message]
    conversation: Conversation
    next_prompts: list[NextPrompt] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)

    @property
    def drifts(self) -> int:
        return sum(next_prompt.drift is not None for next_prompt in self.next_prompts)


def make_text(source: random.Random, *, blank: bool = True, hostile: Sequence[str] = ()) -> str:
    """A text; with `blank`, it may be empty, or begin and end with space."""
    pieces = (*WORDS, *SPACES, *hostile)
    text = "".join(source.choice(pieces) for _ in range(source.randint(0, 6)))
    if source.random() < 0.02:
        text *= 400  # a very long one
    return text if blank else text.strip() or "a"


def make_talk(source: random.Random, family: Family, hostile: Sequence[str] = ()) -> Talk:
    """A conversation that the family's models can hold. `hostile`: text that results may hold."""
    begin: list[Message] = [{"role": "user", "content": make_text(source, hostile=hostile)}]
    if source.random() < 0.4:
        begin.insert(0, {"role": "system", "content": make_text(source, blank=False)})
    exchanges = []
    for _ in range(source.randint(1, 4)):
        calls = tuple(
            ParsedCall(
                source.choice(("weight", "find_it")),
                {"text": make_text(source, blank=False), "count": source.randint(0, 99)},
            )
            for _ in range(source.randint(0, family.calls))
        )
        mixed = source.random() < 0.5 and family.mixed
        said = Said(
            thought=make_text(source, blank=False)
            if family.thoughts and (family.opened or source.random() < 0.7)
            else "",
            content=make_text(source, blank=False) if not calls or mixed else "",
            calls=calls,
        )
        added: list[Message] = [
            {"role": "tool", "content": make_text(source, hostile=hostile)} for _ in calls
        ]
        if not calls or (source.random() < 0.15 and family.name not in ("mistral",)):
            added.append({"role": "user", "content": make_text(source, hostile=hostile)})
        exchanges.append(Exchange(said, tuple(added)))
    return Talk(tuple(begin), tuple(exchanges))


def hold(family: Family, talk: Talk) -> Held:
    """Hold a conversation turn by turn."""
    renderer, tokenizer = renderer_of(family.name), tokenizer_of(family.name)
    conversation = Conversation(renderer, talk.begin, TOOLS)
    held = Held(list(conversation.prompt_ids), list(talk.begin), conversation)
    for exchange in talk.exchanges:
        said = exchange.said
        opened = renderer.codec.decode(held.ids).rstrip().endswith("<think>")
        stop = family.stop(said, exchange.added[0]["role"])
        text = family.write(said, opened)
        output = [*renderer.encode_inside(text), tokenizer.convert_tokens_to_ids(stop)]
        next_prompt = conversation.extend(output, exchange.added)
        held.next_prompts.append(next_prompt)
        if next_prompt.extends:
            held.ids = [*held.ids, *output, *next_prompt.ids]
        else:
            held.ids = list(next_prompt.ids)
        held.prompts.append(held.ids)
        ids = [f"functions.{call.name}:{index}" if family.name == "kimi-k2"
               else f"call{index:05}" for index, call in enumerate(said.calls)]  # fmt: skip
        held.messages.append(family.message(said, ids))
        waiting = list(zip(ids, said.calls, strict=True))
        for message in exchange.added:
            if message["role"] == "tool":
                call_id, call = waiting.pop(0)
                message = {**message, "tool_call_id": call_id, "name": call.name}
            held.messages.append(message)
    return held


def whole(family: Family, messages: Sequence[Message]) -> list[int]:
    """What transformers makes of the whole conversation."""
    tokenizer = tokenizer_of(family.name)
    renderer = renderer_of(family.name)
    text = tokenizer.apply_chat_template(
        renderer.capabilities.adapt_messages(messages, TOOLS),
        tools=TOOLS if renderer.capabilities.writes_tools else None,
        add_generation_prompt=True,
        tokenize=False,
        **family.options,
    )
    return list(_encoded(family.name, text))


@lru_cache(maxsize=2)  # the text is the same for a conversation's own and its structured messages
def _encoded(family: str, text: str) -> tuple[int, ...]:
    return tuple(tokenizer_of(family)(text, add_special_tokens=False)["input_ids"])


def hostile_text(family: Family) -> tuple[str, ...]:
    """What text from outside must never become: control tokens, whole and in parts, and marks."""
    return (*family.special, *ESCAPE_MARKS, "<|im", "_end|>")


def fault_of(family: Family, talk: Talk, held: Held) -> str | None:
    """What is wrong with a conversation that was held, or None.

    Its tokens must be those of the template applied to the whole of it; text from outside must
    stand in it as it is, and its control tokens must be those of a twin of harmless words.
    """
    outside = [*talk.begin, *(message for each in talk.exchanges for message in each.added)]
    marked = (*family.special, *ESCAPE_MARKS)
    if any(mark in message["content"] for message in outside for mark in marked):
        twin = hold(family, _harmless_twin(talk))
        if _control_tokens(family, held.ids) != _control_tokens(family, twin.ids):
            return "text from outside became control tokens"
        text = tokenizer_of(family.name).decode(held.ids)
        for message in talk.exchanges[-1].added:
            content = _unescaped(message).strip()
            if content not in text and dumps(content)[1:-1] not in text:
                return f"{content!r} does not stand in it"
        return None
    if held.ids != whole(family, held.conversation.messages):
        return "its tokens are not those of the template on its own messages"
    if family.structured and held.ids != whole(family, held.messages):
        return "its tokens are not those of the template on the structured messages"
    if any(next_prompt.restyled for next_prompt in held.next_prompts):
        return "a turn as the model writes it is not as the template writes it"
    if held.drifts and family.exact == "all":
        return "it drifts"
    return None


def _unescaped(message: Message) -> str:
    return str(message["content"]).translate(dict.fromkeys(map(ord, ESCAPE_MARKS)))


def _harmless_twin(talk: Talk) -> Talk:
    """The conversation with other words from outside; templates compare them: the same stay so."""
    words: dict[str, str] = {}

    def twin(messages: Sequence[Message]) -> tuple[Message, ...]:
        return tuple(
            {**message, "content": words.setdefault(_unescaped(message), f"x{len(words)}")}
            for message in messages
        )

    begin = twin(talk.begin)
    return Talk(begin, tuple(Exchange(each.said, twin(each.added)) for each in talk.exchanges))


def _control_tokens(family: Family, ids: Sequence[int]) -> list[int]:
    special = renderer_of(family.name).codec.special_ids
    return [token for token in ids if token in special]
