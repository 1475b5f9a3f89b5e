"""A conversation that grows turn by turn: its next prompt, and how it follows from the last.

After each turn the template is applied to the whole conversation. If the text begins with the last
prompt's and goes on with the turn as it was generated, the rest is the delta, and the conversation
is extended. If it writes the turn otherwise but says the same (other spaces in a call's JSON), the
turn stays as it was generated. Anything else is a drift: the next prompt begins a new segment.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

from agentrl.rollout.chat.renderer import ChatRenderer, TemplateRefusal, ToolSchema
from agentrl.rollout.chat.turns import (
    TEXT_FORMS,
    Message,
    TurnForm,
    TurnReading,
    as_message,
    written_ids,
)

_HEADER_LENGTH = 200  # characters; the header of a turn is shorter

log = logging.getLogger(__name__)


class Drift(StrEnum):
    """Why a conversation cannot be extended by appending."""

    EARLIER_REWRITTEN = "the chat template rewrites what stood before the turn"
    TURN_REWRITTEN = "the chat template rewrites the turn"
    OTHER_END = "the turn ends otherwise than the chat template ends it"
    ADDED_UNWRITTEN = "the chat template does not write what was added"


@dataclass(frozen=True, slots=True)
class Entry:
    """A message of a conversation. One that the model generated has its ids, with its stop."""

    message: Message
    output_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a conversation goes on after a turn.

    ids: what is appended to the tokens so far if it `extends` them, else the whole next prompt
    n_separator: how many ids at its begin close the generated turn (0 if it does not extend)
    restyled: the template would write the turn in other characters; it stays as it was generated
    drift: why it does not extend; None also where the conversation was rewritten on purpose
    n_rewritten: generated turns whose ids the new prompt does not hold as they were sampled
    """

    ids: tuple[int, ...]
    extends: bool
    n_separator: int = 0
    restyled: bool = False
    drift: Drift | None = None
    n_rewritten: int = 0


@dataclass(slots=True)
class _Turn:
    """A generated turn in a conversation.

    before: the end of the prompt that it was generated from; written: the template's text for it;
    message: the form in which the template is given it; call_ids: one for each of its calls.
    """

    output_ids: tuple[int, ...]
    stop: int | None
    reading: TurnReading
    before: str
    written: str
    call_ids: Sequence[str]
    message: Message


@dataclass(slots=True)
class _Item:
    """An entry, with its guarded message, or the turn that was generated."""

    entry: Entry
    guarded: Message
    turn: _Turn | None = None


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What the template makes of a turn that it is given as this message.

    text: the whole conversation; written: the turn in it; delta: what follows the turn. is_exact:
    the template writes the turn as it was generated.
    """

    message: Message
    as_text: bool
    text: str
    written: str = ""
    delta: str = ""
    drift: Drift | None = None
    is_exact: bool = False

    @property
    def rank(self) -> tuple[bool, bool, bool, bool]:
        """The lesser, the better. As text a turn loses the least where it drifts anyway."""
        drifts = self.drift is not None
        return (
            drifts,
            self.drift is Drift.ADDED_UNWRITTEN,
            not self.is_exact,
            self.as_text != drifts,
        )


class Conversation:
    """One record's messages, and the text that the template makes of them."""

    def __init__(
        self,
        renderer: ChatRenderer,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None,
    ) -> None:
        """Raises `TemplateRefusal` if the template does not take the messages."""
        prompt = renderer.prompt(messages, tools)
        self.prompt_ids: Sequence[int] = prompt.ids
        self._renderer = renderer
        self._tools = prompt.tools
        self._items = [
            _Item(Entry(message), guarded)
            for message, guarded in zip(messages, prompt.messages, strict=True)
        ]
        self._rendered = prompt.text

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The messages, in order."""
        return tuple(item.entry for item in self._items)

    @property
    def messages(self) -> list[Message]:
        """The conversation as the template is given it, without guards on text from outside."""
        return _as_messages(self._items, guarded=False)

    @property
    def prompt_text(self) -> str:
        """The template's text for the next prompt, guarded."""
        return self._rendered

    def whole_ids(self) -> list[int]:
        """The next prompt, rendered and encoded as a whole: nothing that was generated is kept."""
        return self._renderer.encode(self._render(self._items))

    def render_closed(self, message: Message) -> str:
        """The template's text for the conversation with this turn, which nothing follows."""
        messages = [*_as_messages(self._items), message]
        return self._renderer.render_text(messages, self._tools, add_generation_prompt=False)

    def extend(self, output_ids: Sequence[int], added: Sequence[Message]) -> Continuation:
        """Add a generated turn and the messages that follow it: results of tools, or a user's.

        Raises `TemplateRefusal` if the template takes the turn in no form.
        """
        turn = self._read(tuple(output_ids))
        items = [*self._items, _item_of(turn), *map(self._given, added)]
        best: _Attempt | None = None
        refusal: TemplateRefusal | None = None
        for form in TurnForm:
            message = as_message(turn.reading, form, turn.call_ids)
            if message is None:
                continue
            turn.message = message
            try:
                attempt = self._attempt(items, turn, len(added), form in TEXT_FORMS)
            except TemplateRefusal as error:
                refusal = refusal or error
                continue
            if best is None or attempt.rank < best.rank:
                best = attempt
            if best.is_exact and best.drift is None:
                break
        if best is None:
            assert refusal is not None, "a turn can be put as text at least"
            raise refusal
        turn.message = best.message
        if best.drift is not None:
            log.debug("%s; the conversation goes on in a new segment", best.drift)
            ids, n_rewritten = self._begin(items, best.text)
            return Continuation(ids, extends=False, drift=best.drift, n_rewritten=n_rewritten)
        turn.written = best.written
        self._items, self._rendered = items, best.text
        ids = tuple(self._renderer.codec.encode(best.delta, after=turn.stop, start=False))
        return Continuation(
            ids, True, self._separator_length(ids), restyled=best.written != turn.reading.text
        )

    def rewrite(self, entries: Sequence[Entry]) -> Continuation:
        """Go on from other entries: some of `entries` as they are, and new ones.

        Generated turns keep their ids, unless the template rewrites them. An entry with ids that
        is none of the conversation's is the turn that was generated last. Raises `TemplateRefusal`
        if the template does not take the messages.
        """
        known = {id(item.entry): item for item in self._items}
        items = [known.get(id(entry)) or self._new(entry) for entry in entries]
        ids, n_rewritten = self._begin(items, self._render(items))
        return Continuation(ids, extends=False, n_rewritten=n_rewritten)

    def _read(self, output_ids: tuple[int, ...]) -> _Turn:
        renderer = self._renderer
        text, stop = renderer.split_turn(output_ids)
        before = self._rendered[-_HEADER_LENGTH:]
        mark = renderer.dialect.thought_marks.open
        prompted = before[before.rindex(mark) :] if before.rstrip().endswith(mark) else ""
        reading = renderer.read_turn(text, prompted, self._tools)
        n_calls = sum(len(item.turn.call_ids) for item in self._items if item.turn is not None)
        call_ids = written_ids(reading) or [
            renderer.call_id(name, n_calls + index) for index, name in enumerate(reading.call_names)
        ]
        message = {"role": "assistant", "content": text}
        return _Turn(output_ids, stop, reading, before, text, call_ids, message)

    def _new(self, entry: Entry) -> _Item:
        if entry.output_ids:
            return _item_of(self._read(entry.output_ids))
        return self._given(entry.message)

    def _given(self, message: Message) -> _Item:
        return _Item(Entry(message), self._renderer.guard_message(message))

    def _render(self, items: Sequence[_Item]) -> str:
        return self._renderer.render_text(_as_messages(items), self._tools)

    def _attempt(
        self, items: Sequence[_Item], turn: _Turn, n_added: int, as_text: bool
    ) -> _Attempt:
        """What the template makes of the turn as its message now is."""
        text = self._render(items)
        body = turn.reading.text
        found = self._written(text, turn)
        if isinstance(found, Drift):
            keeps = self._find(turn, text, 0) is not None
            return _Attempt(turn.message, as_text, text, drift=found, is_exact=keeps)
        written, delta = found
        drift = None
        if written != body and not self._reads_the_same(written, turn.reading):
            drift = Drift.TURN_REWRITTEN
        elif not all(_shows(delta, item.guarded) for item in items[len(items) - n_added :]):
            drift = Drift.ADDED_UNWRITTEN
        exact = written == body
        return _Attempt(turn.message, as_text, text, written, delta, drift, exact)

    def _reads_the_same(self, written: str, reading: TurnReading) -> bool:
        again = self._renderer.read_turn(written, reading.prompted, self._tools)
        return again.says_the_same(reading)

    def _written(self, text: str, turn: _Turn) -> tuple[str, str] | Drift:
        """How the template writes the turn after the prompt, and what it writes after the turn."""
        if not text.startswith(self._rendered):
            return Drift.EARLIER_REWRITTEN
        rest = text[len(self._rendered) :]
        if turn.stop is None:
            body = turn.reading.text
            return (body, rest[len(body) :]) if rest.startswith(body) else Drift.TURN_REWRITTEN
        written, ended, delta = rest.partition(self._renderer.codec.token(turn.stop))
        return (written, delta) if ended else Drift.OTHER_END

    def _separator_length(self, ids: Sequence[int]) -> int:
        """How many of the ids after a turn stand before the first token that opens something."""
        stops, added = self._renderer.stop_token_ids, self._renderer.codec.added_ids
        opens = (i for i, token in enumerate(ids) if token in added and token not in stops)
        return next(opens, len(ids))

    def _begin(self, items: list[_Item], text: str) -> tuple[tuple[int, ...], int]:
        """A whole prompt, with the ids of generated turns where the template writes their text.

        Returns its ids, and of how many generated turns it does not hold the ids.
        """
        codec = self._renderer.codec
        ids: list[int] = []
        n_rewritten = 0
        position, after = 0, None
        for turn in (item.turn for item in items if item.turn is not None):
            found = self._find(turn, text, position)
            if found is None:
                n_rewritten += 1
                continue
            start, end, kept = found
            ids += codec.encode(text[position:start], after=after, start=not ids)
            ids += kept
            position, after = end, kept[-1] if kept[-1] == turn.stop else None
        ids += codec.encode(text[position:], after=after, start=not ids)
        self._items, self._rendered = items, text
        return tuple(ids), n_rewritten

    def _find(
        self, turn: _Turn, text: str, position: int
    ) -> tuple[int, int, tuple[int, ...]] | None:
        """Where the template writes the turn, from `position` on, and its ids there.

        A stop token that the template does not write is left out.
        """
        ways = [("", turn.output_ids)]
        if turn.stop is not None:
            stop = self._renderer.codec.token(turn.stop)
            ways = [(stop, turn.output_ids), ("", turn.output_ids[:-1])]
        headers = self._renderer.codec.headers(turn.before)
        for (end, ids), header in product(ways, headers):
            found = text.find(header + turn.written + end, position)
            if found >= 0 and ids:
                start = found + len(header)
                return start, start + len(turn.written + end), ids
        return None


def _item_of(turn: _Turn) -> _Item:
    message = {"role": "assistant", "content": turn.reading.text}
    return _Item(Entry(message, turn.output_ids), message, turn)


def _as_messages(items: Sequence[_Item], guarded: bool = True) -> list[Message]:
    """The template's messages. Results get the ids of the calls before them, in order."""
    messages: list[Message] = []
    waiting: list[tuple[str, str]] = []
    for item in items:
        turn = item.turn
        if turn is not None:
            waiting = list(zip(turn.call_ids, turn.reading.call_names, strict=True))
            messages.append(turn.message)
            continue
        message = item.guarded if guarded else item.entry.message
        if message["role"] == "tool" and waiting:
            call_id, name = waiting.pop(0)
            message = {"tool_call_id": call_id, "name": name, **message}
        messages.append(message)
    return messages


def _shows(text: str, message: Message) -> bool:
    """Whether a text holds the message's content, as it is or in a JSON string."""
    content = message["content"]
    if not isinstance(content, str):
        return True
    content = content.strip()
    return content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text
