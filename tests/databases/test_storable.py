"""Whatever is said, the database keeps as much of it as it can, and never refuses it."""

import asyncio
from typing import Any

import bson
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_records import begun, make_turn

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DispatchedSamplingTask, Record, RecordStatus, ToolCall
from agentrl.databases.storable import LARGEST_TURN_BYTES, fault, storable, weight

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats()
    | st.binary(max_size=20)
    | st.text(st.characters(), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(), max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)
HALF = "\ud800"  # a lone surrogate: no UTF-8 can hold it


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(st.characters(), max_size=5), ANYTHING, max_size=5))
def test_what_is_made_storable_is_stored_and_what_was_storable_stays_the_same(
    document: dict[str, Any],
) -> None:

    made = storable(document)
    encoded = bson.encode(made)
    assert len(encoded) <= weight(made) + 16
    assert storable(made).keys() == made.keys()
    try:
        before = bson.encode(document)
    except (OverflowError, UnicodeEncodeError, bson.errors.InvalidDocument):
        return
    assert encoded == before


def test_only_what_cannot_be_stored_is_changed() -> None:
    said = {
        "half": f"a{HALF}b", "pair": "\ud83d\ude00", "big": 2**70, "small": -(2**63),
        "keys": {"a\0b": 1, HALF: 2, 3: 4}, "array": np.int64(7), "real": np.float32(0.5),
        "set": {1}, "nan": float("nan"), "path": object,
    }  # fmt: skip
    made = storable(said)
    assert made["half"] == "a\ufffdb" and made["pair"] == "\U0001f600"
    assert (made["big"], made["small"]) == ("1180591620717411303424", -(2**63))
    assert made["keys"] == {"a\ufffdb": 1, "\ufffd": 2, "3": 4}
    assert (made["array"], made["real"], made["set"]) == (7, 0.5, [1])
    assert made["path"] == "<class 'object'>"


def test_what_is_nested_too_deeply_is_left_out() -> None:
    deep: Any = "core"
    for _ in range(3000):
        deep = [deep]
    made: Any = storable({"deep": deep})["deep"]
    levels = 0
    while isinstance(made, list):
        made, levels = made[0], levels + 1
    assert levels == 89 and made.startswith("[left out")


def test_the_longest_texts_are_cut_alike_and_say_so() -> None:
    document = {"short": "kept whole", "long": ["x" * 50_000, "\u00fc" * 40_000, "y" * 15_000]}
    made = storable(document, largest=60_000)
    assert made["short"] == "kept whole" and weight({"short": "kept whole"}) < 100
    first, second, third = made["long"]
    assert sum(len(text.encode()) for text in made["long"]) <= 60_000
    assert third == "y" * 15_000
    assert abs(len(first) - len(second.encode())) <= 10
    note = f"[cut here: the database keeps {first.count('x')} of 50000 characters]"
    assert first.endswith(note) and first.startswith("x" * 19_000)


def test_what_is_too_large_without_its_texts_is_refused_with_its_size() -> None:
    with pytest.raises(ValueError, match=r"has 1 MB, of which 0 MB are texts that could be cut"):
        storable({"ids": b"x" * 1_000_000, "text": "a"}, largest=500_000)


def test_faults_name_where_they_are() -> None:
    assert fault({"a": [1, {"b": "x\0"}]}, "`own`") is None
    assert fault([2**64], "`own`") == (
        "`own` holds a whole number beyond 64 bits (18446744073709551616): write it as a text"
    )
    assert fault({"a": {"b\0": 1}}, "`own`") == "`own` holds a key with a NUL character ('b\\x00')"


def large_turn(record: Record, text: str) -> DispatchedSamplingTask:
    """170 results of 100,000 characters each."""
    calls = [
        ToolCall(name="read", arguments={"page": number}, result=text * 100_000)
        for number in range(170)
    ]
    return make_turn(record, 0).model_copy(update={"tool_calls": calls})


@pytest.mark.parametrize("text", ["x", "\u65e5"], ids=["ascii", "japanese"])
async def test_a_turn_of_170_long_results_is_stored_cut_and_holds_nothing_up(
    database: RunDatabase, text: str
) -> None:
    ledger, [record] = await begun(database)
    turn = large_turn(record, text)
    rounds, stored_it = 0, asyncio.Event()

    async def other_work() -> None:
        nonlocal rounds
        while not stored_it.is_set():
            await asyncio.sleep(0)
            rounds += 1

    working = asyncio.create_task(other_work())
    await ledger.add_turn(turn)
    stored_it.set()
    await working
    assert rounds > 200, "while it is made storable, the event loop does other work"
    stored = (await ledger.turns([record.id]))[record.id][0]
    assert [call.arguments for call in stored.tool_calls] == [{"page": n} for n in range(170)]
    for call in stored.tool_calls:
        assert call.result is not None and call.result.startswith(text * 7_000)
        assert call.result.endswith("of 100000 characters]")
    assert sum(len((call.result or "").encode()) for call in stored.tool_calls) < LARGEST_TURN_BYTES


async def test_a_record_and_its_turns_that_say_what_no_database_holds_are_stored(
    database: RunDatabase,
) -> None:
    ledger, [record] = await begun(database)
    call = ToolCall(name=f"x{HALF}", arguments={"n": 2**70, "a\0b": HALF}, result=HALF)
    await ledger.add_turn(make_turn(record, 0).model_copy(update={"tool_calls": [call]}))
    record.final_answer = f"so {HALF}"
    record.explanations = {"judge": HALF * 3}
    await ledger.sampled(record.model_copy(update={"status": RecordStatus.SAMPLED}))
    await ledger.finish(record.model_copy(update={"status": RecordStatus.SCORED, "score": 1.0}))
    (turn,) = (await ledger.turns([record.id]))[record.id]
    assert turn.tool_calls[0].arguments == {"n": str(2**70), "a\ufffdb": "\ufffd"}
    stored = Record.from_mongo(await database.records.find_one({"_id": record.id}) or {})
    assert (stored.final_answer, stored.explanations) == ("so \ufffd", {"judge": "\ufffd" * 3})
