"""`--inf_share_gpus`: trainer and services on the same GPUs have their memory in turns.

    start    services release -> the trainer loads weights, and at a resume its optimizer's state
             -> weights are copied -> the trainer's state goes to the host -> services resume
             -> publish
    step     rows are ready -> services release -> the trainer's state returns -> train
             -> weights are copied -> the trainer's state goes to the host -> services resume
             -> publish

`training/step/state_offload.py` moves the trainer's state. Here is the memory of services.

The launcher starts the trainer once the services of its machine hold their memory, so that these
measure what is free on GPUs that nobody else uses.

The ledger has the state of each service, so that after a crash the next trainer resumes exactly the
services that the last one released. A service that `agentrl serve` starts again says so there. One
that was given by URL does not: a weight version that it has lost shows it, so that it takes turns
from its first publication on.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import InferenceService
from agentrl.databases.services import live_services, record_memory
from agentrl.inference.engine_protocol import Engine
from agentrl.inference.engines import open_engines
from agentrl.inference.memory import MemoryState, release_memory, resume_memory
from agentrl.inference.protocol import FRESH_VERSION, InferenceError, RequestRejected

logger = logging.getLogger(__name__)


class GpuSharing:
    """The memory of a run's live services. For rank 0, on the background loop."""

    def __init__(
        self, database: RunDatabase, service_timeout_s: float, api_key: str | None = None
    ) -> None:
        """`api_key`: that of all services."""
        self._database = database
        self._api_key = api_key
        self._service_timeout_s = service_timeout_s

    async def release(self) -> int:
        """Release the memory of the services. Returns the number of those that released it.

        A service that does not release it is left with a warning: there may be room for both.
        """
        async with self._services() as services:
            asked = [
                self._release(service, engine)
                for service, engine in services
                if service.memory == MemoryState.HELD and _shows_a_restart(service)
            ]
            released = sum(await asyncio.gather(*asked))
        logger.info("%d services gave their GPU memory to the trainer", released)
        return released

    async def resume(self) -> None:
        """Resume the memory of released services, which stay paused until their weight update.

        A service whose state is unknown is left with a warning.
        """
        async with self._services() as services:
            asked = [
                self._resume(service, engine)
                for service, engine in services
                if service.memory != MemoryState.HELD
            ]
            await asyncio.gather(*asked)

    async def _release(self, service: InferenceService, engine: Engine) -> bool:
        await record_memory(self._database, service.url, MemoryState.RELEASING)
        try:
            await release_memory(engine)
        except RequestRejected as error:
            logger.warning("%s keeps its GPU memory: %s", service.url, error)
            await record_memory(self._database, service.url, MemoryState.HELD)
            return False
        except InferenceError as error:
            logger.warning("%s must be started again: %s", service.url, error)
            return False
        await record_memory(self._database, service.url, MemoryState.RELEASED)
        return True

    async def _resume(self, service: InferenceService, engine: Engine) -> None:
        try:
            # One that was started since its release holds its memory, and would crash by a resume.
            if not await _was_restarted(service, engine):
                if service.memory != MemoryState.RELEASED:
                    logger.warning(
                        "%s is not used: it stopped answering while its GPU memory was released or"
                        " resumed, start it again", service.url,
                    )  # fmt: skip
                    return
                await record_memory(self._database, service.url, MemoryState.RESUMING)
                await resume_memory(engine)
        except InferenceError as error:
            logger.warning("%s did not take its GPU memory again: %s", service.url, error)
            return
        await record_memory(self._database, service.url, MemoryState.HELD)

    @asynccontextmanager
    async def _services(self) -> AsyncIterator[list[tuple[InferenceService, Engine]]]:
        """The live services, each with its engine."""
        live = await live_services(self._database, self._service_timeout_s)
        urls = [service.url for service in live]
        async with open_engines(urls, self._api_key) as engines:
            yield list(zip(live, engines, strict=True))


def _shows_a_restart(service: InferenceService) -> bool:
    """Whether the ledger or the weight version would tell that the service was started again."""
    return service.heartbeat is not None or service.weight_version != FRESH_VERSION


async def _was_restarted(service: InferenceService, engine: Engine) -> bool:
    """Whether the service was started again since the ledger knows its state."""
    if service.heartbeat is not None and service.weight_version == FRESH_VERSION:
        return False  # it would have registered again
    return await engine.weight_version() == FRESH_VERSION
