"""What a row of preferences says, in the layouts that people have.

    {"prompt": [messages], "chosen": [messages], "rejected": [messages], "tools": [...]}   TRL's
    {"chosen": [messages], "rejected": [messages]}             both begin with the prompt
    {"prompt": "text", "chosen": "text", "rejected": "text"}   without a chat template
    {"chosen": "text", "rejected": "text"}                     both begin with the prompt
    {"question": "text", "system": "text", "chosen": "text", "rejected": "text"}    Intel's Orca
    {"instruction": "text", "input": "text", "chosen": ..., "rejected": ...}    LLaMA-Factory's
    {"conversations": [messages], "chosen": {message}, "rejected": {message}}   LLaMA-Factory's

Messages may be a text with their JSON. A text behind messages, or behind a question, is a message
of the assistant. Trained of each answer is what `layouts` trains of a demonstration: what the
assistant says.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from agentrl.rollout.demonstrations import layouts
from agentrl.rollout.demonstrations.layouts import (
    Demonstration,
    PlainText,
    begins_with,
    is_answer,
    its_fields,
    read_answer,
    read_fields,
)
from agentrl.rollout.demonstrations.messages import kind, read_message

LAYOUTS = "chosen and rejected, both as messages or both as texts, with or without prompt"
_CONVERSATIONS = ("conversations", "messages")
_QUESTION = ("question", "instruction", "input")
READ_FIELDS = layouts.READ_FIELDS.union(_QUESTION)  # of a row
# The forms of a question: the texts of these fields, a line each.
_QUESTIONS = (("question",), ("instruction",), ("instruction", "input"), ("input",))
# What may stand beside two texts that begin with their prompt, and is no part of it.
_ABOUT = re.compile(
    "^(chosen|rejected|system.*|tools|functions|source|dataset|category|language|split|metadata)$"
    "|(^|_)id$|_chosen$|_rejected$|^chosen_|^rejected_"
)


def read_preference(
    fields: Mapping[str, Any],
) -> tuple[Demonstration | PlainText, Demonstration | PlainText]:
    """Read a row: the prompt with the chosen answer, and with the rejected one.

    Raises `ValueError` with one sentence that continues after the row's place.
    """
    fields = read_fields(fields)
    chosen, rejected = fields.get("chosen"), fields.get("rejected")
    if not any(isinstance(chosen, one) and isinstance(rejected, one) for one in (list, str, dict)):
        raise ValueError(f"has not {LAYOUTS}; {its_fields(fields)}")
    if chosen == rejected:
        raise ValueError("has a chosen and a rejected answer that are the same")
    prompt = _prompt(fields, chosen)
    if prompt is None:
        prompt, chosen, rejected = _divided(chosen, rejected, fields.get("prompt"))
    if not is_answer(prompt, chosen):
        raise ValueError(f"has not {LAYOUTS}; {its_fields(fields)}")
    if isinstance(prompt, list):
        answers = [_messages_of(answer) for answer in (chosen, rejected)]
        prompt = _unanswered(prompt, answers)
        _refuse_other_prompts(fields, prompt, answers)
    return (
        _answered(fields, prompt, chosen, "chosen"),
        _answered(fields, prompt, rejected, "rejected"),
    )


def _prompt(fields: Mapping[str, Any], answer: Any) -> Any:
    """The prompt that stands beside the answers; None if both begin with it."""
    prompt = fields.get("prompt")
    if isinstance(answer, dict) and prompt is None:
        return next((fields[name] for name in _CONVERSATIONS if fields.get(name)), "")
    if isinstance(answer, str) and prompt is None:
        return _question(fields)
    # A text beside messages repeats what the messages begin with.
    return None if isinstance(answer, list) and not isinstance(prompt, list) else prompt


def _question(fields: Mapping[str, Any]) -> list[Any] | None:
    """The user's question beside two texts, in a form that is known; None if there is none.

    Without one, both texts begin with their prompt: then no other text may stand beside them, which
    could be the question under a name that is not known.
    """
    named = tuple(name for name in _QUESTION if fields.get(name))
    if named:
        if named not in _QUESTIONS or not all(isinstance(fields[name], str) for name in named):
            raise ValueError(f"has no `prompt`, and no form of a question; {its_fields(fields)}")
        if fields.get("history"):
            raise ValueError("has `history`, which is not read: write it in `prompt`, as messages")
        return [{"role": "user", "content": "\n".join(fields[name] for name in named)}]
    others = [
        f"`{name}`"
        for name, value in fields.items()
        if value and isinstance(value, str | list | dict) and not _ABOUT.search(name)
    ]
    if others:
        raise ValueError(
            f"has no `prompt`, and {', '.join(others)}, of which nothing is known: if it is the "
            "prompt, name it so, and else leave it out"
        )
    return None


def _divided(chosen: Any, rejected: Any, prompt: Any) -> tuple[Any, Any, Any]:
    """The prompt that both begin with, and the rest of each.

    `prompt`: a text that repeats it, or None. As in TRL, a space before a text's answer belongs to
    the answer. Raises `ValueError` if there is no common beginning, or another than `prompt`.
    """
    both = zip(chosen, rejected, strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
    if isinstance(chosen, str) and chosen[:shared].endswith(" "):
        shared -= 1
    if prompt and not _repeats(prompt, chosen[:shared]):
        raise ValueError(
            f"has `prompt` as {kind(prompt)} beside messages that do not begin with it: write it "
            "as a list of messages"
        )
    if not shared:
        raise ValueError("has no prompt, and `chosen` and `rejected` begin differently")
    if shared == min(len(chosen), len(rejected)):
        raise ValueError("has no prompt, and one of its answers is how the other begins")
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _repeats(prompt: Any, messages: list[Any]) -> bool:
    """Whether all of a text is in what a user says in `messages`, so that nothing of it is lost."""
    read = [read_message(number, one).message for number, one in enumerate(messages, start=1)]
    asked = [one["content"] for one in read if one["role"] == "user"]
    return isinstance(prompt, str) and any(prompt.strip() in text for text in asked)


def _messages_of(answer: Any) -> list[Any]:
    """An answer to messages, as messages."""
    if isinstance(answer, str):
        return [{"role": "assistant", "content": answer}]
    return answer if isinstance(answer, list) else [answer]


def _unanswered(prompt: list[Any], answers: Sequence[list[Any]]) -> list[Any]:
    """The messages of a prompt, without the answer that they may end in already.

    Raises `ValueError` if they end in another one, so that the assistant would answer itself.
    """
    last = prompt[-1:]
    if not any(map(_is_assistants, last)):
        return prompt
    if any(begins_with(answer, last) for answer in answers):
        return prompt[:-1]
    if any(_is_assistants(one) for answer in answers for one in answer[:1]):
        raise ValueError("has a prompt that ends in another answer than those of the row")
    return prompt


def _is_assistants(given: Any) -> bool:
    try:
        return bool(read_message(1, given).message["role"] == "assistant")
    except ValueError:  # told with its place where the whole is read
        return False


def _refuse_other_prompts(
    fields: Mapping[str, Any], prompt: list[Any], answers: Sequence[list[Any]]
) -> None:
    """Raise `ValueError` if messages or a question beside a prompt of messages say something else.

    They may repeat it, with an answer or without, as a question may repeat what a user says in it.
    """
    wholes = [prompt]
    for answer in answers:
        wholes += [[*prompt, *answer], answer]  # which may begin with the prompt itself
    for name in (*_CONVERSATIONS, *_QUESTION):
        given = fields.get(name)
        if isinstance(given, list) and given:
            said_too = any(begins_with(whole, given) for whole in wholes)
        elif isinstance(given, str) and given:
            said_too = _repeats(given, prompt)
        else:
            continue
        if not said_too:
            raise ValueError(f"has `{name}` that says something else than its prompt")


def _answered(
    fields: Mapping[str, Any], prompt: Any, answer: Any, name: str
) -> Demonstration | PlainText:
    try:
        return read_answer(prompt, answer, fields)
    except ValueError as error:
        raise ValueError(f"in `{name}`: {error}") from None
