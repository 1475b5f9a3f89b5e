"""Chooses the form in which a generated turn is passed to the chat template.

    for each of two forms   render the conversation with the turn in this form
                            split the text at the turn: the turn's text, and what follows
                            judge: is the turn as generated, and are all added messages there?
    then                    take the first form that fits as well as expected, else the best `Fit`

`forms.py` defines the forms; `form_order.py` chooses the two. Rendering is a function argument:
nothing here depends on a template.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum, auto

from agentrl.rollout.chat.capabilities import TemplateRefusal
from agentrl.rollout.chat.forms import TurnForm, candidates
from agentrl.rollout.chat.sampled_ids import find_turn
from agentrl.rollout.chat.turns import Message, SampledTurn, TurnReading


class Drift(StrEnum):
    """Why a conversation cannot be extended by appending tokens."""

    EARLIER_REWRITTEN = "the chat template rewrites what stood before the turn"
    TURN_REWRITTEN = "the chat template rewrites the turn"
    OTHER_END = "the turn ends otherwise than the chat template ends it"
    ADDED_UNWRITTEN = "the chat template does not write what was added"


class Fit(IntEnum):
    """How well a form of a turn fits, best first.

    The first three extend the conversation. With the others it drifts into a new segment.
    """

    AS_GENERATED = auto()  # the template writes exactly the generated text
    RESTYLED_FIELDS = auto()  # other characters with the same meaning
    RESTYLED_TEXT = auto()  # the same, but the template does not know the calls
    DRIFT_KEEPS_TURN = auto()  # the new segment contains the turn as generated
    DRIFT = auto()  # the new segment contains the turn as the template rewrites it
    ADDED_LOST_KEEPS_TURN = auto()  # added messages are missing; the turn is as generated
    ADDED_LOST = auto()  # added messages are missing


@dataclass(frozen=True, slots=True)
class TurnInPlace:
    """A generated turn between its prompt and what follows it.

    prompt: the text that it was generated from
    added: the escaped messages that follow it
    read: reads a text in the turn's place
    """

    turn: SampledTurn
    prompt: str
    added: Sequence[Message]
    read: Callable[[str], TurnReading]


@dataclass(frozen=True, slots=True)
class Rendering:
    """A conversation rendered with a turn in one form.

    message: the turn in that form
    text: the whole conversation, up to the header of the next turn
    fit: how well the form fits
    written, delta: the text of the turn without its stop token, and of what follows; both are
        empty if the turn was not found
    drift: why the conversation is not extended; None if it is
    """

    message: Message
    text: str
    fit: Fit
    written: str = ""
    delta: str = ""
    drift: Drift | None = None


def choose_form(
    place: TurnInPlace,
    forms: Sequence[TurnForm],
    expected: Fit,
    render: Callable[[Message], str],
) -> Rendering:
    """The first form that fits at least as well as `expected`, else the best one.

    `render`: renders the whole conversation with this message as the turn. Forms that it rejects
    are skipped. If it rejects all of `forms`, the first other form that it accepts is taken. Raises
    the first `TemplateRefusal` if there is none.
    """
    renderings: list[Rendering] = []
    refusals: list[TemplateRefusal] = []
    for form, message in candidates(place.turn.reading, place.turn.call_ids, forms):
        if renderings and form not in forms:
            break
        try:
            text = render(message)
        except TemplateRefusal as refusal:
            refusals.append(refusal)
            continue
        rendering = judge(place, form, message, text)
        if rendering.fit <= expected:
            return rendering
        renderings.append(rendering)
    if not renderings:
        raise refusals[0]  # not empty: every turn has a form as content
    # Of equal ones the first: the probe found it better, and blank results do not show which is.
    return min(renderings, key=lambda rendering: rendering.fit)


def judge(place: TurnInPlace, form: TurnForm, message: Message, text: str) -> Rendering:
    """Judge the rendered `text` of a conversation with the turn in `form`."""
    turn = place.turn
    cut = cut_at_turn(text, place.prompt, turn)
    if isinstance(cut, Drift):
        keeps = find_turn(turn, text, 0) is not None
        if all(stands_more_often(added, text, place.prompt) for added in place.added):
            fit = Fit.DRIFT_KEEPS_TURN if keeps else Fit.DRIFT
        else:
            fit = Fit.ADDED_LOST_KEEPS_TURN if keeps else Fit.ADDED_LOST
        return Rendering(message, text, fit, drift=cut)
    written, delta = cut
    exact = written == turn.text
    drift = None
    if not exact and not place.read(written).says_the_same(turn.reading):
        fit, drift = Fit.DRIFT, Drift.TURN_REWRITTEN
    elif not all(shows(delta, added) for added in place.added):
        fit = Fit.ADDED_LOST_KEEPS_TURN if exact else Fit.ADDED_LOST
        drift = Drift.ADDED_UNWRITTEN
    elif exact:
        fit = Fit.AS_GENERATED
    else:
        fit = Fit.RESTYLED_TEXT if form.is_text else Fit.RESTYLED_FIELDS
    return Rendering(message, text, fit, written, delta, drift)


def cut_at_turn(text: str, prompt: str, turn: SampledTurn) -> tuple[str, str] | Drift:
    """The text in the turn's place after its prompt, and the text after its stop token.

    A truncated turn has no stop token; the text must then contain it as it was generated. Returns a
    `Drift` if the text cannot be split.
    """
    if not text.startswith(prompt):
        return Drift.EARLIER_REWRITTEN
    rest = text[len(prompt) :]
    if turn.stop_id is None:
        goes_on = rest.startswith(turn.text)
        return (turn.text, rest[len(turn.text) :]) if goes_on else Drift.TURN_REWRITTEN
    written, stop, delta = rest.partition(turn.stop_text)
    return (written, delta) if stop else Drift.OTHER_END


def stands_more_often(message: Message, text: str, prompt: str) -> bool:
    """Whether a text contains the message's content more often than the earlier prompt does."""
    content = message["content"]
    if not isinstance(content, str) or not (content := content.strip()):
        return True
    in_json = json.dumps(content, ensure_ascii=False)[1:-1]
    return any(text.count(form) > prompt.count(form) for form in (content, in_json))


def shows(text: str, message: Message) -> bool:
    """Whether a text contains the message's content, plain or as a JSON string."""
    content = message["content"]
    if not isinstance(content, str):
        return True
    content = content.strip()
    return content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text
