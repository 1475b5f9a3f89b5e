"""Publication of weights to inference services and to disk, in the background of training.

The weights are gathered on rank 0, written to a folder, and sent to the services by
`--weight_update`. Each service gets work with the new weights as soon as it has them. One that
hangs, is new, was restarted or failed to update is updated from the folder, and gets no work
before.
"""

import asyncio
import logging
import re
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from agentrl.databases import policies
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import InferenceService
from agentrl.databases.services import acknowledge, live_services
from agentrl.inference.engine_protocol import Engine
from agentrl.inference.engines import open_engines
from agentrl.inference.memory import MemoryState
from agentrl.inference.protocol import FRESH_VERSION, InferenceError, ServiceUnreachable
from agentrl.inference.weights.disk import DiskUpdater
from agentrl.inference.weights.probes import CheckedUpdater
from agentrl.inference.weights.updates import (
    PublishedWeights,
    PublishOutcome,
    UpdatePause,
    UpdateRound,
    WeightUpdater,
    held_version,
)
from agentrl.training.model.model_folder import save_model_folder
from agentrl.training.model.weight_gathering import StagedWeights
from agentrl.training.model.written_form import WrittenForm

logger = logging.getLogger(__name__)

KEPT_FOLDERS = 3  # of published weights: a service may still be loading the last but one
# Folders of `written_at_once`, and of tensors that a service is checked with (`weights.probes`).
_UNFINISHED = re.compile(r"v\d+\.partial|probe-\w+")
_LOOK_SECONDS = 1.0  # between two looks for services that are not up to date
_LOOKS_PER_CHECK = 5  # every so many looks services are asked what they hold
_CHECK_TIMEOUT_S = 5.0
# A service that needs this much longer than the first one, and longer than as long again, is not
# waited for.
_LATE_S = 1.0


class TensorsSkipped(RuntimeError):
    """A service leaves out tensors that were published. The message is for the user."""


@dataclass(frozen=True)
class Publication:
    """Weights to publish.

    step: the optimizer step that made them
    folder: where they are written; absolute, because services are other processes
    gather: waits for the weights and returns them, as `StagedWeights.gather`
    write: writes the folder
    """

    version: int
    step: int
    folder: Path
    gather: Callable[[], Mapping[str, Tensor]]
    write: Callable[[], None]


def make_publication(
    output: Path,
    version: int,
    step: int,
    staged: StagedWeights,
    form: WrittenForm,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
) -> Publication:
    """The publication of weights that were staged for publication in `form` and `dtype`.

    By every way services get the names and pieces of the folder that the model comes from.
    """
    folder = (_weights(output) / f"v{version}").resolve()

    def write() -> None:
        save_model_folder(form, tokenizer, staged.gather(), folder, dtype)

    return Publication(version, step, folder, staged.gather, write)


def clear_unfinished_weights(output: Path) -> None:
    """Remove what a crash left of publications and of checks of services. For rank 0, at the start.

    The caller holds the run's lease, so that nobody else writes there.
    """
    for folder in _weights(output).glob("*"):
        if _UNFINISHED.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)


async def next_version(database: RunDatabase, service_timeout_s: float) -> int:
    """A version above all that services or samplers may have seen; 0 for a new run.

    Services may have versions that are not in this run's ledger.
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
        updater: WeightUpdater,
        pause: UpdatePause,
        *,
        hold: Callable[[], Awaitable[None]],
        api_key: str | None = None,
    ) -> None:
        """`service_timeout_s`: a service without a heartbeat for this time is considered dead.

        `hold`: called before a service is changed; raises if another trainer has taken the run.
        `api_key`: the key of all services.
        """
        self._database = database
        self._hold = hold
        self._api_key = api_key
        self._weights = _weights(output)
        self._service_timeout_s = service_timeout_s
        self._updater = CheckedUpdater(updater)
        self._pause: UpdatePause = pause
        self._publishing = asyncio.Lock()
        self._newest: PublishedWeights | None = None  # that is on disk
        self._writing: asyncio.Task[None] | None = None
        # Updates of services that nobody waits for, by URL.
        self._catching_up: dict[str, asyncio.Task[Any]] = {}
        self._complained: set[tuple[str, str]] = set()

    async def publish(self, publication: Publication) -> float:
        """Record `publication` in the ledger, then update the live services.

        This order ensures that the version of every token is known. Returns the longest pause of an
        updated service in seconds. It can be repeated after an error. Raises `TensorsSkipped` if a
        service leaves out some tensors, which is checked at its first update.
        """
        await self._finish_writing()  # whose weights need not be in memory beside these
        weights = PublishedWeights(
            publication.version, publication.folder, await asyncio.to_thread(publication.gather)
        )
        await self._hold()
        from_disk = self._updater.way == "disk"
        async with self._publishing:
            if from_disk:
                await asyncio.to_thread(publication.write)
            await policies.publish(
                self._database, weights.version, publication.step, str(weights.folder)
            )
            found = await live_services(self._database, self._service_timeout_s)
            stall_s = await self._update_live(found, weights)
            self._refuse_skipped()
            await policies.serve(self._database, weights.version)
            self._writing = asyncio.create_task(self._write(publication, written=from_disk))
            if from_disk:
                await self._finish_writing()
        return stall_s

    async def _update_live(
        self, found: Sequence[InferenceService], weights: PublishedWeights
    ) -> float:
        """Update live services until those have the weights that are not late.

        The updates of late ones go on. Returns the longest pause of an updated service.
        """
        await self._hold()
        # A service that still loads an older publication gets this one afterwards.
        live = [
            service
            for service in found
            if service.memory == MemoryState.HELD and not self._is_catching_up(service.url)
        ]
        # One that missed earlier publications gets this one, and nobody waits for it.
        newest = max((service.weight_version for service in live), default=FRESH_VERSION)
        updates = UpdateRound(self._updater, weights, self._pause)
        tasks = {
            service.url: asyncio.create_task(self._update(updates, service.url)) for service in live
        }
        current = {tasks[service.url] for service in live if service.weight_version == newest}
        try:
            await _until_served(set(tasks.values()), current)
            outcomes = [task.result() for task in tasks.values() if task.done()]
        except BaseException:
            # The publication may be repeated, and two updates of a service must not meet.
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            raise
        self._catching_up |= {url: task for url, task in tasks.items() if not task.done()}
        return max([outcome.stall_s for outcome in outcomes if outcome.ok], default=0.0)

    async def keep_current(self, patience_s: float) -> None:
        """Update services that a publication did not reach. Never returns.

        Raises `ServiceUnreachable` if no service has had the newest publication for `patience_s`
        seconds, because no rows would come.
        """
        served = time.monotonic()
        looks = 0
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            looks += 1
            async with self._publishing:
                self._raise_failed()
                self._refuse_skipped()
                live = await live_services(self._database, self._service_timeout_s)
                newest = self._newest
                if newest is None:
                    served = time.monotonic()
                    continue
                if any(service.weight_version >= newest.version for service in live):
                    served = time.monotonic()
                elif time.monotonic() - served > patience_s:
                    raise ServiceUnreachable(self._nobody(patience_s))
                for service in live:
                    url = service.url
                    late = service.weight_version < newest.version
                    if late and service.memory == MemoryState.HELD and url not in self._catching_up:
                        self._catching_up[url] = asyncio.create_task(self._catch_up(url, newest))
            if looks % _LOOKS_PER_CHECK == 0:
                await self._check(live)

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Suspend updates of services within the block."""
        async with self._publishing:
            await asyncio.gather(*self._catching_up.values(), return_exceptions=True)
            yield

    async def close(self) -> None:
        """Wait for the last publication to be on disk."""
        await self._finish_writing()
        await self._updater.close()

    def _refuse_skipped(self) -> None:
        for url, names in self._updater.skipped.items():
            raise TensorsSkipped(
                f"inference service {url} answers that it took the weights, and leaves out "
                f"{', '.join(names)}: it would go on generating with old values; serve the folder "
                "of --model_name_or_path with a version of the service that knows this model"
            )

    def _nobody(self, patience_s: float) -> str:
        reasons = [f"{url}: {error}" for url, error in sorted(self._complained)]
        return (
            f"no inference service took the weights within {patience_s:.0f} s "
            f"({'; '.join(reasons) or 'none is registered'}): start one, or correct "
            "--inference_urls (INFERENCE_URLS)"
        )

    async def _catch_up(self, url: str, weights: PublishedWeights) -> None:
        await self._hold()
        await self._update(UpdateRound(DiskUpdater(), weights, self._pause), url)

    async def _update(self, updates: UpdateRound, url: str) -> PublishOutcome:
        """Update a service and record the version that it has."""
        async with open_engines([url], self._api_key) as (engine,):
            outcome = await updates.update(engine)
        if outcome.error is None:
            await acknowledge(self._database, url, outcome.version)
            return outcome
        if outcome.mixed:
            await acknowledge(self._database, url, FRESH_VERSION)
        if (url, outcome.error) not in self._complained:
            self._complained.add((url, outcome.error))
            logger.warning(
                "inference service %s did not take policy version %d, it is tried again: %s",
                url, outcome.version, outcome.error,
            )  # fmt: skip
        return outcome

    async def _check(self, live: list[InferenceService]) -> None:
        """Correct the ledger where a service holds other weights than it says: it was restarted."""
        urls = [service.url for service in live]
        async with open_engines(urls, self._api_key) as engines:
            held = await asyncio.gather(*map(_held, engines))
        for service, version in zip(live, held, strict=True):
            busy = self._publishing.locked() or self._is_catching_up(service.url)
            if version is not None and version < service.weight_version and not busy:
                logger.warning(
                    "inference service %s holds policy version %d, not %d: it is brought up to"
                    " date", service.url, version, service.weight_version,
                )  # fmt: skip
                await acknowledge(self._database, service.url, FRESH_VERSION)

    def _is_catching_up(self, url: str) -> bool:
        task = self._catching_up.get(url)
        return task is not None and not task.done()

    def _raise_failed(self) -> None:
        """Raise the error of a catch-up, or of the writing, that ended with one."""
        for url in [url for url, task in self._catching_up.items() if task.done()]:
            self._catching_up.pop(url).result()
        if self._writing is not None and self._writing.done():
            self._writing.result()

    async def _write(self, publication: Publication, *, written: bool) -> None:
        """Put a publication into its folder, from where services can then catch up."""
        if not written:
            await asyncio.to_thread(publication.write)
        # Without its tensors: they need not stay in memory.
        self._newest = PublishedWeights(publication.version, publication.folder)
        await asyncio.to_thread(self._remove_old)

    async def _finish_writing(self) -> None:
        if self._writing is not None:
            await self._writing
            self._writing = None

    def _remove_old(self) -> None:
        folders = []
        for folder in self._weights.glob("v*"):
            match = re.fullmatch(r"v(\d+)", folder.name)
            if match:
                folders.append((int(match[1]), folder))
        for _, folder in sorted(folders)[:-KEPT_FOLDERS]:
            shutil.rmtree(folder)


def _weights(output: Path) -> Path:
    return output / "weights"


async def _held(engine: Engine) -> int | None:
    """The version that a service holds; None if it does not say."""
    try:
        return await held_version(engine, timeout_s=_CHECK_TIMEOUT_S)
    except InferenceError:
        return None


async def _until_served(
    updates: set["asyncio.Task[PublishOutcome]"], current: set["asyncio.Task[PublishOutcome]"]
) -> None:
    """Wait until all updates have ended, or one has succeeded and `current` had as long again."""
    began = time.monotonic()
    left = set(updates)
    while left:
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        if any(task.result().ok for task in done):
            break
    if left & current:
        await asyncio.wait(left & current, timeout=max(_LATE_S, time.monotonic() - began))
