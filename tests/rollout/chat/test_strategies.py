"""What rewriting keeps of the tokens, in every model family that holds tools' results exactly."""

import random
from collections.abc import Sequence

import pytest
from conversations import Exchange, Held, Talk, hold, make_talk
from families import FAMILIES, Family

from agentrl.rollout.agents.context_strategies import (
    DISCARDED,
    SUMMARY_REQUEST,
    TAKEN_OUT,
    ask_for_summary,
    discard_results,
    last_turn,
    restart,
    take_out_last_turn,
)
from agentrl.rollout.chat import Entry

exact_families = pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family.exact in ("all", "tools")], ids=str
)
RESULT = "a long result, longer than the note that stands in its place " * 2


def hold_three_turns(family: Family) -> Held:
    """A conversation of three turns with calls, each answered with long results."""
    source = random.Random(7)
    exchanges: list[Exchange] = []
    while len(exchanges) < 3:
        for exchange in make_talk(source, family).exchanges:
            if exchange.said.calls and len(exchanges) < 3:
                texts = [f"{RESULT} {len(exchanges)}.{n}" for n in range(len(exchange.said.calls))]
                results = tuple({"role": "tool", "content": text} for text in texts)
                exchanges.append(Exchange(exchange.said, results))
    held = hold(family, Talk(({"role": "user", "content": "How many?"},), tuple(exchanges)))
    assert held.drifts == 0
    return held


def end_of_turn(held: Held, number: int) -> int:
    """Tokens up to the end of a turn."""
    entry = [entry for entry in held.conversation.entries if entry.output_ids][number]
    before = held.prompts[number - 1] if number else held.conversation.prompt_ids
    return len(before) + len(entry.output_ids)


def common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


@exact_families
def test_discarding_results_leaves_all_turns_as_they_were_generated(family: Family) -> None:
    held = hold_three_turns(family)
    entries = held.conversation.entries
    rewritten = discard_results(entries)
    assert rewritten[last_turn(entries) :] == list(entries[last_turn(entries) :])
    discarded = [entry for entry in rewritten if entry.message["content"] == DISCARDED]
    assert len(discarded) == sum(
        entry.message["role"] == "tool" for entry in entries[: last_turn(entries)]
    )
    next_prompt = held.conversation.rewrite(rewritten)
    assert next_prompt.n_rewritten == 0
    assert common(next_prompt.ids, held.ids) >= end_of_turn(held, 0)
    assert len(next_prompt.ids) < len(held.ids)


@exact_families
@pytest.mark.parametrize("rewrite", [ask_for_summary, take_out_last_turn])
def test_what_is_said_to_the_model_leaves_all_before_it_as_it_was(
    family: Family, rewrite: object
) -> None:
    assert callable(rewrite)
    held = hold_three_turns(family)
    next_prompt = held.conversation.rewrite(rewrite(held.conversation.entries))
    assert next_prompt.n_rewritten == 0
    assert common(next_prompt.ids, held.ids) > end_of_turn(held, 1)
    note = SUMMARY_REQUEST if rewrite is ask_for_summary else TAKEN_OUT
    [*_, told] = held.conversation.entries
    assert told.message["content"].endswith(note) and RESULT in told.message["content"]


@exact_families
def test_a_conversation_begun_again_keeps_its_last_turn_as_it_was_generated(
    family: Family,
) -> None:
    held = hold_three_turns(family)
    entries = held.conversation.entries
    restarted = restart([entries[0].message], "I found much.", entries)
    next_prompt = held.conversation.rewrite(restarted)
    # These templates write a header after a question, but none after the results of tools.
    headless = ("deepseekv3", "gemma4", "gemma4-v3", "gemma4-v4", "gemma4-v5")
    assert next_prompt.n_rewritten == (family.name in headless)
    [question, turn, *results] = held.conversation.entries
    assert question.message["content"].startswith("How many?")
    assert question.message["content"].endswith("I found much.")
    assert (turn, results) == (entries[last_turn(entries)], list(entries[last_turn(entries) + 1 :]))


def test_there_is_nothing_to_sum_up_before_the_first_turn() -> None:
    turn = Entry({"role": "assistant", "content": "look"}, (5, 6))
    question, result = (
        Entry({"role": "user", "content": "q"}),
        Entry({"role": "tool", "content": ""}),
    )
    assert ask_for_summary([question, turn, result]) is None
    assert ask_for_summary([question, turn, result, turn, result]) is not None
