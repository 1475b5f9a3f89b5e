"""What a row of preferences says, in TRL's layouts.

    {"prompt": [messages], "chosen": [messages], "rejected": [messages], "tools": [...]}
    {"chosen": [messages], "rejected": [messages]}     both begin with the prompt
    {"prompt": "text", "chosen": "text", "rejected": "text"}      without a chat template
    {"chosen": "text", "rejected": "text"}             both begin with the prompt

Trained of each answer is what `layouts` trains of a demonstration: what the assistant says.
"""

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from agentrl.rollout.demonstrations.layouts import (
    Demonstration,
    PlainText,
    read_demonstration,
)

LAYOUTS = "chosen and rejected, both as messages or both as texts, with or without prompt"


def read_preference(
    fields: Mapping[str, Any],
) -> tuple[Demonstration | PlainText, Demonstration | PlainText]:
    """Read a row: the prompt with the chosen answer, and with the rejected one.

    Raises `ValueError` with one sentence that continues after the row's place.
    """
    chosen, rejected = fields.get("chosen"), fields.get("rejected")
    for kind in (list, str):
        if isinstance(chosen, kind) and isinstance(rejected, kind):
            break
    else:
        raise ValueError(f"has not {LAYOUTS}; its fields are {', '.join(map(repr, fields))}")
    prompt = fields.get("prompt")
    # A text beside messages repeats what the messages begin with.
    if not isinstance(prompt, kind):
        prompt, chosen, rejected = _divided(chosen, rejected)
    return (
        _answered(fields, prompt, chosen, "chosen"),
        _answered(fields, prompt, rejected, "rejected"),
    )


def _divided(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """The prompt that both begin with, and the rest of each. Raises `ValueError` if there is none.

    As in TRL, a space before a text's answer belongs to the answer.
    """
    both = zip(chosen, rejected, strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
    if isinstance(chosen, str) and chosen[:shared].endswith(" "):
        shared -= 1
    if not shared:
        raise ValueError("has no prompt, and `chosen` and `rejected` begin differently")
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _answered(
    fields: Mapping[str, Any], prompt: Any, answer: Any, name: str
) -> Demonstration | PlainText:
    tools = {key: fields[key] for key in ("tools", "functions") if key in fields}
    try:
        return read_demonstration({"prompt": prompt, "completion": answer, **tools})
    except ValueError as error:
        raise ValueError(f"in `{name}`: {error}") from None
