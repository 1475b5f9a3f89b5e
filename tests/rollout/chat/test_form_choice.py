"""Which form of a turn is taken, of renderings that are written out; no tokenizer, no template."""

from collections.abc import Callable

import pytest

from agentrl.rollout.chat import TemplateRefusal
from agentrl.rollout.chat.form_choice import Drift, Fit, Rendering, TurnInPlace, choose_form
from agentrl.rollout.chat.forms import CANDIDATE_FORMS, candidates
from agentrl.rollout.chat.sampled_ids import Place, find_turn
from agentrl.rollout.chat.turns import Message, SampledTurn, ThoughtMarks, TurnReading, read_turn
from agentrl.rollout.tool_calls import ParsedCall, ParsedTurn

PROMPT = "<user>How heavy?<bot>"
TEXT = "hm</think> weight(7)"
ADDED: Message = {"role": "tool", "content": "7 kg"}


def parse(text: str, tools: object = ()) -> ParsedTurn:
    """Calls are words with brackets."""
    words = text.split()
    calls = tuple(ParsedCall(word[:-3], {"n": word[-2]}) for word in words if word.endswith(")"))
    return ParsedTurn(" ".join(word for word in words if not word.endswith(")")), calls)


def read(text: str) -> TurnReading:
    return read_turn(text, "", ThoughtMarks("<think>", "</think>"), parse)


def turn_of(text: str, stop: str = "<end>") -> SampledTurn:
    ids = (10, 11, 12)
    return SampledTurn(
        output_ids=(*ids, 2) if stop else ids,
        stop_id=2 if stop else None,
        stop_text=stop,
        reading=read(text),
        headers=("<bot>",),
        call_ids=("call00000",) if read(text).calls else (),
        written=text,
    )


def choose(
    render: Callable[[str], str],
    text: str = TEXT,
    forms: tuple[str, ...] = ("content", "fields"),
    expected: Fit = Fit.AS_GENERATED,
) -> tuple[Rendering, list[str]]:
    """The rendering that is taken if the template makes this of each form, and the forms tried."""
    by_name = {form.name: form for form in CANDIDATE_FORMS}
    turn = turn_of(text)
    messages = {form.name: message for form, message in candidates(turn.reading, turn.call_ids)}
    tried: list[str] = []

    def rendered(message: Message) -> str:
        tried.append(next(name for name, given in messages.items() if given == message))
        return render(tried[-1])

    order = [by_name[name] for name in forms]
    return choose_form(TurnInPlace(turn, PROMPT, [ADDED], read), order, expected, rendered), tried


def written(turn: str, added: str = "7 kg") -> str:
    return f"{PROMPT}{turn}<end><tool>{added}<bot>"


def test_the_first_form_that_comes_out_as_generated_ends_the_search() -> None:
    chosen, tried = choose(lambda form: written(TEXT if form == "content" else "hm"))
    assert tried == ["content"]
    assert chosen.fit is Fit.AS_GENERATED and chosen.drift is None
    assert (chosen.written, chosen.delta) == (TEXT, "<tool>7 kg<bot>")
    chosen, tried = choose(lambda form: written(TEXT if form == "fields" else "hm"))
    assert tried == ["content", "fields"] and chosen.fit is Fit.AS_GENERATED


def test_of_six_forms_two_are_rendered_and_one_if_the_first_fits_as_well_as_expected() -> None:
    chosen, tried = choose(lambda form: written("other"), forms=("fields", "content"))
    assert tried == ["fields", "content"]
    assert chosen.message["content"] != TEXT  # of forms that drift alike, the first that is tried
    chosen, tried = choose(lambda form: written("other"), expected=Fit.DRIFT)
    assert tried == ["content"] and chosen.fit is Fit.DRIFT


def test_the_same_in_other_characters_is_taken_from_fields_before_content() -> None:
    chosen, tried = choose(lambda form: written("hm</think>  weight(7)"))
    assert tried == ["content", "fields"]
    assert chosen.fit is Fit.RESTYLED_FIELDS and "tool_calls" in chosen.message
    chosen, _ = choose(lambda form: written(f" {TEXT}" if form == "content" else "other"))
    assert chosen.fit is Fit.RESTYLED_TEXT and chosen.written == f" {TEXT}"


def test_where_both_forms_drift_one_that_keeps_the_turn_is_taken_then_the_first() -> None:
    moved = f"<system>rules{PROMPT}{TEXT}<end><tool>7 kg<bot>"
    chosen, _ = choose(
        lambda form: moved if "inline" in form else written("other"),
        forms=("content", "inline thought"),
    )
    assert chosen.fit is Fit.DRIFT_KEEPS_TURN and chosen.drift is Drift.EARLIER_REWRITTEN
    chosen, _ = choose(lambda form: written("other"))
    assert chosen.fit is Fit.DRIFT and chosen.drift is Drift.TURN_REWRITTEN
    assert chosen.message["content"] == TEXT


def test_what_was_added_counts_for_more_than_the_turn() -> None:
    hides = written(TEXT, added="")
    chosen, _ = choose(lambda form: hides if form == "content" else written("other"))
    assert chosen.drift is Drift.TURN_REWRITTEN
    chosen, _ = choose(lambda form: hides)
    assert chosen.fit is Fit.ADDED_LOST_KEEPS_TURN and chosen.drift is Drift.ADDED_UNWRITTEN


def test_refused_forms_are_passed_over_and_the_first_refusal_is_told_if_all_are() -> None:
    def refuse(form: str) -> str:
        raise TemplateRefusal(form)

    chosen, _ = choose(lambda form: refuse(form) if form == "content" else written(TEXT))
    assert chosen.fit is Fit.AS_GENERATED and "tool_calls" in chosen.message
    # Where both are refused, another form is better than no next turn.
    chosen, tried = choose(lambda form: written(TEXT) if "inline" in form else refuse(form))
    assert tried == ["content", "fields", "fields, JSON arguments", "inline thought"]
    assert chosen.fit is Fit.AS_GENERATED
    with pytest.raises(TemplateRefusal, match=r"^content$"):
        choose(refuse)


def test_a_form_whose_message_was_tried_is_not_tried_again() -> None:
    _, tried = choose(lambda form: written("other"), text="no thought and no call")
    assert tried == ["content"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<bot>one<end> <bot>one<end>", Place(5, 13, (10, 11, 12, 2))),
        ("<bot>one", Place(5, 8, (10, 11, 12))),  # nothing follows it: not ended
        ("<bot>one, <bot>one<end>", Place(15, 23, (10, 11, 12, 2))),
        ("<user>one<end>", None),
    ],
)
def test_a_turn_is_found_where_its_header_and_text_stand(text: str, found: Place | None) -> None:
    assert find_turn(turn_of("one"), text, 0) == found
    assert find_turn(turn_of("one"), "<bot>one" + text, 8) == (
        found and Place(found.start + 8, found.end + 8, found.ids)
    )
