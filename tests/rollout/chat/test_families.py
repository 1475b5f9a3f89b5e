"""Properties of every model family: growing turn by turn, against the template on the whole."""

import random

import pytest
from conversations import Exchange, Talk, fault_of, hold, hostile_text, make_talk
from families import FAMILIES, Family, Said
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.rollout.chat import Message
from agentrl.rollout.tool_calls import ParsedCall

quick = settings(
    max_examples=settings.default.max_examples // 5,
    suppress_health_check=[HealthCheck.differing_executors],
)
each_family = pytest.mark.parametrize("family", FAMILIES, ids=str)
sources = st.randoms(use_true_random=False)


def without_users(talk: Talk) -> Talk:
    """The conversation up to where a user would speak again, without a system message."""
    exchanges = []
    for exchange in talk.exchanges:
        results = tuple(message for message in exchange.added if message["role"] == "tool")
        if not results:
            break
        exchanges.append(Exchange(exchange.said, results))
    return Talk(talk.begin[-1:], tuple(exchanges))


@each_family
@quick
@given(source=sources)
def test_the_tokens_are_those_of_the_template_applied_to_the_whole_conversation(
    family: Family, source: random.Random
) -> None:
    talk = make_talk(source, family)
    assert fault_of(family, talk, hold(family, talk)) is None


# Mistral's template rejects a user's words after results.
CALLING = [f for f in FAMILIES if f.calls and f.structured and f.name != "mistral"]


@pytest.mark.parametrize("family", CALLING, ids=str)
def test_blank_results_before_a_users_words_stay_in_the_prompt(family: Family) -> None:
    """Every text contains a blank result, so the search for it shows nothing."""

    def calling(thought: str, result: str, *more: Message) -> Exchange:
        call = ParsedCall("weight", {"text": "a", "count": 1})
        said = Said(thought=thought, content="", calls=(call,))
        return Exchange(said, ({"role": "tool", "content": result}, *more))

    user = {"role": "user", "content": "?"}
    first = calling("a" if family.thoughts else "", "7")  # its thought goes when the user speaks
    talk = Talk((user,), (first, calling("", "8"), calling("", "", user)))
    assert fault_of(family, talk, hold(family, talk)) is None


@each_family
@quick
@given(source=sources)
def test_results_of_tools_extend_what_was_sampled_wherever_the_family_says_so(
    family: Family, source: random.Random
) -> None:
    held = hold(family, without_users(make_talk(source, family)))
    if family.exact != "none":
        assert held.drifts == 0
        assert all(next_prompt.extends for next_prompt in held.next_prompts)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.exact != "all"], ids=str)
def test_a_family_that_is_said_to_drift_does(family: Family) -> None:
    talks = [make_talk(random.Random(seed), family) for seed in range(20)]
    if family.exact == "none":
        talks = [without_users(talk) for talk in talks]
    assert any(hold(family, talk).drifts for talk in talks)


@each_family
@quick
@given(source=sources)
def test_text_from_tools_and_users_never_becomes_a_control_token(
    family: Family, source: random.Random
) -> None:
    talk = make_talk(source, family, hostile_text(family))
    assert fault_of(family, talk, hold(family, talk)) is None
