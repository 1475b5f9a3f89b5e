"""Slots: prefixes are found, kept and never shared; decoding slots are the first rows."""

from hypothesis import given
from hypothesis import strategies as st

from agentrl.inference.engine.slots import WORTH_WAITING, CacheSlot, SlotTable

PROMPT = list(range(100, 140))


def run_to_end(table: SlotTable, tokens: list[int], output: list[int]) -> CacheSlot:
    placement = table.place(tokens)
    assert placement is not None
    table.computed(placement.slot)
    table.release(placement.slot, tokens + output)
    return placement.slot


def test_the_next_turn_takes_over_the_slot_of_the_last_one() -> None:
    table = SlotTable(4, 100)
    slot = run_to_end(table, PROMPT, [1, 2, 3])
    placement = table.place([*PROMPT, 1, 2, 3, 9, 9])
    assert placement is not None
    assert (placement.slot, placement.cached, placement.copy_from) == (slot, 43, None)


def test_a_sibling_copies_the_prompt_and_leaves_the_other_conversation_its_slot() -> None:
    table = SlotTable(4, 100)
    slot = run_to_end(table, PROMPT, [1, 2, 3])
    placement = table.place(PROMPT)
    assert placement is not None
    assert placement.slot is not slot
    assert (placement.cached, placement.copy_from) == (len(PROMPT) - 1, slot)


def test_a_sibling_waits_for_a_prompt_that_is_being_computed() -> None:
    table = SlotTable(4, 100)
    first = table.place(PROMPT)
    assert first is not None
    assert table.place([*PROMPT, 7]) is None
    assert table.place([*PROMPT[: WORTH_WAITING - 1], 7, 8]) is not None
    table.computed(first.slot)
    second = table.place([*PROMPT, 7])
    assert second is not None and second.cached == len(PROMPT)


def test_the_slot_longest_unused_is_reclaimed_and_empty_ones_before_it() -> None:
    table = SlotTable(3, 100)
    old = run_to_end(table, [1] * 20, [])
    new = run_to_end(table, [2] * 20, [])
    placed = [table.place([value] * 10) for value in (3, 4)]
    assert placed[0] is not None and placed[0].slot not in (old, new)
    assert placed[1] is not None and placed[1].slot is old


def test_cleared_slots_match_nothing() -> None:
    table = SlotTable(2, 100)
    run_to_end(table, PROMPT, [])
    table.clear()
    placement = table.place(PROMPT)
    assert placement is not None and placement.cached == 0


@given(st.data())
def test_after_compaction_the_decoding_slots_are_the_first_rows(data: st.DataObject) -> None:
    table = SlotTable(8, 10)
    content = list(range(8))  # which slot's keys and values lie in each row
    for _ in range(5):
        decoding = data.draw(st.lists(st.sampled_from(table.slots), unique=True))
        swaps = table.compact(decoding)
        rows = [row for pair in swaps for row in pair]
        assert len(set(rows)) == len(rows)
        for a, b in swaps:
            content[a], content[b] = content[b], content[a]
        assert {slot.row for slot in decoding} == set(range(len(decoding)))
        assert all(content[slot.row] == slot.index for slot in table.slots)
