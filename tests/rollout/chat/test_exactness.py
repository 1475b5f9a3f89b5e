"""What `agentrl doctor` says about a model's conversations."""

from functools import cache

import pytest
from families import BY_NAME, FAMILIES, Family, renderer_of, tokenizer_of
from transformers import PreTrainedTokenizerFast

from agentrl.rollout.chat import ChatRenderer
from agentrl.rollout.chat.exactness import Exactness, Situation, check_exactness


@cache
def exactness_of(family: str) -> Exactness:
    return check_exactness(renderer_of(family), conversations=30)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_a_family_drifts_where_it_is_known_to(family: Family) -> None:
    found = exactness_of(family.name)
    assert found.inexact is None and found.refused == 0
    drifts = {situation for situation, n in found.drifts.items() if n}
    assert (
        drifts
        == {
            "all": set(),
            "tools": {Situation.USER},
            "tools without system": {Situation.USER, Situation.RESULTS_AFTER_SYSTEM},
            "none": set(Situation),
        }[family.exact]
    )
    assert found.computed == 1 if family.exact == "all" else found.computed > 1


def test_the_sentence_says_where_a_new_segment_begins_why_and_what_it_costs() -> None:
    sentence = exactness_of("qwen3").sentence()
    assert sentence.startswith("multi-turn conversations break into segments: in 30 random ")
    assert "exact" not in sentence
    assert "where a user speaks again (" in sentence
    assert "the chat template rewrites the turn" in sentence
    assert "times as many tokens are computed" in sentence


def test_only_a_model_whose_conversations_always_extend_is_called_exact() -> None:
    for family in FAMILIES:
        found = exactness_of(family.name)
        assert found.exact == (family.exact == "all")
        assert ("is exact: " in found.sentence()) == found.exact
    always = exactness_of("qwen2.5").sentence()
    assert always.startswith("multi-turn training is exact: in 30 random conversations with ")
    assert always.endswith("; it always extends what was sampled")


def test_turns_with_two_calls_are_tried_or_it_is_said_why_not() -> None:
    assert exactness_of("qwen2.5").continuations[Situation.TWO_RESULTS] > 0
    llama = exactness_of("llama3.1")
    assert llama.continuations[Situation.TWO_RESULTS] == 0
    assert "no turn with two calls was tried: " in llama.sentence()
    assert "This model only supports single tool-calls at once!" in llama.sentence()
    assert "of two calls the chat template writes the first" in exactness_of("gpt-oss").sentence()


RESULT = "'<tool_response>\\n' + message.content + '\\n</tool_response>\\n'"


def changed(family: str, old: str, new: str) -> ChatRenderer:
    """A family's renderer, with a change to its template."""
    known = tokenizer_of(family)
    template = BY_NAME[family].template.read_text(encoding="utf-8")
    assert old in template
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=known.backend_tokenizer, eos_token=known.eos_token
    )
    tokenizer.chat_template = template.replace(old, new)
    return ChatRenderer(tokenizer)


def test_results_that_vanish_from_the_prompt_are_said_in_these_words() -> None:
    first_only = "(message.content if loop.previtem.role != 'tool' else '(as before)')"
    renderer = changed("qwen3-coder", RESULT, RESULT.replace("message.content", first_only))
    found = check_exactness(renderer, conversations=20)
    assert found.faulty and not found.exact
    assert found.lost[Situation.TWO_RESULTS] > 0 and found.lost[Situation.RESULTS] == 0
    assert found.sentence().startswith(
        "multi-turn training is not exact: results vanish from the prompt where tools answer two "
        "calls of one turn ("
    )


def test_content_is_compared_as_well_as_tokens() -> None:
    # The tokens are the template's all along, but a result stands in them twice.
    twice = RESULT.replace("message.content", "message.content + message.content")
    found = check_exactness(changed("qwen3-coder", RESULT, twice), conversations=6)
    assert found.faulty
    assert found.inexact == "what follows a turn stands in the next prompt more than once"


def test_calls_that_are_not_read_back_are_a_fault() -> None:
    renderer = changed("qwen3-coder", "<function=", "<fn=")
    assert renderer.parser_choice.unread
    assert "<fn=probe_tool>" in renderer.parser_choice.sentence
    assert not check_exactness(renderer, conversations=6).faulty  # its sentence is the parser's


def test_a_template_whose_text_depends_on_when_it_is_applied_drifts_everywhere() -> None:
    family = BY_NAME["qwen2.5"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of(family.name).backend_tokenizer, eos_token="<|im_end|>"
    )
    tokenizer.chat_template = family.template.read_text(encoding="utf-8").replace(
        "{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant ' + strftime_now('%f') }}"
    )
    found = check_exactness(ChatRenderer(tokenizer), conversations=6)
    assert found.drifts == found.continuations
