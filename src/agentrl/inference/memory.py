"""A service's GPU memory, given back while a trainer on the same GPU computes, and taken again.

A server dies of a release while requests run, and of a resume without a release. The first cannot
happen here: a service is always paused first, in mode "retract", after which nothing runs and its
requests wait with the tokens they have. Against the second there is `MemoryState`, for whoever
keeps account of a service to record around each call.
"""

from enum import StrEnum

from agentrl.inference.engine_protocol import Engine
from agentrl.inference.protocol import RequestRejected


class MemoryState(StrEnum):
    """Who has a service's GPU memory, as far as is known.

    held -> releasing -> released -> resuming -> held, and releasing -> held when it was refused.
    "releasing" and "resuming" are written before the request: a service found so after a crash may
    be in either state, and must be started again before it is used.
    """

    HELD = "held"
    RELEASING = "releasing"
    RELEASED = "released"
    RESUMING = "resuming"


async def release_memory(engine: Engine) -> None:
    """Have a service that holds its memory give it back. It generates nothing until it is resumed.

    Raises RequestRejected when the service refused: it holds its memory and goes on generating.
    After another InferenceError nobody knows.
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
    """Have a service that gave its memory back take it again, with the weights it had.

    It stays paused, so that new weights can come before it generates: `continue_` ends that.
    """
    await engine.resume_memory_occupation()
