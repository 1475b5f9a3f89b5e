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

from agentrl.rollout.chat.renderer import ChatRenderer, TemplateRefusal, ToolSchema
from agentrl.rollout.chat.turns import Message, TurnForm, TurnReading, as_message

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

    `header`: the end of the prompt before it; `written`: the template's text for it. `form`: how
    the template is given it.
    """

    output_ids: tuple[int, ...]
    stop: int | None
    reading: TurnReading
    header: str
    written: str
    form: TurnForm = TurnForm.TEXT


@dataclass(slots=True)
class _Item:
    """An entry, with its guarded message, or the turn that was generated."""

    entry: Entry
    guarded: Message
    turn: _Turn | None = None


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
        return _as_messages(self._renderer, self._items, guarded=False)

    def extend(self, output_ids: Sequence[int], added: Sequence[Message]) -> Continuation:
        """Add a generated turn and the messages that follow it: results of tools, or a user's.

        Raises `TemplateRefusal` if the template takes the turn in no form.
        """
        turn = self._read(tuple(output_ids))
        items = [*self._items, _item_of(turn), *map(self._given, added)]
        refusal: TemplateRefusal | None = None
        drifted: tuple[Drift, TurnForm] | None = None
        for form in TurnForm:
            turn.form = form
            if as_message(turn.reading, form, turn.reading.call_names) is None:
                continue
            try:
                text = self._render(items)
            except TemplateRefusal as error:
                refusal = refusal or error
                continue
            found = self._delta(text, turn, items[len(self._items) + 1 :])
            if not isinstance(found, Drift):
                restyled = turn.written != turn.reading.text
                self._items, self._rendered = items, text
                return self._append(found, turn, restyled)
            if drifted is None or drifted[0] is Drift.ADDED_UNWRITTEN:
                drifted = found, form
        if drifted is None:
            assert refusal is not None, "a turn can be put as text at least"
            raise refusal
        reason, turn.form = drifted
        log.debug("%s; the conversation goes on in a new segment", reason)
        ids, n_rewritten = self._begin(items)
        return Continuation(ids, extends=False, drift=reason, n_rewritten=n_rewritten)

    def rewrite(self, entries: Sequence[Entry]) -> Continuation:
        """Go on from other entries: some of `entries` as they are, and new ones.

        Generated turns keep their ids, unless the template rewrites them. An entry with ids that
        is none of the conversation's is the turn that was generated last. Raises `TemplateRefusal`
        if the template does not take the messages.
        """
        known = {id(item.entry): item for item in self._items}
        items = [known.get(id(entry)) or self._new(entry) for entry in entries]
        ids, n_rewritten = self._begin(items)
        return Continuation(ids, extends=False, n_rewritten=n_rewritten)

    def _read(self, output_ids: tuple[int, ...]) -> _Turn:
        renderer = self._renderer
        text, stop = renderer.split_turn(output_ids)
        tail = self._rendered[-_HEADER_LENGTH:]
        header = tail[renderer.codec.last_added_at(tail) :]
        mark = renderer.dialect.thought_marks.open
        prompted = tail[tail.rindex(mark) :] if tail.rstrip().endswith(mark) else ""
        return _Turn(output_ids, stop, renderer.read_turn(text, prompted), header, text)

    def _new(self, entry: Entry) -> _Item:
        if entry.output_ids:
            return _item_of(self._read(entry.output_ids))
        return self._given(entry.message)

    def _given(self, message: Message) -> _Item:
        return _Item(Entry(message), self._renderer.guard_message(message))

    def _render(self, items: Sequence[_Item]) -> str:
        return self._renderer.render_text(_as_messages(self._renderer, items), self._tools)

    def _delta(self, text: str, turn: _Turn, added: Sequence[_Item]) -> str | Drift:
        """What the template writes after the turn, if it leaves what stands before it alone."""
        if not text.startswith(self._rendered):
            return Drift.EARLIER_REWRITTEN
        rest = text[len(self._rendered) :]
        body = turn.reading.text
        if turn.stop is None:
            if not rest.startswith(body):
                return Drift.TURN_REWRITTEN
            delta = rest[len(body) :]
        else:
            written, ended, delta = rest.partition(self._renderer.codec.token(turn.stop))
            if not ended:
                return Drift.OTHER_END
            if written != body:
                again = self._renderer.read_turn(written, turn.reading.prompted)
                if not again.says_the_same(turn.reading):
                    return Drift.TURN_REWRITTEN
            turn.written = written
        if not all(_shows(delta, item.guarded) for item in added):
            return Drift.ADDED_UNWRITTEN
        return delta

    def _append(self, delta: str, turn: _Turn, restyled: bool) -> Continuation:
        codec = self._renderer.codec
        ids = codec.encode(delta, after=turn.stop, start=False)
        stops = self._renderer.stop_token_ids
        opens = (i for i, t in enumerate(ids) if t in codec.added_ids and t not in stops)
        n_separator = next(opens, len(ids))
        return Continuation(tuple(ids), True, n_separator, restyled)

    def _begin(self, items: list[_Item]) -> tuple[tuple[int, ...], int]:
        """A whole prompt, with the ids of generated turns where the template writes their text.

        Returns its ids, and of how many generated turns it does not hold the ids.
        """
        codec = self._renderer.codec
        text = self._render(items)
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
            ways = [
                (self._renderer.codec.token(turn.stop), turn.output_ids),
                ("", turn.output_ids[:-1]),
            ]
        for end, ids in ways:
            found = text.find(turn.header + turn.written + end, position)
            if found >= 0 and ids:
                start = found + len(turn.header)
                return start, start + len(turn.written + end), ids
        return None


def _item_of(turn: _Turn) -> _Item:
    message = {"role": "assistant", "content": turn.reading.text}
    return _Item(Entry(message, turn.output_ids), message, turn)


def _as_messages(
    renderer: ChatRenderer, items: Sequence[_Item], guarded: bool = True
) -> list[Message]:
    """The template's messages. Results get the ids of the calls before them, in order."""
    messages: list[Message] = []
    waiting: list[tuple[str, str]] = []
    n_calls = 0
    for item in items:
        if item.turn is not None:
            reading = item.turn.reading
            call_ids = [
                renderer.call_id(name, n_calls + index)
                for index, name in enumerate(reading.call_names)
            ]
            n_calls += len(call_ids)
            waiting = list(zip(call_ids, reading.call_names, strict=True))
            message = as_message(reading, item.turn.form, call_ids)
            assert message is not None, "the turn's form was tried before"
            messages.append(message)
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
