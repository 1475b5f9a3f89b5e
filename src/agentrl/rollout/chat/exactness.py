"""Is multi-turn training with a model exact? Random conversations, held as a sampler holds them.

A turn is written as the chat template writes it, encoded, and taken for what the model generated.
Then every prompt must be the template's own tokens for the whole conversation, and text from tools
that is full of control tokens must be encoded without one. What is counted is where the template
does not extend what was sampled, so that a new segment begins, and what that costs.
`agentrl doctor` tells it in words.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random

from agentrl.policy_version import VersionSpan
from agentrl.rollout.chat.conversation import Conversation
from agentrl.rollout.chat.form_choice import Drift
from agentrl.rollout.chat.forms import in_fields
from agentrl.rollout.chat.renderer import ChatRenderer, TemplateRefusal, ToolSchema
from agentrl.rollout.chat.tokens import TokenContext
from agentrl.rollout.chat.turns import Message, TurnReading
from agentrl.rollout.tool_calls import ParsedCall

_WORDS = ("one", "two three", "12", "日本", "🙂", "é", "{}", "'", "a\\b", '"', " ", "\n", "\n\n")
_MARK = "probe-content"
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
    """What comes after a turn."""

    RESULTS = "tools answer"
    RESULTS_AFTER_SYSTEM = "tools answer in a conversation with a system message"
    USER = "a user speaks again"


@dataclass(frozen=True)
class Exactness:
    """What random conversations showed.

    continuations, drifts: by situation; reasons: of the drifts; restyled: turns that the template
    would write in other characters and that stay as they were generated; refused: conversations
    that the template does not take; inexact: what was wrong with the first conversation whose
    tokens were not the template's. computed: tokens that training computes, over those of the same
    turns in one segment (1 where nothing drifts).
    """

    conversations: int
    continuations: dict[Situation, int]
    drifts: dict[Situation, int]
    reasons: dict[Drift, int]
    restyled: int
    refused: int
    refusal: str | None
    inexact: str | None
    computed: float

    def sentence(self) -> str:
        """The findings in words."""
        if self.inexact is not None:
            return f"multi-turn training is not exact: {self.inexact}"
        total = sum(self.continuations.values())
        text = (
            f"multi-turn training is exact: in {self.conversations - self.refused} random "
            f"conversations with {total} continuations every prompt held what was sampled, and was "
            "otherwise, token for token, the chat template's"
        )
        if self.refused:
            text += f"; {self.refused} more it refuses ({self.refusal})"
        if self.restyled:
            text += (
                f"; {self.restyled} turns, which it would write in other characters, stayed as "
                "they were generated"
            )
        if not any(self.drifts.values()):
            return f"{text}; it always extends what was sampled"
        where = " and ".join(
            f"{situation} ({n} of {self.continuations[situation]})"
            for situation, n in self.drifts.items()
            if n
        )
        why = ", or ".join(reason for reason, _ in Counter(self.reasons).most_common())
        return (
            f"{text}; but it does not extend what was sampled, so that a new segment begins, where "
            f"{where}: {why}. That costs: {self.computed:.2f} times as many tokens are computed in "
            "such conversations"
        )


def check_exactness(renderer: ChatRenderer, conversations: int = 150, seed: int = 0) -> Exactness:
    """Hold random conversations and count what happens at their continuations."""
    source = Random(seed)
    continuations: Counter[Situation] = Counter()
    drifts: Counter[Situation] = Counter()
    reasons: Counter[Drift] = Counter()
    refused, refusal, inexact = 0, None, None
    computed = needed = restyled = 0
    for index in range(conversations):
        situation = list(Situation)[index % len(Situation)]
        talk = _Talk(renderer, source, situation)
        try:
            talk.hold()
        except TemplateRefusal as error:
            refused, refusal = refused + 1, refusal or str(error)
            continue
        continuations[situation] += talk.context.n_continuations
        drifts[situation] += talk.context.n_drifts
        reasons.update(talk.reasons)
        computed += talk.context.n_tokens
        needed += talk.needed
        inexact = inexact or talk.fault
        restyled += talk.n_restyled
    return Exactness(
        conversations=conversations,
        continuations=dict(continuations),
        drifts=dict(drifts),
        reasons=dict(reasons),
        restyled=restyled,
        refused=refused,
        refusal=refusal,
        inexact=inexact,
        computed=computed / max(needed, 1),
    )


class _Talk:
    """One random conversation.

    needed: the tokens of its turns and of what was added, each once; fault: what is wrong with it.
    """

    def __init__(self, renderer: ChatRenderer, source: Random, situation: Situation) -> None:
        self.context = TokenContext()
        self.reasons: list[Drift] = []
        self.needed = self.n_restyled = 0
        self.fault: str | None = None
        self._renderer = renderer
        self._source = source
        self._situation = situation

    def hold(self) -> None:
        """Hold it. Raises `TemplateRefusal` if the template does not take it."""
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
            end = renderer.capabilities.turn_ends[0 if said.calls else -1][1]
            text = written_turn(renderer, conversation, said)
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
                self.needed += len(output) + len(renderer.encode_inside(_joined(added)))
            if any(self._becomes_control(message["content"]) for message in added):
                self.fault = "text from tools becomes control tokens"
            n_added = len(next_prompt.ids) if next_prompt.extends else 0
            if not self.n_restyled and not self._is_whole(conversation, n_added):
                self.fault = f"after {text!r} the prompt's tokens are not the template's"

    def _becomes_control(self, text: str) -> bool:
        codec = self._renderer.codec
        return not codec.special_ids.isdisjoint(codec.encode(codec.escape_tool_text(text)))

    def _is_whole(self, conversation: Conversation, n_added: int) -> bool:
        """Whether the prompt is the template's for the whole conversation.

        Its text, and the tokens that were added last: how the model divides its own text into
        tokens, and where it joins the prompt's, is not the template's.
        """
        ids, whole = self.context.ids, conversation.whole_ids()
        decode = self._renderer.codec.decode
        return ids == whole or (
            decode(ids) == decode(whole)
            and ids[len(ids) - n_added :] == whole[len(whole) - n_added :]
        )

    def _say(self) -> TurnReading:
        source, capabilities = self._source, self._renderer.capabilities
        speaks = self._situation is Situation.USER
        calls = () if speaks else (ParsedCall("look_up", {"text": self._plain(), "count": 7}),)
        thinks = capabilities.writes_thoughts and source.random() < 0.7
        thought = self._plain() if thinks else ""
        return TurnReading("", "", "", thought, self._plain() if speaks else "", calls)

    def _add(self, n_calls: int) -> list[Message]:
        results: list[Message] = [{"role": "tool", "content": self._text()} for _ in range(n_calls)]
        return results or [{"role": "user", "content": self._text()}]

    def _plain(self) -> str:
        return "".join(self._source.choices(_WORDS, k=5)).strip() or "a"

    def _text(self) -> str:
        """Text from outside: anything, control tokens of the model's too."""
        control = list(self._renderer.codec.special_texts)
        words = [*_WORDS, self._source.choice(control) if control else "x"]
        return "".join(self._source.choices(words, k=self._source.randint(0, 8)))


def written_turn(renderer: ChatRenderer, conversation: Conversation, said: TurnReading) -> str:
    """A turn as the chat template writes it after the conversation's prompt, without its end."""
    text = _after_prompt(renderer, conversation, said)
    if text is not None:
        return text
    # The template writes no such turn after this prompt, as a model nevertheless does: put it
    # together of what the template writes in a conversation of its own.
    marks = renderer.capabilities.thought_marks
    opened = conversation.prompt_text.rstrip().endswith(marks.open)
    thought = f"{said.thought}\n{marks.close}\n\n" if opened else ""
    alone = Conversation(renderer, [{"role": "user", "content": "?"}], None)
    calls = _after_prompt(renderer, alone, replace(said, thought="", content="")) or ""
    if said.calls and not calls:
        text = _closed(renderer, alone, replace(said, thought="", content=_MARK))
        calls = _without_end(renderer, (text or "").partition(_MARK)[2])
    return thought + said.content + (calls if said.calls else "")


def _after_prompt(
    renderer: ChatRenderer, conversation: Conversation, said: TurnReading
) -> str | None:
    """What the template writes of the turn after the prompt, if it leaves the prompt as it is."""
    text = _closed(renderer, conversation, said)
    if text is None or not text.startswith(conversation.prompt_text):
        return None
    return _without_end(renderer, text[len(conversation.prompt_text) :])


def _closed(renderer: ChatRenderer, conversation: Conversation, said: TurnReading) -> str | None:
    """The conversation with this turn, which nothing follows; None if the template refuses it."""
    ids = [renderer.call_id(name, index) for index, name in enumerate(said.call_names)]
    for json_arguments in (False, True):
        try:
            return conversation.render_closed(in_fields(said, ids, json_arguments=json_arguments))
        except TemplateRefusal:
            continue
    return None


def _without_end(renderer: ChatRenderer, text: str) -> str:
    for end, _ in renderer.capabilities.turn_ends:
        text = text.partition(end)[0]
    return text


def _joined(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)
