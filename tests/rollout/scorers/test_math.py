"""The scorer `math`: which answers are equal, and the processes in which they are compared."""

import asyncio
import os
import re
import signal
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from math_pairs import MATH
from more_math_pairs import MORE, READABLE
from scoring import make_record, make_task

from agentrl.mathematics.equality import is_equal, is_readable, read_ground_truth
from agentrl.mathematics.notation import canonical
from agentrl.mathematics.plain_forms import is_plain
from agentrl.mathematics.quantities import has_words
from agentrl.mathematics.reading import read
from agentrl.rollout.scorers import Scorers
from agentrl.rollout.scorers.math_verifier import MathVerifier

TOWER = "9^{9^{9^{9}}}"
CENTRAL = r"\binom{10000000}{5000000}"  # one operation of a library, which no signal interrupts
HARD = r"\sum_{k=1}^{10000000} \frac{\sin k}{k^{3}+1}"  # minutes


def test_every_pair_of_the_table_is_told_rightly() -> None:
    assert len(MATH) >= 200
    wrong = [
        pair
        for pair in MATH
        if is_equal(pair[0], pair[1], pair[3] if len(pair) > 3 else "") is not pair[2]
    ]
    assert not wrong


@pytest.mark.slow
def test_every_pair_of_the_second_table_is_told_rightly() -> None:
    assert not [pair for pair in MORE if is_equal(pair[0], pair[1]) is not pair[2]]


@pytest.mark.slow
def test_ground_truths_of_public_data_sets_are_read_and_equal_themselves() -> None:
    assert not [text for text in READABLE if not is_equal(text, text)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        r"\frac{1}{",
        "x^{",
        "?",
        "\u2014",
        r"\boxed{}",
        "see the worked solution further below",
    ],
)
def test_a_ground_truth_that_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="is no mathematics"):
        read_ground_truth(text)
    assert not is_readable(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72", "72"),
        ("We have $x=3$, so the answer is $\\boxed{\\frac{3}{4}}$.", "3/4"),
    ],
)
def test_a_ground_truth_may_be_the_whole_solution(text: str, value: str) -> None:
    assert is_equal(text, value)


PLAIN = [
    *"123xyn(){}^!+-/ .", "{2}", r"\frac{1}{x}", r"\sqrt", r"\pi", r"\sin", r"\cdot", "a_{1}",
    "^{n}", r"\frac", "i", "if", "xyxy", "abcd",
]  # fmt: skip


@given(st.lists(st.sampled_from(PLAIN), max_size=8))
def test_what_a_quick_look_accepts_can_be_read(pieces: list[str]) -> None:
    text = canonical("".join(pieces))
    assert read(text) is not None or has_words(text) or not is_plain(text)


@given(st.text(max_size=60))
def test_any_text_is_an_answer_that_equals_the_number_or_not(text: str) -> None:
    read(canonical(text))
    assert is_equal("123456789123456789", text) in (True, False)


PIECES = [
    r"\frac", r"\sqrt", "{", "}", "(", ")", "[", "]", "1", "23", "x", "^", "_", ",", "=", "<",
    r"\le", r"\pm", r"\cup", r"\text", "cm", "%", r"\$", "$", ".", "-", "+", "/", " ",
    r"\begin{pmatrix}", r"\end{pmatrix}", "&", r"\\", "or", r"\infty", ":", "|", r"\{", r"\}", "!",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=12))
def test_any_pieces_of_latex_are_read_or_not_and_never_an_error(pieces: list[str]) -> None:
    read(canonical("".join(pieces)))


@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6))
def test_a_fraction_equals_itself_however_it_is_written_and_no_other(over: int, under: int) -> None:
    written = rf"\frac{{{over}}}{{{under}}}"
    assert is_equal(written, f"{over}/{under}")
    assert is_equal(written, rf"\dfrac{{{2 * over}}}{{{2 * under}}}")
    assert not is_equal(written, rf"\frac{{{over + 1}}}{{{under}}}")


async def test_the_task_decides_what_is_compared(scorers: Scorers) -> None:
    async def score(answer: str, truth: str, question: str) -> float | None:
        task = make_task("math", answer=truth, query=question)
        return (await scorers.score(task, make_record(answer))).score

    assert await score("12,000", "12000", "How many?") == 1.0
    assert await score(r"60\%", "60", "How many?") == 0.0
    assert await score(r"60\%", "60", "How many percent?") == 1.0
    with pytest.raises(ValueError, match=r"the task's answer '\\\\frac\{' is no mathematics"):
        await score("4", r"\frac{", "How many?")


async def test_an_answer_that_takes_for_ever_is_not_equal_and_says_why() -> None:
    async with MathVerifier(processor_s=0.5) as verifier:
        for answer, why in (
            (HARD, "the answer takes more than 0.5 s of processor time to compare"),
            (CENTRAL, "the answer takes more than 0.5 s of processor time to compare"),
            (TOWER, r"the answer has an exponent above 1e\+06"),
        ):
            score = await verifier.score(answer, "4", "")
            assert score.value == 0.0
            assert score.explanation is not None
            assert re.fullmatch(why, score.explanation)
        assert (await verifier.score("4.0", "4", "")).value == 1.0


async def test_three_hard_answers_delay_no_easy_one() -> None:
    async with MathVerifier(processes=2, processor_s=600.0) as verifier:
        await asyncio.gather(*(verifier.score("1", "1", "") for _ in range(2)))  # they are loaded
        hard = [asyncio.create_task(verifier.score(HARD, "1", "")) for _ in range(3)]
        await asyncio.sleep(0)
        easy = await asyncio.gather(*(verifier.score(f"{n}.0", str(n), "") for n in range(40)))
        assert [score.value for score in easy] == [1.0] * 40
        assert not any(task.done() for task in hard)
        for task in hard:
            task.cancel()


async def test_a_process_that_dies_costs_no_score() -> None:
    async with MathVerifier(processes=1) as verifier:
        await verifier.score("1", "1", "")
        (child,) = verifier._idle
        child.send_signal(signal.SIGKILL)
        await child.wait()
        assert (await verifier.score("2", "2", "")).value == 1.0


async def test_a_score_that_is_cancelled_leaves_nothing_to_the_next() -> None:
    async with MathVerifier(processes=1) as verifier:
        await verifier.score("1", "1", "")
        asked = asyncio.create_task(verifier.score(HARD, "1", ""))
        await asyncio.sleep(0.05)
        asked.cancel()
        await asyncio.wait({asked})
        began = time.monotonic()
        assert (await verifier.score("3", "3", "")).value == 1.0
        assert time.monotonic() - began < 10
        pids = [child.pid for child in verifier._all]
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


async def test_many_scores_at_once_each_get_their_own_result(scorers: Scorers) -> None:
    async def score(answer: int) -> float | None:
        return (await scorers.score(make_task("math", answer="1"), make_record(str(answer)))).score

    results = await asyncio.gather(*(score(i % 3) for i in range(60)))
    assert results == [float(i % 3 == 1) for i in range(60)]
