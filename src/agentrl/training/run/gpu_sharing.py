"""`--inf_share_gpus`: trainer and services on the same GPUs have their memory in turns.

    rows are ready -> services release -> the trainer's state returns to the device -> train
    -> weights are copied -> the trainer's state goes to the host -> services resume -> publish

`training/step/state_offload.py` moves the trainer's state. Here is the memory of services.

The ledger has the state of each service, so that after a crash the next trainer resumes exactly the
services that the last one released.
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
        """Release the memory of the services with published weights. Returns their number.

        A service that does not release it is left with a warning: there may be room for both.
        """
        async with self._services() as services:
            asked = [
                self._release(service, engine)
                for service, engine in services
                if service.memory == MemoryState.HELD and service.weight_version != FRESH_VERSION
            ]
            released = sum(await asyncio.gather(*asked))
        logger.info("%d services gave their GPU memory back for a step", released)
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
            # Only services with published weights are released. One without was started since then
            # and would crash by a resume.
            if await engine.weight_version() != FRESH_VERSION:
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
