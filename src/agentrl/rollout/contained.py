"""Code of a user's own, awaited so that it can end nothing but itself."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from agentrl.foreign_text import shown

T = TypeVar("T")


async def contained(work: Awaitable[T], who: str) -> T:
    """What `work` returns. Raises RuntimeError, which names `who`, for what would end the process,
    and all its trajectories with it, and where the work cancelled itself."""
    try:
        return await work
    except SystemExit as left:
        raise RuntimeError(f"{who} called sys.exit({shown(left.code)})") from left
    except (KeyboardInterrupt, GeneratorExit) as left:  # signals come another way
        raise RuntimeError(f"{who} raised {type(left).__name__}") from left
    except asyncio.CancelledError as left:
        stopping = asyncio.current_task()
        if stopping is not None and stopping.cancelling():
            raise
        raise was_cancelled(who) from left


def was_cancelled(who: str) -> RuntimeError:
    """The error of work that was cancelled by itself, or by what it began."""
    return RuntimeError(f"{who} was cancelled, and not by the sampler")
