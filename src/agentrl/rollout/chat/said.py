"""What a turn says to its reader, a thought and a text: of a whole turn, and while it is sampled.

What is told while a turn is sampled is always a beginning of what the whole turn says. So nothing
is told that may turn out to be something else: the start of a call, of a control token, of a text
that ends the answer, of the mark after a thought, half a character, or white space at the end.

    sampled so far                          told: thought          text
    <thi
    <think>I look. </th                     I look.
    <think>I look. </think>\n\nIn bin B7 <  I look.                In bin B7
    ... In bin B7 <tool_call>{"name": ...   I look.                In bin B7
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from agentrl.rollout.chat.escaping import longest_of
from agentrl.rollout.chat.renderer import ChatRenderer, ToolSchema


@dataclass(frozen=True, slots=True)
class Said:
    """A thought and a text, without calls and control tokens."""

    thought: str = ""
    text: str = ""


class TurnReader:
    """Reads one turn. No I/O."""

    def __init__(
        self,
        renderer: ChatRenderer,
        tools: Sequence[ToolSchema],
        stop: Sequence[str] = (),
        *,
        thinking: bool = False,
    ) -> None:
        """`stop`: texts that end the answer. `thinking`: whether the prompt has begun a thought.

        Without tools, a turn is not read for calls.
        """
        self._renderer = renderer
        self._tools = tools
        self._thinking = thinking
        self._marks = renderer.capabilities.thought_marks
        specials = renderer.codec.special_texts
        calls = renderer.parser_choice.starts if tools else ()
        in_thought = specials if "" in calls else calls  # there, only control tokens begin calls
        self._in_thought = _held((self._marks.close, *in_thought))
        self._calls_in_thought = _held(tuple(in_thought))
        self._in_text = _held((*specials, *calls, *stop))

    def whole(self, text: str, *, with_calls: bool) -> Said:
        """What the whole turn says. `with_calls`: whether its calls are made, and not shown.

        A thought that is begun and never ends is a thought, up to a call.
        """
        start = self._thought_start(text)
        if start is None:
            return Said("", self._content(text, with_calls))
        close = text.find(self._marks.close, start)
        if close >= 0:
            rest = text[close + len(self._marks.close) :]
            return Said(text[start:close].strip(), self._content(rest, with_calls))
        if not with_calls:
            return Said(text[start:].strip())
        thought = self._calls_in_thought.before(text[start:]).strip()
        content = self._content(text[start:], with_calls)
        return Said(thought, content.removeprefix(thought).strip())

    def so_far(self, text: str) -> Said:
        """What is certain of a turn of which `text` is sampled."""
        stripped, opening = text.lstrip(), self._marks.open
        if len(stripped) < len(opening) and opening.startswith(stripped):
            return Said()
        start = self._thought_start(text)
        if start is None:
            return Said("", self._certain(text))
        close = text.find(self._marks.close, start)
        if close < 0:
            return Said(self._in_thought.certain(text[start:]))
        rest = text[close + len(self._marks.close) :]
        return Said(text[start:close].strip(), self._certain(rest))

    def _thought_start(self, text: str) -> int | None:
        """Where the thought begins at the start of a turn; None if it has none."""
        stripped = text.lstrip()
        if stripped.startswith(self._marks.open):
            return len(text) - len(stripped) + len(self._marks.open)
        return 0 if self._thinking else None

    def _content(self, text: str, with_calls: bool) -> str:
        if with_calls:
            text = self._renderer.parse_calls(text, self._tools).content
        framed = self._renderer.capabilities.frame.peel_content(text)
        return self._renderer.codec.without_specials(framed).strip()

    def _certain(self, text: str) -> str:
        # With a frame, the content is what follows its last mark.
        framed = self._renderer.capabilities.frame.before
        return "" if framed else self._in_text.certain(text)


class _Held:
    """Texts at which something else may begin than what is told. "" may begin anywhere."""

    def __init__(self, starts: tuple[str, ...]) -> None:
        self._any = longest_of(starts) if starts else None
        self._begun = frozenset(start[:end] for start in starts for end in range(1, len(start)))
        self._longest = max(map(len, starts), default=0)

    def before(self, text: str) -> str:
        """The text up to the first of them."""
        found = self._any and self._any.search(text)
        return text[: found.start()] if found else text

    def certain(self, text: str) -> str:
        """The text that comes before any of them, also if one has only begun."""
        text = self.before(text)
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-size:] in self._begun:
                text = text[:-size]
                break
        return text.strip()


_held = lru_cache(maxsize=64)(_Held)  # of hundreds of control tokens, the same for each turn
