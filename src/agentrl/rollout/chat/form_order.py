"""The two forms for each kind of turn, found when a model is loaded.

    kind of turn                          as text       structured
    says something, a user follows        content
    thinks, makes a call, results follow  content       fields                  Qwen 3
    makes a call, results follow          content       fields                  Gemma 4: the second

Every form of every kind of turn is rendered once in a short conversation. In real conversations,
which may be long and are rendered as a whole, the better form is tried first. The other one is
tried only if the first fits worse than in the short conversation.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from itertools import product
from typing import NamedTuple, Self

from agentrl.rollout.chat.capabilities import TemplateRefusal
from agentrl.rollout.chat.form_choice import Fit, TurnInPlace, judge
from agentrl.rollout.chat.forms import CANDIDATE_FORMS, TurnForm, candidates
from agentrl.rollout.chat.turns import Message, SampledTurn, TurnReading, opened_thought
from agentrl.rollout.chat.written import Renderer, saying, written_turn
from agentrl.rollout.tool_calls import ParsedCall

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "probe_tool",
            "description": "A probe.",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string", "description": "A text."}},
                "required": ["text"],
            },
        },
    }
]
_QUESTION: Message = {"role": "user", "content": "probe-question"}
_RESULT: Message = {"role": "tool", "content": "probe-result"}


class Thinking(Enum):
    """How a turn begins."""

    NONE = auto()  # without a thought, or with one that it does not close
    EMPTY = auto()  # with the marks of a thought and nothing between them
    THOUGHT = auto()  # with a thought


class TurnKind(NamedTuple):
    """The properties of a turn that decide which form a template writes best.

    thinks: how it begins; speaks: whether it has content; n_calls: 2 stands for 2 or more;
    after_results: it follows tool results; before_user: a user message follows it, after which many
    templates drop its thought.
    """

    thinks: Thinking
    speaks: bool
    n_calls: int
    after_results: bool
    before_user: bool

    @classmethod
    def of(cls, turn: TurnReading, before: str, added: Sequence[Message]) -> Self:
        """The kind of a turn. `before`: role of the message before it; `added`: those after it."""
        return cls(
            thinks=(
                Thinking.THOUGHT if turn.thought else Thinking.EMPTY if turn.lead else Thinking.NONE
            ),
            speaks=bool(turn.content),
            n_calls=min(len(turn.calls), 2),
            after_results=before == "tool",
            before_user=any(message["role"] == "user" for message in added),
        )


@dataclass(frozen=True, slots=True)
class FormOrder:
    """The forms for a kind of turn, best first: at most one as text and one structured.

    expected: how well the first one fits.
    """

    forms: tuple[TurnForm, ...]
    expected: Fit

    def text_first(self) -> "FormOrder":
        """The same forms with the text form first, which is expected to fit as generated."""
        return FormOrder(tuple(sorted(self.forms, key=lambda form: not form.is_text)), min(Fit))


# For kinds that no probe covers.
ANY_FORM = FormOrder((CANDIDATE_FORMS[0], CANDIDATE_FORMS[2]), Fit.AS_GENERATED)


def find_form_orders(renderer: Renderer) -> Mapping[TurnKind, FormOrder]:
    """Find the forms for each kind of turn by rendering all forms in short conversations."""
    orders: dict[TurnKind, FormOrder] = {}
    openings = [[_QUESTION]]
    with suppress(TemplateRefusal):
        calling = _Probe(renderer, [_QUESTION], saying(calls=[_call(0)]), [_RESULT])
        if (call := calling.best_message()) is not None:
            openings.append([_QUESTION, call, *calling.following])
    thinkings = tuple(Thinking) if renderer.capabilities.writes_thoughts else (Thinking.NONE,)
    for before, n_calls, thinking, speaks in product(openings, (0, 1, 2), thinkings, (False, True)):
        said = saying(
            "probe-thought" if thinking is Thinking.THOUGHT else "",
            "probe-turn" if speaks else "",
            [_call(index) for index in range(n_calls)],
        )
        for user in ([_QUESTION],) if not n_calls else ([], [_QUESTION]):
            try:
                probe = _Probe(renderer, before, said, [_RESULT] * n_calls + user, thinking)
            except TemplateRefusal:
                continue
            if probe.kind not in orders and (order := probe.order()) is not None:
                orders[probe.kind] = order
    return orders


def _call(index: int) -> ParsedCall:
    return ParsedCall("probe_tool", {"text": f"probe-text-{index}"})


class _Probe:
    """A turn in a short conversation. Raises `TemplateRefusal` if the template rejects it."""

    def __init__(
        self,
        renderer: Renderer,
        before: Sequence[Message],
        said: TurnReading,
        added: Sequence[Message],
        thinking: Thinking | None = None,
    ) -> None:
        self._renderer = renderer
        self._before = before
        self._prompt = renderer.render_text(before, _TOOLS)
        self._marks = renderer.capabilities.thought_marks
        self._prompted = opened_thought(self._prompt, self._marks)
        text = written_turn(
            renderer,
            self._prompt,
            lambda message: renderer.render_text([*before, message], _TOOLS, False),
            said,
        ).text
        self._n_before = sum(len(message.get("tool_calls", ())) for message in before)
        self._turn = self._sampled(text if thinking is None else self._begin(text, thinking))
        reading = self._turn.reading
        names = list(zip(self._turn.call_ids, reading.call_names, strict=True))
        self.following = [
            {**message, "tool_call_id": names[i][0], "name": names[i][1]}
            if message["role"] == "tool" and i < len(names)
            else message
            for i, message in enumerate(added)
        ]
        self.kind = TurnKind.of(reading, before[-1]["role"], added)

    def best_message(self) -> Message | None:
        """The turn in its best form; None if the template rejects all forms."""
        order = self.order()
        if order is None:
            return None
        return order.forms[0].put(self._turn.reading, self._turn.call_ids)

    def order(self) -> FormOrder | None:
        """The best text form and the best structured form; None if the template rejects all.

        Of forms that fit equally well, the one is taken that fits best when white space differs
        from the template's.
        """
        turn, fits = self._turn, dict[TurnForm, Fit]()
        for form, message in candidates(turn.reading, turn.call_ids):
            if (fit := self._fit(turn, form, message)) is not None:
                fits[form] = fit
        if not fits:
            return None
        best: list[TurnForm] = []
        for is_text in (True, False):
            group = {form: fit for form, fit in fits.items() if form.is_text == is_text}
            alike = [form for form, fit in group.items() if fit == min(group.values())]
            if alike:
                best.append(self._sturdiest(alike))
        best.sort(key=lambda form: fits[form])  # stable: text first
        return FormOrder(tuple(best), fits[best[0]])

    def _sturdiest(self, alike: Sequence[TurnForm]) -> TurnForm:
        """Of equally good forms, the one that fits best with different white space."""
        if len(alike) == 1:
            return alike[0]
        untidy = self._sampled(self._untidy())

        def fit(form: TurnForm) -> Fit:
            message = form.put(untidy.reading, untidy.call_ids)
            return (message and self._fit(untidy, form, message)) or max(Fit)

        return min(alike, key=fit)

    def _begin(self, text: str, thinking: Thinking) -> str:
        """The turn's text, changed to begin with `thinking` if it can."""
        lead = self._sampled(text).reading.lead
        if thinking is Thinking.NONE and lead:
            return text[len(lead) :].lstrip()
        if thinking is Thinking.EMPTY and not lead:
            opening = "" if self._prompted else f"{self._marks.open}\n"
            return f"{opening}\n{self._marks.close}\n\n{text}"
        return text

    def _untidy(self) -> str:
        text, lead = self._turn.text, self._turn.reading.lead
        if not lead:
            return f"{text}\n"
        return f"{lead.removesuffix(self._marks.close)} {self._marks.close}{text[len(lead) :]}"

    def _sampled(self, text: str) -> SampledTurn:
        renderer = self._renderer
        reading = renderer.read_turn(text, self._prompted, _TOOLS)
        stop, stop_id = renderer.capabilities.turn_ends[0 if reading.calls else -1]
        names = enumerate(reading.call_names, self._n_before)
        return SampledTurn(
            output_ids=(stop_id,),
            stop_id=stop_id,
            stop_text=stop,
            reading=reading,
            headers=renderer.codec.headers(self._prompt),
            call_ids=tuple(renderer.call_id(name, index) for index, name in names),
            written=text,
        )

    def _fit(self, turn: SampledTurn, form: TurnForm, message: Message) -> Fit | None:
        place = TurnInPlace(
            turn,
            prompt=self._prompt,
            added=self.following,
            read=lambda text: self._renderer.read_turn(text, self._prompted, _TOOLS),
        )
        try:
            text = self._renderer.render_text([*self._before, message, *self.following], _TOOLS)
        except TemplateRefusal:
            return None
        return judge(place, form, message, text).fit
