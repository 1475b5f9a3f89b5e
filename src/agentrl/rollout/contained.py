"""Code of a user's own, awaited so that it can end nothing but itself."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from agentrl.failures import InfrastructureFailure
from agentrl.foreign_text import error_line, shown

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


async def contained(work: Awaitable[T], who: str) -> T:
    """What `work` returns. Raises RuntimeError, which names `who`, for what would end the process,
    and all its trajectories with it, and where the work cancelled itself. An outage in a task group
    of the work is raised as itself."""
    try:
        return await work
    except ExceptionGroup as group:
        if (outage := sole_cause(group, InfrastructureFailure)) is None:
            raise
        raise outage from group
    except Exception:
        raise
    except SystemExit as left:
        raise RuntimeError(f"{who} called sys.exit({shown(left.code)})") from left
    except asyncio.CancelledError as left:
        stopping = asyncio.current_task()
        if stopping is not None and stopping.cancelling():
            raise
        raise was_cancelled(who) from left
    except BaseException as left:  # signals come another way; libraries have their own
        raise RuntimeError(f"{who} raised {error_line(left)}") from left


def sole_cause(group: ExceptionGroup, kind: type[E]) -> E | None:
    """The first error of a group whose errors are all of this kind; None for others.

    `asyncio.TaskGroup` raises such a group, also for a single error.
    """
    found, others = group.split(kind)
    if found is None or others is not None:
        return None
    first: Exception = found
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    assert isinstance(first, kind)
    return first


def was_cancelled(who: str) -> RuntimeError:
    """The error of work that was cancelled by itself, or by what it began."""
    return RuntimeError(f"{who} was cancelled, and not by the sampler")
