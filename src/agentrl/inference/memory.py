"""Releases a service's GPU memory while a trainer on the same GPU computes, and resumes it.

A release while requests run, and a resume without a release, crash SGLang. `release_memory` pauses
the service with "retract" first, so that no request runs. The caller records `MemoryState` around
each call, so that it never resumes without a release.
"""

from enum import StrEnum

from agentrl.inference.engine_protocol import Engine
from agentrl.inference.protocol import RequestRejected


class MemoryState(StrEnum):
    """The known state of a service's GPU memory.

    held -> releasing -> released -> resuming -> held, and releasing -> held if it was refused.
    "releasing" and "resuming" are recorded before the request. After a crash in one of them the
    actual state is unknown, and the service must be restarted before it is used.
    """

    HELD = "held"
    RELEASING = "releasing"
    RELEASED = "released"
    RESUMING = "resuming"


async def release_memory(engine: Engine) -> None:
    """Pause a service and release its memory. It generates nothing until it is resumed.

    Raises RequestRejected if the service refused; it then keeps its memory and continues. After
    another InferenceError the state is unknown.
    """
    if not engine.capabilities.memory:
        raise RequestRejected(f"{engine.url} cannot give its GPU memory back")
    await engine.pause("retract")
    try:
        await engine.release_memory_occupation()
    except RequestRejected:
        await engine.continue_()
        raise


async def resume_memory(engine: Engine) -> None:
    """Resume a service's released memory, with the weights that it had.

    The service stays paused for a weight update; `continue_` ends the pause.
    """
    await engine.resume_memory_occupation()
