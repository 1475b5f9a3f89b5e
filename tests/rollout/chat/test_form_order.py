"""How often a conversation is rendered after a turn; and what a kind of turn is put in."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from conversations import TOOLS, hold, make_talk
from families import FAMILIES, Family, renderer_of

from agentrl.rollout.chat import ChatRenderer, Conversation, Message
from agentrl.rollout.chat.form_choice import Fit
from agentrl.rollout.chat.form_order import Thinking, TurnKind


class Counted:
    """Counts how often a renderer applies its template, and to how many characters."""

    def __init__(self, renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_renders = self.n_characters = 0
        apply = renderer._apply

        def counting(messages: Sequence[Message], *given: Any, **named: Any) -> str:
            self.n_renders += 1
            text = apply(messages, *given, **named)
            self.n_characters += len(text)
            return text

        monkeypatch.setattr(renderer, "_apply", counting)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_a_turn_renders_the_conversation_twice_at_most(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = renderer_of(family.name)
    talks = [make_talk(random.Random(seed), family) for seed in range(12)]
    for talk in talks:  # the first prompts, which are kept
        Conversation(renderer, talk.begin, TOOLS)
    count = Counted(renderer, monkeypatch)
    extend, each = Conversation.extend, []

    def counted(self: Conversation, *given: Any) -> Any:
        before = count.n_renders
        next_prompt = extend(self, *given)
        each.append(count.n_renders - before)
        return next_prompt

    monkeypatch.setattr(Conversation, "extend", counted)
    for talk in talks:
        hold(family, talk)
    assert each and set(each) <= {1, 2}


def call_of(family: str) -> str:
    calls = {
        "gemma4": '<|tool_call>call:weight{count:1,text:<|"|>a<|"|>}<tool_call|><|tool_response>',
        "qwen2.5": '<tool_call>\n{"name": "weight", "arguments": {"text": "a", "count": 1}}\n'
        "</tool_call><|im_end|>",
        "qwen3-nothink": '<tool_call>\n{"name": "weight", "arguments": {"text": "a", "count": 1}}\n'
        "</tool_call><|im_end|>",
    }
    return calls[family]


@pytest.mark.parametrize("family", ["gemma4", "qwen2.5", "qwen3-nothink"])
def test_many_turns_cost_no_more_than_twice_the_template_s_own_rendering(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 4's template looks back at every message from every message; Qwen 3's drifts here."""
    renderer = renderer_of(family)
    conversation = Conversation(renderer, [{"role": "user", "content": "?"}], TOOLS)
    count = Counted(renderer, monkeypatch)
    output = renderer.encode_inside(call_of(family))
    own = 0  # characters of the prompts, which any way of making them has to render
    for _ in range(30):
        conversation.extend(output, [{"role": "tool", "content": "7 kg"}])
        own += conversation.n_characters
    assert count.n_renders == 30  # these turns are as the models write them
    assert count.n_characters <= 2 * own


def kind(**values: Any) -> TurnKind:
    given = {"thinks": Thinking.NONE, "speaks": False, "n_calls": 1, "after_results": False,
             "before_user": False, **values}  # fmt: skip
    return TurnKind(**given)


def test_the_forms_of_a_kind_of_turn_are_those_that_came_out_best() -> None:
    plain = renderer_of("qwen2.5").form_orders[kind()]
    assert [form.name for form in plain.forms] == ["content", "fields"]
    assert plain.expected is Fit.AS_GENERATED
    # Gemma 4 writes results only after calls that it knows.
    gemma = renderer_of("gemma4").form_orders
    assert [form.name for form in gemma[kind()].forms] == ["fields", "content"]
    assert [form.name for form in gemma[kind(speaks=True)].forms] == ["fields", "content"]
    # Qwen 3 drops a thought when a user speaks: all forms drift, and nothing more is expected.
    dropped = kind(thinks=Thinking.THOUGHT, speaks=True, n_calls=0, before_user=True)
    assert renderer_of("qwen3").form_orders[dropped].expected is Fit.DRIFT
