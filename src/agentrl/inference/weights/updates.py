"""Updates the weights of many services at once: each is paused, loaded and continued."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from agentrl.inference.engine_protocol import Engine, WeightWay
from agentrl.inference.protocol import InferenceError, RequestRejected

UpdatePause = Literal["retract", "in_place"]

_GRACE_S = 10.0  # at least, for a service that does not have the weights when another has
_CONTINUE_S = 10.0


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """The weights of one policy version, by the names of a Hugging Face checkpoint.

    `tensors` are on the CPU, in the published dtype; empty if only the folder exists. `folder` is
    absolute, because services are other processes.
    """

    version: int
    folder: Path
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PublishOutcome:
    """The outcome of a weight update at one service.

    stall_s: seconds in which the service generated nothing
    error: None if the service has the version and generates again
    mixed: the service has only some of the new weights and must not be used before another update
    """

    url: str
    version: int
    stall_s: float
    error: str | None
    mixed: bool = False

    @property
    def ok(self) -> bool:
        return self.error is None


class UpdateFailed(InferenceError):
    """A service did not load the weights. `mixed`: it may have loaded some of them."""

    def __init__(self, message: str, *, mixed: bool) -> None:
        super().__init__(message)
        self.mixed = mixed


class WeightUpdater(Protocol):
    """A transport of weights to a service. `way` is its name in `--weight_update`."""

    way: WeightWay

    async def load(self, engine: Engine, weights: PublishedWeights, *, flush_cache: bool) -> None:
        """Load all weights into a paused service. `flush_cache` also empties its KV cache.

        Raises UpdateFailed if some weights may be loaded, another InferenceError if none are.
        """

    async def close(self) -> None:
        """Release the resources that are kept between updates."""


class UpdateRound:
    """Updates of any number of services to one version, each on its own.

    Once a service has the version, the others get the same time again, at least _GRACE_S, and are
    then cut off. A service that hangs thus delays neither the others nor the caller for long.
    """

    def __init__(
        self, updater: WeightUpdater, weights: PublishedWeights, pause: UpdatePause = "retract"
    ) -> None:
        """With pause "retract" running requests keep their tokens and recompute keys and values
        with the new weights, so that each logprob is exact for the version of its token. With
        "in_place" they continue with the keys and values of the old weights.
        """
        self._updater = updater
        self._weights = weights
        self._pause: UpdatePause = pause
        self._began = time.monotonic()
        self._end: float | None = None  # by the loop's clock
        self._limits: set[asyncio.Timeout] = set()

    async def update(self, engine: Engine) -> PublishOutcome:
        """Update a service, and continue it also if that failed. Failures are in the outcome."""
        limit = asyncio.timeout_at(self._end)
        try:
            async with limit:
                self._limits.add(limit)
                outcome = await update_service(self._updater, engine, self._weights, self._pause)
        except TimeoutError:
            return self._late(engine)
        finally:
            self._limits.discard(limit)
        if outcome.ok and self._end is None:
            took = time.monotonic() - self._began
            self._end = asyncio.get_running_loop().time() + max(_GRACE_S, took)
            for other in self._limits:
                other.reschedule(self._end)
        return outcome

    def _late(self, engine: Engine) -> PublishOutcome:
        waited_s = time.monotonic() - self._began
        return PublishOutcome(
            engine.url,
            self._weights.version,
            waited_s,
            f"{engine.url} did not take the weights within {waited_s:.0f} s, when others had them",
            mixed=True,
        )


async def update_services(
    updater: WeightUpdater,
    engines: Sequence[Engine],
    weights: PublishedWeights,
    pause: UpdatePause = "retract",
) -> list[PublishOutcome]:
    """Update all services concurrently. Returns the outcomes in the order of `engines`."""
    updates = UpdateRound(updater, weights, pause)
    return list(await asyncio.gather(*map(updates.update, engines)))


async def update_service(
    updater: WeightUpdater,
    engine: Engine,
    weights: PublishedWeights,
    pause: UpdatePause,
) -> PublishOutcome:
    """Update one service, or all services behind a router, which succeeds if all of them do."""
    try:
        workers = await engine.workers()
    except InferenceError as error:
        return PublishOutcome(engine.url, weights.version, 0.0, str(error))
    if not workers:
        return await _update_one(updater, engine, weights, pause)
    outcomes = await asyncio.gather(
        *(_update_one(updater, engine.at(url), weights, pause) for url in workers)
    )
    errors = [f"{outcome.url}: {outcome.error}" for outcome in outcomes if not outcome.ok]
    return PublishOutcome(
        engine.url,
        weights.version,
        max(outcome.stall_s for outcome in outcomes),
        "; ".join(errors) if errors else None,
        any(outcome.mixed for outcome in outcomes),
    )


async def _update_one(
    updater: WeightUpdater,
    engine: Engine,
    weights: PublishedWeights,
    pause: UpdatePause,
) -> PublishOutcome:
    can = engine.capabilities
    if updater.way not in can.weight_ways or pause not in can.pauses:
        return PublishOutcome(
            engine.url,
            weights.version,
            0.0,
            f"{engine.url} cannot be updated by --weight_update {updater.way} with"
            f" --weight_update_pause {pause}: it has {' and '.join(sorted(can.weight_ways))}, with"
            f" {' and '.join(sorted(can.pauses))}",
        )
    errors: list[str] = []
    mixed = False
    began = time.monotonic()
    try:
        await engine.pause(pause)
        try:
            await _load(updater, engine, weights, flush_cache=pause == "retract")
        except UpdateFailed as error:
            mixed = error.mixed
            raise
        except asyncio.CancelledError:
            mixed = True
            raise
    except InferenceError as error:
        errors.append(str(error))
    finally:
        # Also after a pause that failed, because the service may have received it.
        try:
            if mixed:
                # Requests continue at another service, from tokens of a single version.
                await engine.abort(timeout_s=_CONTINUE_S)
            await engine.continue_(timeout_s=_CONTINUE_S)
        except InferenceError as error:
            errors.append(str(error))
    return PublishOutcome(
        engine.url,
        weights.version,
        time.monotonic() - began,
        "; ".join(errors) if errors else None,
        mixed,
    )


async def held_version(engine: Engine, *, timeout_s: float) -> int:
    """The policy version that a service holds; for a router the oldest of its services."""
    workers = await engine.workers(timeout_s=timeout_s)
    services = [engine.at(url) for url in workers] or [engine]
    return min(
        await asyncio.gather(*(service.weight_version(timeout_s=timeout_s) for service in services))
    )


async def _load(
    updater: WeightUpdater, engine: Engine, weights: PublishedWeights, *, flush_cache: bool
) -> None:
    try:
        await updater.load(engine, weights, flush_cache=flush_cache)
    except RequestRejected:
        # SGLang also answers 400 when the weights are in but its cache could not be flushed.
        if await engine.weight_version() != weights.version:
            raise
        await engine.flush_cache()
