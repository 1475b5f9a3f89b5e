"""Scorers: exact match, mathematics in its own process, and registered ones."""

import asyncio
import time

import pytest
from scoring import make_record, make_task

from agentrl.rollout.mcp.scorers import MCPScorerFactory
from agentrl.rollout.scorers import Scorers, known_scorers
from agentrl.rollout.scorers.math_verifier import MathVerifier


async def score(scorers: Scorers, name: str, answer: str, truth: str | None) -> float | None:
    record = await scorers.score(make_task(name, answer=truth), make_record(answer))
    return record.score


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [("Paris", "paris ", 1.0), ("a  b\n", "A b", 1.0), ("42.", "42", 0.0), ("", "42", 0.0)],
)
async def test_exact_match_ignores_case_and_white_space(
    scorers: Scorers, answer: str, truth: str, expected: float
) -> None:
    assert await score(scorers, "exact_match", answer, truth) == expected


async def test_math_compares_values_and_not_texts(scorers: Scorers) -> None:
    cases = [
        ("0.5", r"\frac{1}{2}", 1.0),
        (r"2\sqrt{3}", r"\sqrt{12}", 1.0),
        (r"2\sqrt{3}", "2", 0.0),
        ("12,000", "12000", 1.0),
        (r"so it is $\boxed{x^2+1}$", "1+x^2", 1.0),
        ("(1, 2)", "(1,2)", 1.0),
        ("3", "4", 0.0),
        ("no idea", "4", 0.0),
        ("", "4", 0.0),
        ("line\nends\n7", "7", 1.0),
        (r"\frac{" * 20, "4", 0.0),
        ("9^{9^{9^{9}}}", "4", 0.0),
    ]
    for answer, truth, expected in cases:
        assert await score(scorers, "math", answer, truth) == expected, (answer, truth)


async def test_a_ground_truth_that_is_no_mathematics_is_an_error(scorers: Scorers) -> None:
    with pytest.raises(ValueError, match="is no mathematics"):
        await score(scorers, "math", "4", "")


async def test_math_that_hangs_does_not_hold_up_the_event_loop_and_costs_one_score() -> None:
    async with MathVerifier(timeout_s=0.01) as verifier:  # less than the child takes to start
        ticks, began = 0, time.monotonic()
        hanging = asyncio.create_task(verifier.score("1", "1"))
        while not hanging.done():
            await asyncio.sleep(0.002)
            ticks += 1
        with pytest.raises(TimeoutError, match=r"scorer math took longer than 0\.01 s for '1'"):
            await hanging
        assert ticks >= 2
        assert time.monotonic() - began < 2
        verifier._timeout_s = 30.0
        assert await verifier.score("1", "1.0") == 1.0


async def test_a_math_process_that_dies_costs_one_score() -> None:
    async with MathVerifier() as verifier:
        assert await verifier.score("1", "1") == 1.0
        assert verifier._child is not None
        verifier._child.kill()
        with pytest.raises(RuntimeError, match="scorer math died of '2'"):
            await verifier.score("2", "2")
        assert await verifier.score("3", "3") == 1.0


async def test_many_math_scores_at_once_each_get_their_own_result(
    scorers: Scorers,
) -> None:
    results = await asyncio.gather(*(score(scorers, "math", str(i % 3), "1") for i in range(12)))
    assert results == [float(i % 3 == 1) for i in range(12)]


async def test_a_registered_scorer_is_called_by_its_parameter_names(
    scorers: Scorers,
) -> None:
    async def length(ground_truth: str, model_answer: str) -> float:
        return float(len(model_answer) - len(ground_truth))

    MCPScorerFactory.register_scorer("length", length)
    assert "length" in known_scorers()
    assert await score(scorers, "length", "abc", "a") == 2.0


async def test_a_scorer_that_raises_or_returns_no_number_is_an_error_and_never_a_score(
    scorers: Scorers,
) -> None:
    async def broken(model_answer: str, ground_truth: str) -> float:
        raise LookupError("the grader is gone")

    async def vague(model_answer: str, ground_truth: str) -> float:
        return float("nan")

    MCPScorerFactory.register_scorer("broken", broken)
    MCPScorerFactory.register_scorer("vague", vague)
    with pytest.raises(LookupError, match="the grader is gone"):
        await score(scorers, "broken", "a", "b")
    with pytest.raises(ValueError, match="'vague' returned nan"):
        await score(scorers, "vague", "a", "b")


def test_a_function_that_cannot_be_a_scorer_is_refused() -> None:
    async def other(answer: str) -> float:
        return 1.0

    def blocking(model_answer: str, ground_truth: str) -> float:
        return 1.0

    with pytest.raises(ValueError, match="must take `model_answer` and `ground_truth`"):
        MCPScorerFactory.register_scorer("other", other)
    with pytest.raises(ValueError, match="must be an async function"):
        MCPScorerFactory.register_scorer("blocking", blocking)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'math' is built in"):
        MCPScorerFactory.register_scorer("math", other)


async def test_an_unknown_scorer_is_refused_with_the_known_names(scorers: Scorers) -> None:
    with pytest.raises(ValueError, match=r"unknown scorer 'bleu'; known: agentcpm, .*math"):
        await score(scorers, "bleu", "a", "b")


async def test_a_task_without_an_answer_is_an_error_of_the_task(scorers: Scorers) -> None:
    with pytest.raises(ValueError, match="no `answer`"):
        await score(scorers, "exact_match", "a", None)
