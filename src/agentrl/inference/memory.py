"""A service's GPU memory, given back while a trainer on the same GPU computes, and taken again.

A server dies of a release while requests run, and of a resume without a release. The first cannot
happen here: a service is always paused first, in mode "retract", after which nothing runs and its
requests wait with the tokens they have. Against the second there is `MemoryState`, for whoever
keeps account of a service to record around each call.
"""

from enum import StrEnum

from agentrl.inference.client import SGLangClient
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


async def release_memory(client: SGLangClient) -> None:
    """Have a service that holds its memory give it back. It generates nothing until it is resumed.

    Raises RequestRejected when the service refused: it holds its memory and goes on generating.
    After another InferenceError nobody knows.
    """
    await client.pause("retract")
    try:
        await client.release_memory_occupation()
    except RequestRejected:
        await client.continue_()
        raise


async def resume_memory(client: SGLangClient) -> None:
    """Have a service that gave its memory back take it again, with the weights it had.

    It stays paused, so that new weights can come before it generates: `continue_` ends that.
    """
    await client.resume_memory_occupation()
