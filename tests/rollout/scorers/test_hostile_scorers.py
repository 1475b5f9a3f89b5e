"""Scorers that do what a scorer should not, written from the guide as a user would."""

import asyncio
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from scoring import make_record, make_task

from agentrl import Score, register_scorer
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Record
from agentrl.databases.records import RecordLedger
from agentrl.rollout.scorers import Scorers
from agentrl.rollout.scorers.results import KEPT_CHARACTERS


class Unspeakable:
    """Neither its repr nor its text can be had."""

    def __repr__(self) -> NoReturn:
        raise LookupError("no words")

    __str__ = __repr__


async def score_by(scorers: Scorers, function: Callable[..., Any], **values: Any) -> Record:
    register_scorer("hostile", function)
    return await scorers.score(make_task("hostile", answer="4"), make_record("4", **values))


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        (np.float32(0.5), 0.5), (np.float64(0.25), 0.25), (np.int64(1), 1.0), (np.bool_(True), 1.0),
        (np.array(0.5), 0.5), (np.array([0.5]), 0.5), (torch.tensor(0.5), 0.5),
        (torch.tensor([[1.0]], requires_grad=True), 1.0), (torch.tensor(True), 1.0),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5), (True, 1.0), (False, 0.0), (2, 2.0),
        (Fraction(1, 4), 0.25), (Decimal("0.5"), 0.5), (Score(np.float16(0.5)), 0.5),  # type: ignore[arg-type]
        (-0.0, 0.0), (None, None), (Score(None, "unknown"), None),
    ],
)  # fmt: skip
async def test_a_number_of_any_library_is_a_score(
    scorers: Scorers, returned: Any, score: float | None
) -> None:
    record = await score_by(scorers, lambda model_answer: returned)
    assert record.score == score
    assert record.score is None or type(record.score) is float


@pytest.mark.parametrize(
    "returned",
    [
        float("nan"), float("inf"), -float("inf"), np.float32("nan"), torch.tensor(float("inf")),
        Score(float("nan")), "0.5", b"1", [0.5], (1.0,), {"score": 1.0}, {1.0}, 1 + 2j, 10**400,
        np.array([0.5, 0.5]), np.array([]), torch.ones(3), np.array("0.5"), np.complex64(1),
        Decimal("NaN"), object(), Unspeakable(), len, ValueError("returned, not raised"),
        (x for x in ()), "0" * 10**6, list(range(10**5)),
    ],
)  # fmt: skip
async def test_what_is_no_finite_number_is_the_scorers_error_in_one_short_line(
    scorers: Scorers, returned: Any
) -> None:
    with pytest.raises(
        ValueError, match=r"scorer 'hostile' returned .*not a finite number"
    ) as said:
        await score_by(scorers, lambda model_answer: returned)
    assert len(str(said.value)) < 300
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("raised", [
    SystemExit(3), KeyboardInterrupt(), GeneratorExit(), StopIteration(1), asyncio.CancelledError(),
], ids=repr)  # fmt: skip
@pytest.mark.parametrize("awaited", [False, True], ids=["plain", "async"])
async def test_what_would_end_more_than_the_scoring_is_its_error(
    scorers: Scorers, raised: BaseException, awaited: bool
) -> None:
    def plain(model_answer: str) -> float:
        raise raised

    async def waits(model_answer: str) -> float:
        raise raised

    with pytest.raises(RuntimeError, match=r"hostile|coroutine raised StopIteration"):
        await asyncio.wait_for(score_by(scorers, waits if awaited else plain), 10)
    assert (await scorers.score(make_task("f1", answer="4"), make_record("4"))).score == 1.0


@pytest.mark.parametrize(
    "explanation",
    [
        "x" * 50_000_000, "\ud800 alone", "a\x00b", "\udfff" * 100_000, b"bytes \xff", {"a": 1}, 7,
        Unspeakable(), ["\ud800"], "\U0001f600" * 20_000,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
async def test_an_explanation_of_any_size_and_content_is_stored(
    scorers: Scorers, records: RecordLedger, database: RunDatabase, explanation: Any
) -> None:
    record = await score_by(scorers, lambda model_answer: Score(0.5, explanation))
    await database.records.insert_one(record.to_mongo())
    stored = await database.records.find_one({"_id": record.id})
    assert stored is not None
    kept = stored["explanations"]["hostile"]
    assert kept
    assert len(kept) <= 6 * KEPT_CHARACTERS + 100  # a surrogate is written as \\udfff
    if isinstance(explanation, str) and len(explanation) > KEPT_CHARACTERS:
        assert "characters left out" in kept


async def test_a_scorer_changes_nothing_of_what_is_stored(scorers: Scorers) -> None:
    def thief(record: Record, task: Any, messages: list[Any]) -> float:
        record.final_answer, record.scores["f1"], task.answer = "4", 99.0, "5"
        messages.clear()
        return 1.0

    register_scorer("thief", thief)
    task = make_task("thief + exact_match", answer="4")
    scored = await scorers.score(task, make_record("5"))
    assert (scored.final_answer, scored.scores) == ("5", {"thief": 1.0, "exact_match": 0.0})
    assert task.answer == "4"


async def test_scorers_that_wait_do_so_at_once_and_one_that_hangs_keeps_no_other_waiting(
    scorers: Scorers,
) -> None:
    def waits(model_answer: str) -> float:
        time.sleep(3600 if model_answer == "for ever" else 0.5)
        return 1.0

    register_scorer("waits", waits)
    hanging = asyncio.create_task(scorers.score(make_task("waits"), make_record("for ever")))
    began = time.monotonic()
    await asyncio.gather(
        *(scorers.score(make_task("waits"), make_record(str(n))) for n in range(40)),
        asyncio.to_thread(time.sleep, 0.1),
    )
    assert time.monotonic() - began < 10  # one after the other: 20 s
    assert not hanging.done()
    hanging.cancel()


def test_a_process_ends_though_a_scorer_never_does(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import asyncio, time
        from agentrl.rollout.scorers.functions import Scorer

        def hangs(model_answer):
            time.sleep(3600)

        async def main():
            scorer = Scorer.of("hangs", hangs)
            try:
                await asyncio.wait_for(scorer.threads.run(lambda: hangs("")), 0.2)
            except TimeoutError:
                print("timed out")

        asyncio.run(main())
    """)
    )
    ended = subprocess.run([sys.executable, program], capture_output=True, timeout=60, text=True)
    assert (ended.returncode, ended.stdout) == (0, "timed out\n")


@pytest.mark.parametrize(
    "returned",
    [
        np.array([0.5, 1.0]), torch.tensor([0.5, 1.0]), (0.5, True), [np.float32(0.5), Score(1.0)],
        [torch.tensor(0.5), Decimal(1)],
    ],
)  # fmt: skip
async def test_a_group_may_be_scored_by_an_array(scorers: Scorers, returned: Any) -> None:
    register_scorer("hostile_group", lambda records: returned)
    group = [make_record(), make_record(rollout=1)]
    said = await scorers.score_group(make_task("hostile_group"), group)
    assert [of.score for of in said] == [0.5, 1.0]


@pytest.mark.parametrize(
    "returned",
    [
        1.0, None, "ab", b"ab", {"a": 1.0, "b": 2.0}, [1.0], np.ones(3), np.float32(1),
        (x for x in (1.0, 2.0)), Unspeakable(), [0.5, float("nan")], ["a", "b"], np.ones((2, 2)),
    ],
)  # fmt: skip
async def test_what_does_not_score_each_of_a_group_is_the_scorers_error(
    scorers: Scorers, returned: Any
) -> None:
    register_scorer("hostile_group", lambda records: returned)
    group = [make_record(), make_record(rollout=1)]
    with pytest.raises(ValueError, match=r"scorer 'hostile_group' returned"):
        await scorers.score_group(make_task("hostile_group"), group)
