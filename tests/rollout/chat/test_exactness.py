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
    assert sentence.startswith("multi-turn training is exact: in 30 random conversations with ")
    assert "where a user speaks again (" in sentence
    assert "the chat template rewrites the turn" in sentence
    assert "times as many tokens are computed" in sentence
    always = exactness_of("qwen2.5").sentence()
    assert always.endswith("; it always extends what was sampled")


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
