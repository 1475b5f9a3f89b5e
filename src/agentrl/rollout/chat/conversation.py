"""A conversation that grows turn by turn: its next prompt, and how it follows from the last.

After each turn the template is applied to the whole conversation. With `↵` for a line end:

    last prompt   <|im_start|>user↵How heavy is it?<|im_end|>↵<|im_start|>assistant↵
    turn          <tool_call>...</tool_call><|im_end|>                the ids that were sampled
    added         {"role": "tool", "content": "7 kg"}
    rendered      the last prompt, the turn, and then the delta:
                  ↵<|im_start|>tool↵7 kg<|im_end|>↵<|im_start|>assistant↵

The delta's ids are appended to those so far. The first of them, the line end, closes the turn:

    NextPrompt(ids=array("i", [198, 151644, ...]), extends=True, n_separator=1)

That is the first of three ways on. `form_choice.py` finds out which one it is:

    as generated   the rendered text is the last prompt, the turn as it was generated, and a delta
    restyled       it has the turn in other characters, which say the same (other spaces in a call's
                   JSON): the delta is appended, and the turn stays as it was generated
    drift          anything else: the rendered text as a whole is the next prompt, and begins a new
                   segment. Turns that stand in it keep their ids (`sampled_ids.py`)
"""

import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.rollout.chat.form_choice import Drift, Fit, TurnInPlace, choose_form
from agentrl.rollout.chat.form_order import ANY_FORM, FormOrder, TurnKind
from agentrl.rollout.chat.piece_encoder import PieceEncoder
from agentrl.rollout.chat.renderer import ChatRenderer, ToolSchema
from agentrl.rollout.chat.sampled_ids import encode_keeping
from agentrl.rollout.chat.turns import (
    Message,
    SampledTurn,
    TurnReading,
    opened_thought,
    written_ids,
)

_HEADER_LENGTH = 200  # characters; longer than any header of a turn

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """A message of a conversation. `output_ids`: of a generated one, with the stop token."""

    message: Message
    output_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NextPrompt:
    """How a conversation continues after a turn.

    ids: int32, the ids to append if it `extends` the tokens so far, else the whole next prompt
    n_separator: number of leading ids that close the generated turn (0 if it does not extend)
    restyled: the template would write the turn in other characters; the sampled ones are kept
    drift: why it does not extend; None also if the conversation was rewritten on purpose
    n_rewritten: generated turns whose sampled ids are not in the new prompt
    """

    ids: "array[int]"
    extends: bool
    n_separator: int = 0
    restyled: bool = False
    drift: Drift | None = None
    n_rewritten: int = 0


@dataclass(frozen=True, slots=True)
class _Item:
    """An entry with the message that is passed to the template.

    message: the form of a generated turn, or the escaped message of another entry
    turn: the generated turn, if it is one
    """

    entry: Entry
    message: Message
    turn: SampledTurn | None = None


class Conversation:
    """One record's messages, and their rendered text."""

    def __init__(
        self,
        renderer: ChatRenderer,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None,
    ) -> None:
        """Raises `TemplateRefusal` if the template rejects the messages."""
        prompt = renderer.prompt(messages, tools)
        self.prompt_ids: Sequence[int] = prompt.ids
        self._renderer = renderer
        self._encoder = PieceEncoder(renderer.codec)
        self._tools = prompt.tools
        self._items = [
            _Item(Entry(message), escaped)
            for message, escaped in zip(messages, prompt.messages, strict=True)
        ]
        self._rendered = prompt.text

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The messages, in order."""
        return tuple(item.entry for item in self._items)

    @property
    def messages(self) -> list[Message]:
        """The messages that are passed to the template, but not escaped."""
        return _as_messages(self._items, escaped=False)

    @property
    def n_characters(self) -> int:
        """Characters of the next prompt."""
        return len(self._rendered)

    @property
    def prompt_text(self) -> str:
        """The rendered text of the next prompt, escaped."""
        return self._rendered

    def whole_ids(self) -> list[int]:
        """The next prompt rendered and encoded as a whole, without sampled ids."""
        return self._renderer.encode(self._render(self._items))

    def render_closed(self, message: Message) -> str:
        """The rendered conversation with this turn at its end."""
        messages = [*_as_messages(self._items), message]
        return self._renderer.render_text(messages, self._tools, add_generation_prompt=False)

    def render_other(self, contents: Mapping[int, str]) -> str:
        """The next prompt if messages, by their index, had other contents."""
        items = list(self._items)
        for at, content in contents.items():
            items[at] = replace(items[at], message={**items[at].message, "content": content})
        return self._render(items)

    def extend(self, output_ids: Sequence[int], added: Sequence[Message]) -> NextPrompt:
        """Add a generated turn and the tool or user messages that follow it.

        Raises `TemplateRefusal` and changes nothing if the template rejects every form of the turn.
        """
        turn = self._read(tuple(output_ids))
        following = [self._given(message) for message in added]

        def items(turn: SampledTurn, form: Message) -> list[_Item]:
            return [*self._items, replace(_item_of(turn), message=form), *following]

        order = self._form_order(turn, added)
        chosen = choose_form(
            TurnInPlace(
                turn,
                prompt=self._rendered,
                added=[item.message for item in following],
                read=lambda text: self._read_text(text, turn.reading.prompted),
            ),
            order.forms,
            order.expected,
            render=lambda form: self._render(items(turn, form)),
        )
        if chosen.drift is not None:
            log.debug("%s; the conversation goes on in a new segment", chosen.drift)
            return self._begin_segment(items(turn, chosen.message), chosen.text, chosen.drift)
        turn = replace(turn, written=chosen.written)
        self._items, self._rendered = items(turn, chosen.message), chosen.text
        ids = array("i", self._renderer.codec.encode(chosen.delta, turn.stop_id, start=False))
        return NextPrompt(
            ids,
            extends=True,
            n_separator=self._separator_length(ids),
            restyled=chosen.fit is not Fit.AS_GENERATED,
        )

    def rewrite(self, entries: Sequence[Entry]) -> NextPrompt:
        """Continue from other entries: some of `self.entries`, and new ones.

        Generated turns keep their ids unless the template rewrites them. A new entry with ids is
        the turn that was generated last. Raises `TemplateRefusal` and changes nothing if the
        template rejects the messages.
        """
        known = {id(item.entry): item for item in self._items}
        items = [known.get(id(entry)) or self._new(entry) for entry in entries]
        return self._begin_segment(items, self._render(items))

    def _begin_segment(
        self, items: list[_Item], text: str, drift: Drift | None = None
    ) -> NextPrompt:
        """Begin a segment with these items and their rendered text as a whole prompt."""
        turns = [item.turn for item in items if item.turn is not None]
        ids, n_rewritten = encode_keeping(turns, text, self._encoder)
        self._items, self._rendered = items, text
        return NextPrompt(ids, extends=False, drift=drift, n_rewritten=n_rewritten)

    def _read(self, output_ids: tuple[int, ...]) -> SampledTurn:
        """Read a turn that was generated from the current prompt."""
        renderer = self._renderer
        text, stop_id = renderer.split_turn(output_ids)
        prompt_end = self._rendered[-_HEADER_LENGTH:]
        reading = self._read_text(
            text, opened_thought(prompt_end, renderer.capabilities.thought_marks)
        )
        n_calls = sum(len(item.turn.call_ids) for item in self._items if item.turn is not None)
        call_ids = written_ids(reading) or [
            renderer.call_id(name, n_calls + index) for index, name in enumerate(reading.call_names)
        ]
        return SampledTurn(
            output_ids=output_ids,
            stop_id=stop_id,
            stop_text="" if stop_id is None else renderer.codec.token(stop_id),
            reading=reading,
            headers=renderer.codec.headers(prompt_end),
            call_ids=tuple(call_ids),
            written=text,
        )

    def _form_order(self, turn: SampledTurn, added: Sequence[Message]) -> FormOrder:
        """The forms for the turn. A truncated turn is tried as text first."""
        kind = TurnKind.of(turn.reading, self._items[-1].message["role"], added)
        order = self._renderer.form_orders.get(kind, ANY_FORM)
        return order if turn.stop_id is not None else order.text_first()

    def _read_text(self, text: str, prompted: str) -> TurnReading:
        return self._renderer.read_turn(text, prompted, self._tools)

    def _new(self, entry: Entry) -> _Item:
        if entry.output_ids:
            return _item_of(self._read(entry.output_ids))
        return self._given(entry.message)

    def _given(self, message: Message) -> _Item:
        return _Item(Entry(message), self._renderer.escape_message(message))

    def _render(self, items: Sequence[_Item]) -> str:
        return self._renderer.render_text(_as_messages(items), self._tools)

    def _separator_length(self, ids: Sequence[int]) -> int:
        """The number of ids after a turn before the first added token that is no stop token."""
        stops, added = self._renderer.stop_token_ids, self._renderer.codec.added_ids
        opens = (i for i, token in enumerate(ids) if token in added and token not in stops)
        return next(opens, len(ids))


def _item_of(turn: SampledTurn) -> _Item:
    message = {"role": "assistant", "content": turn.text}
    return _Item(Entry(message, turn.output_ids), message, turn)


def _as_messages(items: Sequence[_Item], escaped: bool = True) -> list[Message]:
    """The messages for the template. Tool results get ids and names of the calls, in order."""
    messages: list[Message] = []
    waiting: list[tuple[str, str]] = []
    for item in items:
        turn = item.turn
        if turn is not None:
            waiting = list(zip(turn.call_ids, turn.reading.call_names, strict=True))
            messages.append(item.message)
            continue
        message = item.message if escaped else item.entry.message
        if message["role"] == "tool" and waiting:
            call_id, name = waiting.pop(0)
            message = {"tool_call_id": call_id, "name": name, **message}
        messages.append(message)
    return messages
