"""Publication of weights: to a folder, to the ledger, then to every inference service.

The folder is written while training stands still; services load it while training goes on. A
service that comes later, comes back, or failed to load is brought up to date as soon as it is
seen again.
"""

import asyncio
import logging
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from agentrl.databases import policies
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import InferenceService
from agentrl.databases.services import acknowledge, live_services
from agentrl.inference.client import SGLangClient, open_session
from agentrl.inference.protocol import ServiceUnreachable
from agentrl.inference.weights import publish_from_disk
from agentrl.training.model_folder import write_model_folder

logger = logging.getLogger(__name__)

KEPT_FOLDERS = 3  # of published weights: a service may still be loading the last but one
_LOOK_SECONDS = 1.0  # between two looks for services that are not up to date


@dataclass(frozen=True)
class Publication:
    """Weights on disk under their version."""

    version: int
    step: int  # the optimizer step that made them
    folder: Path  # absolute: services are other processes


def write_publication(
    output: Path,
    version: int,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
) -> Publication:
    """Write the model as `output/weights/vVERSION`. Collective."""
    folder = (output / "weights" / f"v{version}").resolve()
    write_model_folder(model, tokenizer, folder, dtype)
    return Publication(version, step, folder)


async def next_version(database: RunDatabase, service_timeout_s: float) -> int:
    """A version above all that services or samplers may have seen; 0 for a new run.

    A service may have been given a version by other means than this run's ledger.
    """
    latest = await policies.latest(database)
    seen = [service.weight_version for service in await live_services(database, service_timeout_s)]
    return max([latest.version if latest else -1, *seen]) + 1


class Publisher:
    """Keeps every live service at the newest publication. For rank 0, on the background loop."""

    def __init__(
        self,
        database: RunDatabase,
        output: Path,
        service_timeout_s: float,
        hold: Callable[[], Awaitable[None]],
    ) -> None:
        """`service_timeout_s`: a registered service silent for so long is taken for gone.

        `hold`: asked before a service is touched; raises if another trainer has taken the run.
        """
        self._database = database
        self._hold = hold
        self._weights = output / "weights"
        self._service_timeout_s = service_timeout_s
        self._updating = asyncio.Lock()
        self._newest: Publication | None = None
        self._complained: set[tuple[str, str]] = set()

    async def publish(self, publication: Publication) -> None:
        """Record `publication` in the ledger, then bring the live services to it.

        In this order, so that every version that a token may carry is known.
        """
        await self._hold()
        await policies.publish(
            self._database, publication.version, publication.step, str(publication.folder)
        )
        async with self._updating:
            self._newest = publication
            await self._update(
                await live_services(self._database, self._service_timeout_s), publication
            )
            await asyncio.to_thread(self._remove_old)

    async def keep_current(self, patience_s: float) -> None:
        """Bring services up to date that a publication did not reach.

        Never returns. Raises `ServiceUnreachable` when no service has had the newest publication
        for `patience_s` seconds: no row would ever come.
        """
        served = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            async with self._updating:
                services = await live_services(self._database, self._service_timeout_s)
                if self._newest is None:
                    served = time.monotonic()
                    continue
                current = [s for s in services if s.weight_version == self._newest.version]
                if current:
                    served = time.monotonic()
                elif time.monotonic() - served > patience_s:
                    raise ServiceUnreachable(self._nobody(patience_s))
                await self._update([s for s in services if s not in current], self._newest)

    def _nobody(self, patience_s: float) -> str:
        reasons = [f"{url}: {error}" for url, error in sorted(self._complained)]
        return (
            f"no inference service took the weights within {patience_s:.0f} s "
            f"({'; '.join(reasons) or 'none is registered'}): start one, or correct "
            "--inference_urls (INFERENCE_URLS)"
        )

    async def _update(self, services: Sequence[InferenceService], publication: Publication) -> None:
        if not services:
            return
        await self._hold()
        async with open_session() as session:
            clients = [SGLangClient(service.url, session=session) for service in services]
            outcomes = await publish_from_disk(clients, publication.folder, publication.version)
        for service, outcome in zip(services, outcomes, strict=True):
            if outcome.error is None:
                await acknowledge(self._database, service.url, outcome.version)
            elif (service.url, outcome.error) not in self._complained:
                self._complained.add((service.url, outcome.error))
                logger.warning(
                    "inference service %s did not take policy version %d, it is tried again: %s",
                    service.url, outcome.version, outcome.error,
                )  # fmt: skip

    def _remove_old(self) -> None:
        folders = []
        for folder in self._weights.glob("v*"):
            match = re.fullmatch(r"v(\d+)", folder.name)
            if match:
                folders.append((int(match[1]), folder))
        for _, folder in sorted(folders)[:-KEPT_FOLDERS]:
            shutil.rmtree(folder)
