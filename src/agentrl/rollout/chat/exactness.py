"""Checks by random conversations whether multi-turn training with a model is exact.

A turn is rendered by the chat template, encoded, and used as the generated turn. Every prompt must
then equal the template's own tokens for the whole conversation, and control tokens in tool results
must be encoded as plain text. Content is compared too: reading a turn must give what it says, and
the next prompt must contain the turn's content and the tool results exactly once. The check counts
where the template does not extend the sampled tokens, so that a new segment begins, and the cost
of that. `agentrl doctor` prints the result.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from agentrl.policy_version import VersionSpan
from agentrl.rollout.chat.capabilities import TemplateRefusal
from agentrl.rollout.chat.conversation import Conversation
from agentrl.rollout.chat.form_choice import Drift
from agentrl.rollout.chat.forms import in_fields
from agentrl.rollout.chat.renderer import ChatRenderer, ToolSchema
from agentrl.rollout.chat.tokens import TokenContext
from agentrl.rollout.chat.turns import Message, TurnReading, opened_thought
from agentrl.rollout.chat.written import saying, written_turn
from agentrl.rollout.tool_calls import ParsedCall

_WORDS = ("one", "two three", "12", "日本", "🙂", "é", "{}", "'", "a\\b", '"', " ", "\n", "\n\n")
_QUOTING = ("'", '"', "\\", "\n")  # characters that some templates do not escape in arguments
_TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a thing up.",
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


class Situation(StrEnum):
    """What follows a turn."""

    RESULTS = "tools answer"
    RESULTS_AFTER_SYSTEM = "tools answer in a conversation with a system message"
    TWO_RESULTS = "tools answer two calls of one turn"
    USER = "a user speaks again"


@dataclass(frozen=True)
class Exactness:
    """The result of random conversations.

    conversations: number of conversations that the template accepted
    continuations, drifts: numbers by situation
    lost: continuations, by situation, whose prompt lacks the tool results or the user's message
    reasons: number of drifts by reason
    restyled: turns that the template would write in other characters; the sampled ones are kept
    misread: turns whose calls are not read back because of quotes or line ends in arguments
    refused, refusal: number of conversations that the template rejects, and its first error
    one_call: why turns with two calls were not tried
    inexact: the first error in tokens or content
    computed: tokens that training computes, relative to one segment (1 without drift)
    """

    conversations: int
    continuations: Mapping[Situation, int]
    drifts: Mapping[Situation, int]
    lost: Mapping[Situation, int]
    reasons: Mapping[Drift, int]
    restyled: int
    misread: int
    refused: int
    refusal: str | None
    one_call: str | None
    inexact: str | None
    computed: float

    @property
    def faulty(self) -> bool:
        """Whether tokens or content are wrong or missing."""
        return self.inexact is not None or any(self.lost.values())

    @property
    def exact(self) -> bool:
        """Whether tokens and content are right and every prompt extends the sampled tokens."""
        return not self.faulty and not any(self.drifts.values())

    def sentence(self) -> str:
        """The findings as one sentence."""
        if self.inexact is not None:
            return f"multi-turn training is not exact: {self.inexact}"
        if any(self.lost.values()):
            where = self._where(self.lost)
            if self.lost[Situation.USER]:
                return (
                    "multi-turn training is not exact: what is said to the model vanishes from the "
                    f"prompt where {where}"
                )
            return f"multi-turn training is not exact: results vanish from the prompt where {where}"
        total = sum(self.continuations.values())
        held = (
            f"in {self.conversations} random conversations with {total} continuations every prompt "
            "held what was sampled, and was otherwise, token for token, the chat template's"
        )
        if self.refused:
            held += f"; {self.refused} more it refuses ({self.refusal})"
        if self.one_call:
            held += f"; no turn with two calls was tried: {self.one_call}"
        if self.restyled:
            held += (
                f"; {self.restyled} turns, which it would write in other characters, stayed as "
                "they were generated"
            )
        if self.misread:
            held += (
                f"; {self.misread} turns with quotes or line ends in the arguments of their calls "
                "could not be read back, as the chat template writes them"
            )
        if self.exact:
            return f"multi-turn training is exact: {held}; it always extends what was sampled"
        why = ", or ".join(reason for reason, _ in Counter(self.reasons).most_common())
        return (
            f"multi-turn conversations break into segments: {held}; but it does not extend what "
            f"was sampled, so that a new segment begins, where {self._where(self.drifts)}: {why}. "
            f"That costs: {self.computed:.2f} times as many tokens are computed in such "
            "conversations"
        )

    def _where(self, counts: Mapping[Situation, int]) -> str:
        return " and ".join(
            f"{situation} ({n} of {self.continuations[situation]})"
            for situation, n in counts.items()
            if n
        )


class _OneCallOnly(Exception):
    """The template cannot write a turn with two calls. The message says what it does."""


def check_exactness(renderer: ChatRenderer, conversations: int = 150, seed: int = 0) -> Exactness:
    """Run random conversations and count what happens at their continuations."""
    source = Random(seed)
    continuations: Counter[Situation] = Counter()
    drifts: Counter[Situation] = Counter()
    lost: Counter[Situation] = Counter()
    reasons: Counter[Drift] = Counter()
    held = refused = computed = needed = restyled = misread = 0
    refusal = one_call = inexact = None
    for index in range(conversations):
        situation = list(Situation)[index % len(Situation)]
        talk = _Talk(renderer, source, situation)
        try:
            talk.hold()
        except TemplateRefusal as error:
            refused, refusal = refused + 1, refusal or str(error)
            continue
        except _OneCallOnly as reason:
            one_call = str(reason)
            continue
        held += 1
        continuations[situation] += talk.context.n_continuations
        drifts[situation] += talk.context.n_drifts
        lost[situation] += talk.n_lost
        reasons.update(talk.reasons)
        computed += talk.context.n_tokens
        needed += talk.needed
        inexact = inexact or talk.fault
        restyled += talk.n_restyled
        misread += talk.n_misread
    return Exactness(
        conversations=held,
        continuations=continuations,
        drifts=drifts,
        lost=lost,
        reasons=reasons,
        restyled=restyled,
        misread=misread,
        refused=refused,
        refusal=refusal,
        one_call=one_call,
        inexact=inexact,
        computed=computed / max(needed, 1),
    )


class _Talk:
    """One random conversation.

    needed: its tokens in a single segment; fault: the first error. Every text contains a unique
    mark, by which it is found in later prompts.
    """

    def __init__(self, renderer: ChatRenderer, source: Random, situation: Situation) -> None:
        self.context = TokenContext()
        self.reasons: list[Drift] = []
        self.needed = self.n_restyled = self.n_lost = self.n_misread = 0
        self.fault: str | None = None
        self._renderer = renderer
        self._source = source
        self._situation = situation
        self._n_marks = 0

    def hold(self) -> None:
        """Run it. Raises `TemplateRefusal` if the template rejects it."""
        renderer, source = self._renderer, self._source
        messages: list[Message] = [{"role": "user", "content": self._text()}]
        if self._situation is Situation.RESULTS_AFTER_SYSTEM:
            messages.insert(0, {"role": "system", "content": "Answer well."})
        conversation = Conversation(renderer, messages, [_TOOL])
        self.context.begin_segment(conversation.prompt_ids)
        self.needed = len(conversation.prompt_ids)
        for _ in range(source.randint(1, 3)):
            said = self._say()
            added = self._add(len(said.calls))
            text = self._written(conversation, said)
            self._compare_reading(conversation.prompt_text, text, said)
            end = renderer.capabilities.turn_ends[0 if said.calls else -1][1]
            output = [*renderer.encode_inside(text), end]
            span = VersionSpan(version=0, start=0, end=len(output))
            self.context.add_turn(output, [0.0] * len(output), [span])
            next_prompt = conversation.extend(output, added)
            self.n_restyled += next_prompt.restyled
            if next_prompt.extends:
                self.context.observe(next_prompt.ids, next_prompt.n_separator)
                self.needed += len(output) + len(next_prompt.ids)
            else:
                assert next_prompt.drift is not None
                self.reasons.append(next_prompt.drift)
                self.context.begin_segment(next_prompt.ids, next_prompt.drift)
                added_text = "\n".join(message["content"] for message in added)
                self.needed += len(output) + len(renderer.encode_inside(added_text))
            if any(self._becomes_control(message["content"]) for message in added):
                self._blame("text from tools becomes control tokens")
            n_added = len(next_prompt.ids) if next_prompt.extends else 0
            if not self.n_restyled and not self._is_whole(conversation, n_added):
                self._blame(f"after {text!r} the prompt's tokens are not the template's")
            self._compare_content(said, added)

    def _blame(self, fault: str) -> None:
        self.fault = self.fault or fault

    def _written(self, conversation: Conversation, said: TurnReading) -> str:
        """The turn as the template writes it. Raises `_OneCallOnly` if it omits a second call."""
        if len(said.calls) > 1:
            self._check_both_calls(conversation)
        return written_turn(
            self._renderer, conversation.prompt_text, conversation.render_closed, said
        ).text

    def _check_both_calls(self, conversation: Conversation) -> None:
        renderer = self._renderer
        calls = [ParsedCall("look_up", {"text": f"probe-{index}"}) for index in range(2)]
        message = in_fields(saying(calls=calls), [renderer.call_id("look_up", i) for i in range(2)])
        try:
            text = conversation.render_closed(message)
        except TemplateRefusal as refusal:
            raise _OneCallOnly(str(refusal)) from None
        if "probe-0" in text and "probe-1" not in text:
            raise _OneCallOnly("of two calls the chat template writes the first")

    def _compare_reading(self, prompt: str, text: str, said: TurnReading) -> None:
        """Check that reading a turn gives what it says, unless the parser is uncertain."""
        renderer = self._renderer
        if said.calls and not renderer.parser_choice.certain:
            return
        prompted = opened_thought(prompt, renderer.capabilities.thought_marks)
        reading = renderer.read_turn(text, prompted, [_TOOL])
        quoting = any(mark in text for text in _texts_of_calls(said) for mark in _QUOTING)
        if quoting and reading.calls != said.calls:
            self.n_misread += 1
            return
        for name, given, read in (
            ("content", said.content, renderer.said(reading.content)),
            ("tool calls", list(said.calls), list(reading.calls)),
            ("thought", said.thought if said.thought in text else "", reading.thought),
        ):
            if given != read:
                self._blame(f"of the turn {text!r} the {name} read is {read!r}, not {given!r}")

    def _compare_content(self, said: TurnReading, added: list[Message]) -> None:
        """Check that the turn's content and the added messages are in the prompt once."""
        prompt = self._renderer.codec.decode(self.context.ids.tolist())
        for text in [said.content] if said.content else _texts_of_calls(said):
            if (n := prompt.count(_mark_of(text))) != 1:
                self._blame(f"what a turn says, {text!r}, stands in the next prompt {n} times")
        found = [prompt.count(_mark_of(message["content"])) for message in added]
        self.n_lost += 0 in found
        if max(found) > 1:
            self._blame("what follows a turn stands in the next prompt more than once")

    def _becomes_control(self, text: str) -> bool:
        codec = self._renderer.codec
        return not codec.special_ids.isdisjoint(codec.encode(codec.escape_tool_text(text)))

    def _is_whole(self, conversation: Conversation, n_added: int) -> bool:
        """Whether the prompt equals the template's for the whole conversation.

        Either all tokens are equal, or the text and the `n_added` last tokens are: the model may
        split its own text into other tokens.
        """
        ids, whole = self.context.ids.tolist(), conversation.whole_ids()
        decode = self._renderer.codec.decode
        return ids == whole or (
            decode(ids) == decode(whole)
            and ids[len(ids) - n_added :] == whole[len(whole) - n_added :]
        )

    def _say(self) -> TurnReading:
        source, capabilities = self._source, self._renderer.capabilities
        speaks = self._situation is Situation.USER
        n_calls = 0 if speaks else 2 if self._situation is Situation.TWO_RESULTS else 1
        calls = [ParsedCall("look_up", {"text": self._plain(), "count": 7}) for _ in range(n_calls)]
        thinks = capabilities.writes_thoughts and source.random() < 0.7
        thought = self._plain() if thinks else ""
        return saying(thought, self._plain() if speaks else "", calls)

    def _add(self, n_calls: int) -> list[Message]:
        results: list[Message] = [{"role": "tool", "content": self._text()} for _ in range(n_calls)]
        return results or [{"role": "user", "content": self._text()}]

    def _plain(self) -> str:
        return self._marked(self._source.choices(_WORDS, k=5)).strip()

    def _text(self) -> str:
        """Random text from outside, which may contain control tokens."""
        control = list(self._renderer.codec.special_texts)
        words = [*_WORDS, self._source.choice(control) if control else "x"]
        return self._marked(self._source.choices(words, k=self._source.randint(0, 8)))

    def _marked(self, words: list[str]) -> str:
        self._n_marks += 1
        words.insert(self._source.randint(0, len(words)), f"w{self._n_marks}w")
        return "".join(words)


def _texts_of_calls(said: TurnReading) -> list[str]:
    return [call.arguments["text"] for call in said.calls if isinstance(call, ParsedCall)]


_MARK = re.compile(r"w\d+w")


def _mark_of(text: str) -> str:
    """The mark in a text."""
    found = _MARK.search(text)
    assert found is not None, "every text has one"
    return found[0]
