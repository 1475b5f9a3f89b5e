"""What a sampler may write, by what it knows of its leases."""

import asyncio

import pytest

from agentrl.databases.held_leases import HeldLeases
from agentrl.databases.tasks import LeaseLost


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def leases(clock: Clock) -> HeldLeases:
    """One lease of ten seconds, that began to be asked for at 100."""
    leases = HeldLeases(10.0, clock)
    leases.begin({"record"}, asked=100.0)
    return leases


async def test_a_lease_is_ours_until_its_time_is_up(leases: HeldLeases, clock: Clock) -> None:
    await leases.assured("record")
    clock.now = 109.9
    assert leases.holds("record")
    clock.now = 110.0
    assert not leases.holds("record")


async def test_a_heartbeat_counts_from_when_it_was_sent(leases: HeldLeases, clock: Clock) -> None:
    clock.now = 108.0
    leases.answered({"record"}, set(), asked=105.0)
    clock.now = 114.9
    assert leases.holds("record")
    clock.now = 115.0
    assert not leases.holds("record")


async def test_who_comes_after_the_time_is_up_waits_for_the_next_heartbeat(
    leases: HeldLeases, clock: Clock
) -> None:
    clock.now = 130.0
    waiting = asyncio.create_task(leases.assured("record"))
    await asyncio.sleep(0)
    assert not waiting.done()
    leases.answered({"record"}, set(), asked=129.0)
    await waiting


async def test_a_heartbeat_that_was_itself_too_late_does_not_help(
    leases: HeldLeases, clock: Clock
) -> None:
    clock.now = 130.0
    waiting = asyncio.create_task(leases.assured("record"))
    await asyncio.sleep(0)
    leases.answered({"record"}, set(), asked=115.0)
    await asyncio.sleep(0)
    assert not waiting.done()
    leases.answered(set(), {"record"}, asked=130.0)
    with pytest.raises(LeaseLost, match="record record is gone"):
        await waiting


async def test_a_lease_that_was_lost_stays_lost(leases: HeldLeases) -> None:
    leases.answered(set(), {"record"}, asked=101.0)
    leases.answered({"record"}, set(), asked=102.0)
    with pytest.raises(LeaseLost):
        await leases.assured("record")


async def test_without_further_heartbeats_nobody_waits(leases: HeldLeases, clock: Clock) -> None:
    clock.now = 130.0
    waiting = asyncio.create_task(leases.assured("record"))
    await asyncio.sleep(0)
    leases.close()
    with pytest.raises(LeaseLost):
        await waiting


async def test_what_is_left_of_a_lease_holds_to_its_end_after_the_last_heartbeat(
    leases: HeldLeases, clock: Clock
) -> None:
    leases.close()
    await leases.assured("record")
    clock.now = 110.0
    with pytest.raises(LeaseLost):
        await leases.assured("record")


async def test_nothing_is_written_for_a_record_that_has_ended(leases: HeldLeases) -> None:
    leases.end("record")
    with pytest.raises(LeaseLost):
        await leases.assured("record")
