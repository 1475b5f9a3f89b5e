"""The control loop of a sampler's concurrency: what a look at the services makes of the limits."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.inference.protocol import ServiceLoad
from agentrl.rollout.scheduling.concurrency import FLOOR, Concurrency

A, B = "http://a", "http://b"


def load(
    running: int = 8, waiting: int = 0, used: float = 0.1, retractions: int = 0
) -> ServiceLoad:
    return ServiceLoad(
        running=running, waiting=waiting, used_tokens=int(used * 1000), total_tokens=1000,
        retractions=retractions,
    )  # fmt: skip


CLEAR, QUEUE, FULL, RETRACTING = load(), load(waiting=5), load(used=0.95), load(retractions=1)


def after(concurrency: Concurrency, *looks: ServiceLoad | None) -> Concurrency:
    """After looks at one service, with all that is allowed in progress each time."""
    for look in looks:
        concurrency = concurrency.observe({A: look}, in_progress=concurrency.limit)
    return concurrency


def limits(concurrency: Concurrency, *looks: ServiceLoad | None) -> list[int]:
    found = []
    for look in looks:
        concurrency = after(concurrency, look)
        found.append(concurrency.limit)
    return found


def test_without_a_target_a_sampler_begins_at_its_ceiling() -> None:
    assert limits(Concurrency(64), CLEAR, CLEAR, CLEAR) == [64, 64, 64]


def test_a_service_that_is_clear_gets_one_more_at_every_look_up_to_the_ceiling() -> None:
    start = Concurrency(ceiling=12, target=8)
    assert limits(start, *[CLEAR] * 6) == [8, 9, 10, 11, 12, 12]  # 8 were never used before


def test_a_queue_seen_once_is_a_batch_that_just_came_and_a_queue_seen_twice_is_one() -> None:
    assert limits(Concurrency(40), QUEUE, CLEAR, QUEUE, CLEAR) == [40, 40, 40, 40]
    assert limits(Concurrency(40), QUEUE, QUEUE) == [40, 30]


def test_a_few_waiting_among_many_running_are_no_queue() -> None:
    assert limits(Concurrency(64), *[load(running=60, waiting=6)] * 4) == [64] * 4


def test_a_retraction_backs_off_at_once() -> None:
    assert limits(Concurrency(40), RETRACTING) == [30]


def test_one_congestion_backs_off_once_and_not_until_it_could_have_shown() -> None:
    assert limits(Concurrency(40), *[RETRACTING] * 6) == [30, 30, 30, 30, 22, 22]


def test_a_service_whose_cache_is_nearly_full_is_left_as_it_is() -> None:
    assert limits(Concurrency(ceiling=64, target=8), FULL, FULL, CLEAR) == [8, 8, 9]


def test_a_limit_under_the_target_comes_back_fast_and_goes_on_slowly_above_it() -> None:
    pressed = Concurrency(ceiling=64, target=40)
    for _ in range(24):
        pressed = after(pressed, RETRACTING)
    assert pressed.limit < 10
    back = limits(pressed, *[CLEAR] * 14)
    steps = [late - early for early, late in pairwise(back)]
    assert max(steps) >= 5 and back[-1] > 40
    assert all(step == 1 for step, level in zip(steps, back, strict=False) if level >= 40)


def test_a_limit_that_is_not_used_up_does_not_grow() -> None:
    start = Concurrency(ceiling=64, target=8)
    idle = start.observe({A: CLEAR}, in_progress=3).observe({A: CLEAR}, in_progress=3)
    assert idle.limit == 8


def test_a_service_that_does_not_tell_its_load_keeps_its_limit() -> None:
    assert limits(Concurrency(ceiling=64, target=8), None, None) == [8, 8]


def test_each_service_has_a_limit_of_its_own() -> None:
    both = Concurrency(ceiling=64)
    looks: Sequence[Mapping[str, ServiceLoad | None]] = [{A: CLEAR, B: RETRACTING}] * 6
    for look in looks:
        both = both.observe(look, in_progress=both.limit)
    assert both.services[B].limit < 32 < both.services[A].limit


def test_services_that_come_and_go_share_the_ceiling() -> None:
    one = Concurrency(ceiling=64).observe({A: CLEAR}, 0)
    two = one.observe({A: CLEAR, B: CLEAR}, 64)
    assert one.limit == two.limit == 64
    assert sum(service.limit for service in two.services.values()) == pytest.approx(64)
    gone = two.observe({B: CLEAR}, 64)
    assert set(gone.services) == {B} and gone.limit < 64


def test_no_service_at_all_leaves_the_least() -> None:
    assert Concurrency(ceiling=64).observe({}, 0).limit == FLOOR


def test_samplers_that_share_a_service_come_to_share_it_evenly() -> None:
    """Two samplers, one far ahead, at a service that runs 48 requests: AIMD makes them even."""
    first = Concurrency(ceiling=200, target=60).observe({A: None}, 60)
    second = Concurrency(ceiling=200, target=1).observe({A: None}, 1)
    second = Concurrency(ceiling=200, services=second.services)
    first = Concurrency(ceiling=200, services=first.services)
    totals = []
    for _ in range(400):
        wanted = first.limit + second.limit
        look = {A: load(running=min(48, wanted), waiting=max(0, wanted - 48))}
        first, second = first.observe(look, first.limit), second.observe(look, second.limit)
        totals.append(wanted)
    assert abs(first.limit - second.limit) <= 5
    assert all(30 <= total <= 66 for total in totals[100:])


@given(
    ceiling=st.integers(1, 100), target=st.integers(0, 120),
    looks=st.lists(
        st.dictionaries(
            st.sampled_from([A, B, "http://c"]),
            st.none() | st.builds(
                load, st.integers(0, 50), st.integers(0, 50), st.floats(0, 1), st.integers(0, 2)
            ),
        ),
        max_size=20,
    ),
    in_progress=st.integers(0, 100),
)  # fmt: skip
def test_the_limit_stays_between_floor_and_ceiling_whatever_is_seen(
    ceiling: int,
    target: int,
    looks: list[dict[str, ServiceLoad | None]],
    in_progress: int,
) -> None:
    concurrency = Concurrency(ceiling, target)
    for look in looks:
        concurrency = concurrency.observe(look, in_progress)
        assert FLOOR <= concurrency.limit <= ceiling
        assert set(concurrency.services) == set(look)
