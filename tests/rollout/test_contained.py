"""What code of a user's raises, as its attempt or scoring fails with it."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from agentrl.failures import InfrastructureFailure
from agentrl.rollout.contained import contained, sole_cause


class Panic(BaseException):
    """As libraries in other languages raise it."""


async def panic() -> None:
    raise Panic("index out of bounds")


async def away() -> None:
    raise InfrastructureFailure("the shop is closed", dependency="the shop")


async def broken() -> None:
    raise KeyError("price")


async def together(*each: Callable[[], Awaitable[None]]) -> None:
    """These in a task group, in another one."""
    async with asyncio.TaskGroup() as outer:
        outer.create_task(_in_a_group(each))


async def _in_a_group(each: tuple[Callable[[], Awaitable[None]], ...]) -> None:
    async with asyncio.TaskGroup() as group:
        for work in each:
            group.create_task(work())  # type: ignore[arg-type]


async def test_what_is_no_exception_fails_the_work_with_its_words() -> None:
    with pytest.raises(RuntimeError, match="agent 'mine' raised Panic: index out of bounds"):
        await contained(panic(), "agent 'mine'")


async def test_an_outage_in_a_task_group_is_an_outage() -> None:
    with pytest.raises(InfrastructureFailure, match="the shop is closed"):
        await contained(together(away, away), "agent 'mine'")


async def test_a_task_group_with_another_error_is_raised_as_it_is() -> None:
    with pytest.raises(ExceptionGroup) as group:
        await contained(together(away, broken), "agent 'mine'")
    assert sole_cause(group.value, InfrastructureFailure) is None


@pytest.mark.parametrize("dependency", [None, 503, ["a"]])
def test_a_dependency_is_named_by_a_text_whatever_is_given(dependency: object) -> None:
    outage = InfrastructureFailure("away", dependency=dependency)  # type: ignore[arg-type]
    assert outage.dependency == str(dependency)
