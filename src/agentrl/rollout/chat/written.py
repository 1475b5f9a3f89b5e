"""A turn as a chat template writes it, from what the turn says: what a model is taught to generate.

For probes (`form_order.py`) and random conversations (`exactness.py`), which have no model.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from agentrl.rollout.chat.capabilities import TemplateCapabilities, TemplateRefusal, Tools
from agentrl.rollout.chat.escaping import EscapingCodec
from agentrl.rollout.chat.forms import in_fields
from agentrl.rollout.chat.turns import Message, TurnReading, writable
from agentrl.rollout.tool_calls import MalformedCall, ParsedCall

_ANYTHING: list[Message] = [{"role": "user", "content": "?"}]
_MARK = "probe-content"


class Renderer(Protocol):
    """What is needed of a `ChatRenderer`; see there."""

    codec: EscapingCodec
    capabilities: TemplateCapabilities

    def render_text(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        add_generation_prompt: bool = True,
    ) -> str: ...

    def read_turn(
        self, text: str, prompted: str = "", tools: Tools | None = None
    ) -> TurnReading: ...

    def call_id(self, name: str, index: int) -> str: ...


# The template's text for a conversation with this turn, which nothing follows.
Close = Callable[[Message], str]


def saying(thought: str = "", content: str = "", calls: Sequence[ParsedCall] = ()) -> TurnReading:
    """A reading of a turn that has no text yet."""
    return TurnReading("", "", "", "", thought, content, tuple(calls))


def written_turn(renderer: Renderer, prompt: str, close: Close, said: TurnReading) -> str:
    """The turn's text after a prompt, without its end. `close`: of the prompt's conversation.

    Calls are content in the Hermes way where the template writes none: so the model is told to
    write them then (`capabilities.py`).
    """
    text = _thinking_turn(renderer, prompt, close, said)
    if not said.calls or any(name in text for name in said.call_names):
        return text
    content = "\n".join(filter(None, [said.content, *map(_hermes, said.calls)]))
    return _thinking_turn(renderer, prompt, close, replace(said, content=content, calls=()))


def _thinking_turn(renderer: Renderer, prompt: str, close: Close, said: TurnReading) -> str:
    """The turn's text, with its thought where the template drops it: the model does write it."""
    marks = renderer.capabilities.thought_marks
    opened = prompt.rstrip().endswith(marks.open)
    text = _after_prompt(renderer, prompt, close, said)
    if text is None:
        # The template writes no such turn after this prompt, as a model nevertheless does: put it
        # together of what the template writes in a conversation of its own.
        thought = f"{said.thought}\n{marks.close}\n\n" if opened else ""
        return thought + said.content + (_calls_alone(renderer, said) if said.calls else "")
    # Where results end a prompt without a header, some templates write one for the turn.
    text = text.removeprefix(_header(renderer))
    if said.thought not in text:
        opening = "" if opened else f"{marks.open}\n"
        return f"{opening}{said.thought}\n{marks.close}{text}"
    return text


def _header(renderer: Renderer) -> str:
    return renderer.codec.headers(renderer.render_text(_ANYTHING, None))[0]


def _calls_alone(renderer: Renderer, said: TurnReading) -> str:
    """The calls as the template writes them in a conversation of their own."""

    def alone(message: Message) -> str:
        return renderer.render_text([*_ANYTHING, message], None, False)

    header = renderer.render_text(_ANYTHING, None)
    calls = _after_prompt(renderer, header, alone, replace(said, thought="", content=""))
    if calls:
        return calls
    beside = _closed(renderer, alone, replace(said, thought="", content=_MARK)) or ""
    return _without_end(renderer, beside.partition(_MARK)[2])


def _hermes(call: ParsedCall | MalformedCall) -> str:
    made = writable(call)
    body = json.dumps({"name": made.name, "arguments": made.arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def _after_prompt(renderer: Renderer, prompt: str, close: Close, said: TurnReading) -> str | None:
    """What the template writes of the turn after the prompt, if it leaves the prompt as it is."""
    text = _closed(renderer, close, said)
    if text is None or not text.startswith(prompt):
        return None
    return _without_end(renderer, text[len(prompt) :])


def _closed(renderer: Renderer, close: Close, said: TurnReading) -> str | None:
    """The conversation with this turn; None if the template refuses it."""
    ids = [renderer.call_id(name, index) for index, name in enumerate(said.call_names)]
    for json_arguments in (False, True):
        try:
            return close(in_fields(said, ids, json_arguments=json_arguments))
        except TemplateRefusal:
            continue
    return None


def _without_end(renderer: Renderer, text: str) -> str:
    for end, _ in renderer.capabilities.turn_ends:
        text = text.partition(end)[0]
    return text
