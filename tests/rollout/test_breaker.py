"""When a breaker keeps work away, and for how long: no clock, no I/O."""

import re

import pytest

from agentrl.databases.task_choice import NO_TASKS, TaskChoice
from agentrl.failures import InfrastructureFailure
from agentrl.rollout.scheduling.breaker import LONGEST_PAUSE_S, TASKS_IN_A_ROW, Breaker

SEARCHERS = TaskChoice(agents=frozenset({"searcher"}))


async def probe() -> None:
    raise AssertionError("nobody probes here")


class RepeatedFailure(InfrastructureFailure):
    probe_repeats = True


def outage(*, probed: bool, repeats: bool = False) -> InfrastructureFailure:
    kind = RepeatedFailure if repeats else InfrastructureFailure
    return kind(
        "the index is out of reach: it answers 503",
        dependency="the index",
        probe=probe if probed else None,
    )


def test_one_failure_keeps_nobody_away_from_what_answers_a_probe() -> None:
    breaker = Breaker("the index")
    breaker.failed(outage(probed=True), "a", SEARCHERS, now=0)
    breaker.failed(outage(probed=True), "a", SEARCHERS, now=1)
    assert not breaker.is_open
    breaker.answered()
    breaker.failed(outage(probed=True), "b", SEARCHERS, now=2)
    assert not breaker.is_open


def test_a_probe_that_fails_opens_it_until_one_is_answered() -> None:
    breaker = Breaker("the index")
    breaker.failed(outage(probed=True), "a", SEARCHERS, now=0)
    breaker.not_answered(OSError("refused"), now=0)
    assert breaker.is_open and (breaker.since, breaker.error) == (0, "refused")
    breaker.succeeded()  # of an attempt that had what it needed before
    assert breaker.is_open
    breaker.answered()
    assert not breaker.is_open


def test_what_one_task_asks_keeps_nobody_away_however_often_a_probe_repeats_it() -> None:
    breaker = Breaker("the index")
    for now in range(20):
        breaker.failed(outage(probed=True, repeats=True), "poison", SEARCHERS, now=now)
        breaker.not_answered(RuntimeError("status 500"), now=now)
        assert not breaker.is_open
    breaker.not_answered(ConnectionError("refused"), now=20)
    assert breaker.is_open


def test_several_tasks_that_are_not_answered_keep_others_away_until_one_succeeds() -> None:
    breaker = Breaker("the index")
    for number in range(TASKS_IN_A_ROW):
        assert not breaker.is_open
        breaker.failed(outage(probed=True, repeats=True), str(number), SEARCHERS, now=0)
    breaker.not_answered(RuntimeError("status 500"), now=1)
    assert breaker.is_open and not breaker.lets_try(LONGEST_PAUSE_S - 1)
    assert breaker.lets_try(LONGEST_PAUSE_S)  # or three that it cannot answer held back all
    breaker.trying(LONGEST_PAUSE_S)
    assert not breaker.lets_try(LONGEST_PAUSE_S + 1)
    breaker.succeeded()
    assert not breaker.is_open


def test_several_tasks_in_a_row_open_it_whatever_a_probe_says() -> None:
    breaker = Breaker("the index")
    for number in range(TASKS_IN_A_ROW):
        assert not breaker.is_open
        breaker.failed(outage(probed=True), str(number), SEARCHERS, now=5)
    assert breaker.is_open
    assert breaker.error == "it answers 503"
    assert breaker.needed_by == SEARCHERS


def test_a_success_between_them_begins_the_row_anew() -> None:
    breaker = Breaker("the index")
    for number in range(3 * TASKS_IN_A_ROW):
        breaker.failed(outage(probed=True), str(number), NO_TASKS, now=5)
        breaker.succeeded()
        assert not breaker.is_open


def test_the_pauses_grow_and_a_success_forgets_them() -> None:
    breaker, now, pauses = Breaker("the index"), 0.0, []
    for _ in range(4):  # what answers a probe, and fails again
        for number in range(TASKS_IN_A_ROW):
            breaker.failed(outage(probed=True), str(number), NO_TASKS, now)
        pauses.append(breaker.next_try - now)
        now = breaker.next_try
        breaker.answered()
    assert pauses == [0.5, 0.75, 1.125, 1.6875]
    for _ in range(12):
        breaker.not_answered(OSError("refused"), now)
    assert breaker.next_try - now == LONGEST_PAUSE_S
    breaker.answered()
    breaker.succeeded()
    breaker.not_answered(OSError("refused"), now)
    assert breaker.next_try - now == 0.5


def test_what_cannot_be_probed_opens_at_once_and_lets_one_attempt_try() -> None:
    breaker = Breaker("the index")
    breaker.failed(outage(probed=False), "a", SEARCHERS, now=0)
    assert breaker.is_open and not breaker.lets_try(0.4)
    assert breaker.lets_try(0.5)
    breaker.wait(0.5)
    assert not breaker.lets_try(1.2) and breaker.lets_try(1.25)
    breaker.succeeded()
    assert not breaker.is_open


@pytest.mark.parametrize(
    ("scorer", "held_back"),
    [
        ("http", True), ("0.5*http + 0.5*f1", True), ("f1+http", True), ("2*http+f1", True),
        ("https", False), ("my-http", False), ("0.5*math + 0.5*f1", False),
    ],
)  # fmt: skip
def test_a_scorer_is_found_in_a_sum_by_its_whole_name(scorer: str, held_back: bool) -> None:
    pattern = TaskChoice(scorers=frozenset({"http"})).unscored()["scorer"]["$not"]["$regex"]
    assert bool(re.search(pattern, scorer)) is held_back


def test_a_sampler_waits_as_long_as_the_failure_says() -> None:
    patient, limited = Breaker("the index"), Breaker("the index")
    failure = outage(probed=False)
    patient.failed(failure, "a", SEARCHERS, now=0)
    failure.sampler_waits_s = 5
    limited.failed(failure, "a", SEARCHERS, now=0)
    assert not patient.spent(1e9)
    assert [limited.spent(now) for now in (4.9, 5)] == [False, True]
    limited.succeeded()
    assert not limited.spent(10)
