"""Writes a turn as the chat template does, which is what a model learns to generate.

Probes (`form_order.py`) and random conversations (`exactness.py`) use it instead of a model, and
demonstrations (`rollout.demonstrations`) are taught in it.

Some templates write a conversation otherwise once the turn is there, so that it no longer begins
with the prompt that the turn is sampled from:

    prompt            <s>[INST] Be brief.\n\nbin 3?[/INST]           Mistral
    with the turn     <s>[INST] bin 3?[/INST] 46</s>                 no system message
    a short one       <s>[INST] ?[/INST] 46</s>                      the turn is ` 46`

The turn is then taken from a short conversation whose prompt ends alike (`turn_behind`).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

from agentrl.rollout.chat.capabilities import TemplateCapabilities, TemplateRefusal, Tools
from agentrl.rollout.chat.escaping import EscapingCodec
from agentrl.rollout.chat.forms import in_fields
from agentrl.rollout.chat.turns import Message, TurnReading, opened_thought, writable
from agentrl.rollout.tool_calls import MalformedCall, ParsedCall

_ANYTHING: list[Message] = [{"role": "user", "content": "?"}]
_MARK, _NAME = "probe-content", "probe"


class Renderer(Protocol):
    """The part of `ChatRenderer` that is used here."""

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


# Renders a conversation with this turn at its end.
Close = Callable[[Message], str]


class WrittenTurn(NamedTuple):
    """A turn's text without its end token, and what of it the template leaves out.

    left_out: the thought, the content and the names of calls, as far as the text lacks them
    adds_thought: whether the template leaves the thought out, so that it was put before its text
    """

    text: str
    left_out: tuple[str, ...]
    adds_thought: bool


def saying(thought: str = "", content: str = "", calls: Sequence[ParsedCall] = ()) -> TurnReading:
    """A `TurnReading` of a turn without text."""
    return TurnReading("", "", "", "", thought, content, tuple(calls))


def written_turn(renderer: Renderer, prompt: str, close: Close, said: TurnReading) -> WrittenTurn:
    """The turn after `prompt`.

    `close`: renders the prompt's conversation with the turn. If the template writes no calls, they
    are in the content in Hermes notation, as the model is told then (`capabilities.py`).
    """
    written = _turn(renderer, prompt, close, said)
    lost = _lost_calls(renderer, prompt, close, said, written)
    if lost and len(lost) == len(said.calls):
        content = "\n".join(filter(None, [said.content, *map(_hermes, said.calls)]))
        said, lost = replace(said, content=content, calls=()), []
        written = _turn(renderer, prompt, close, said)
    added = _dropped_thought(renderer, prompt, close, said, written)
    text = added + written
    parts = [part.strip() for part in (said.thought, said.content)]
    left_out = [part for part in parts if part not in text]
    if parts[1] in text and _loses_content(renderer, prompt, close, said, written):
        left_out.append(parts[1])
    lost += _cut_calls(renderer, prompt, close, said, written)
    return WrittenTurn(text, (*left_out, *lost), bool(added))


def turn_behind(
    renderer: Renderer,
    prompt: str,
    close: Close,
    said: TurnReading,
    *,
    answers: bool = True,
    put: Callable[[Message], Message] = lambda turn: turn,
) -> WrittenTurn:
    """The turn after `prompt`, in nothing but what the template itself writes behind such a prompt.

    `answers`: whether it follows a user's message or results; the short conversations are such.
    `put`: changes the turn's message before it is rendered, also in a short conversation.
    Raises `ValueError`, with the template's own words if it refuses the turn.
    """

    def places() -> Iterator[tuple[str, Close]]:
        yield prompt, own
        for text, messages in _short_prompts(renderer, prompt) if answers else ():
            yield text, partial(alone, messages)

    def own(turn: Message) -> str:
        return close(put(turn))

    def alone(messages: Sequence[Message], turn: Message) -> str:
        return renderer.render_text([*messages, put(turn)], None, False)

    for text, close_it in places():
        if _follows(renderer, text, close_it, said):
            return written_turn(renderer, text, close_it, said)
    # A template may drop a thought that the prompt opens (DeepSeek): the model has to close it.
    marks = renderer.capabilities.thought_marks
    opening, bare = opened_thought(prompt, marks), replace(said, thought="")
    for text, close_it in places() if opening else ():
        before = text.removesuffix(opening)
        if _follows(renderer, before, close_it, bare):
            written = written_turn(renderer, before, close_it, bare)
            if not written.text.lstrip().startswith(marks.open):
                thought = f"{said.thought}\n{marks.close}\n\n"
                return WrittenTurn(thought + written.text, written.left_out, True)
    _render_closed(renderer, own, said)  # raises what the template says, if it refuses the turn
    raise ValueError(
        "the chat template does not write it behind the prompt that it is sampled from, so that no "
        "mask of it is exact"
    )


def _short_prompts(renderer: Renderer, prompt: str) -> Iterator[tuple[str, list[Message]]]:
    """Prompts of short conversations that end as `prompt` does, and their messages."""
    marks = renderer.capabilities.thought_marks

    def ends_alike(text: str) -> bool:
        return renderer.codec.headers(text)[-1] == renderer.codec.headers(prompt)[-1]

    asked = renderer.render_text(_ANYTHING, None)
    if ends_alike(asked):
        yield asked, _ANYTHING
    answered = _answered(renderer)
    if answered is not None and ends_alike(answered[0]):
        yield answered
        if not ends_alike(asked) and not opened_thought(prompt, marks):
            # Results end without a header: what follows is as behind the header of a question.
            yield asked.removesuffix(opened_thought(asked, marks)), _ANYTHING


def _answered(renderer: Renderer) -> tuple[str, list[Message]] | None:
    """The prompt behind a tool's result, and its messages; None if the template rejects them."""
    call_id = renderer.call_id(_NAME, 0)
    calling = saying(calls=[ParsedCall(_NAME, {_NAME: _MARK})])
    result = {"role": "tool", "content": "?", "name": _NAME, "tool_call_id": call_id}
    for json_arguments in (False, True):
        call = in_fields(calling, [call_id], json_arguments=json_arguments)
        messages = [*_ANYTHING, call, result]
        with suppress(TemplateRefusal):
            return renderer.render_text(messages, None), messages
    return None


def _follows(renderer: Renderer, prompt: str, close: Close, said: TurnReading) -> bool:
    """Whether the template itself writes the turn behind `prompt`, and does not rewrite that."""
    text = _closed(renderer, close, said)
    return text is not None and text.startswith(prompt)


# Whether the template writes a part of a turn is seen by what changes with the part. To look for it
# in the text would find it in another part, as a tool's name in the content. `written` is the turn.


def _lost_calls(
    renderer: Renderer, prompt: str, close: Close, said: TurnReading, written: str
) -> list[str]:
    """The names of the calls of which the template does not write the name or the arguments."""

    def is_lost(at: int, call: ParsedCall) -> bool:
        others = (
            ParsedCall(f"{call.name}_{_NAME}", call.arguments),
            ParsedCall(call.name, {} if call.arguments else {_NAME: _MARK}),
        )
        return any(
            _turn(renderer, prompt, close, _with_call(said, at, other)) == written
            for other in others
        )

    calls = enumerate(map(writable, said.calls))
    return [call.name for at, call in calls if is_lost(at, call)]


def _cut_calls(
    renderer: Renderer, prompt: str, close: Close, said: TurnReading, written: str
) -> list[str]:
    """The names of the calls whose arguments the template does not write to the last one's end."""

    def is_cut(at: int, call: ParsedCall) -> bool:
        *_, (key, value) = call.arguments.items()
        longer = f"{value} {_MARK}" if isinstance(value, str) else _MARK
        other = ParsedCall(call.name, {**call.arguments, key: longer})
        return _turn(renderer, prompt, close, _with_call(said, at, other)) == written

    calls = enumerate(map(writable, said.calls))
    return [call.name for at, call in calls if call.arguments and is_cut(at, call)]


def _with_call(said: TurnReading, at: int, call: ParsedCall) -> TurnReading:
    """The turn with another call at `at`."""
    return replace(said, calls=(*said.calls[:at], call, *said.calls[at + 1 :]))


def _loses_content(
    renderer: Renderer, prompt: str, close: Close, said: TurnReading, written: str
) -> bool:
    """Whether the template does not write the content beside a thought or calls."""
    if not said.content.strip() or not (said.thought or said.calls):
        return False
    other = replace(said, content=f"{said.content} {_MARK}")
    return _turn(renderer, prompt, close, other) == written


def _dropped_thought(
    renderer: Renderer, prompt: str, close: Close, said: TurnReading, written: str
) -> str:
    """The thought that `written` lacks because the template drops it: the model does generate it.

    "" if the template writes it, and if there is none.
    """
    if not said.thought or not _follows(renderer, prompt, close, said):
        return ""
    other = replace(said, thought=f"{said.thought} {_MARK}")
    if _turn(renderer, prompt, close, other) != written:
        return ""
    marks = renderer.capabilities.thought_marks
    opening = "" if _is_opened(renderer, prompt) else f"{marks.open}\n"
    return f"{opening}{said.thought}\n{marks.close}"


def _turn(renderer: Renderer, prompt: str, close: Close, said: TurnReading) -> str:
    """The turn's text as the template writes it, perhaps without the thought or calls."""
    text = _after_prompt(renderer, prompt, close, said)
    if text is None:
        # The template does not write this turn after this prompt, but a model may generate it:
        # build it from its parts in a separate conversation.
        close_mark = renderer.capabilities.thought_marks.close
        thought = f"{said.thought}\n{close_mark}\n\n" if _is_opened(renderer, prompt) else ""
        return thought + said.content + (_calls_alone(renderer, said) if said.calls else "")
    # If tool results end a prompt without a header, some templates write one with the turn.
    return text.removeprefix(_header(renderer))


def _is_opened(renderer: Renderer, prompt: str) -> bool:
    """Whether the prompt opens the turn's thought."""
    return prompt.rstrip().endswith(renderer.capabilities.thought_marks.open)


def _header(renderer: Renderer) -> str:
    return renderer.codec.headers(renderer.render_text(_ANYTHING, None))[0]


def _calls_alone(renderer: Renderer, said: TurnReading) -> str:
    """The calls as the template writes them in a separate conversation."""

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
    """The template's text for the turn after `prompt`; None if it rewrites the prompt."""
    text = _closed(renderer, close, said)
    if text is None or not text.startswith(prompt):
        return None
    return _without_end(renderer, text[len(prompt) :])


def _closed(renderer: Renderer, close: Close, said: TurnReading) -> str | None:
    """The rendered conversation with this turn; None if the template rejects it."""
    try:
        return _render_closed(renderer, close, said)
    except TemplateRefusal:
        return None


def _render_closed(renderer: Renderer, close: Close, said: TurnReading) -> str:
    """The rendered conversation with this turn. Raises the template's last `TemplateRefusal`."""
    ids = [renderer.call_id(name, index) for index, name in enumerate(said.call_names)]
    try:
        return close(in_fields(said, ids))
    except TemplateRefusal:
        return close(in_fields(said, ids, json_arguments=True))


def _without_end(renderer: Renderer, text: str) -> str:
    for end, _ in renderer.capabilities.turn_ends:
        text = text.partition(end)[0]
    return text
