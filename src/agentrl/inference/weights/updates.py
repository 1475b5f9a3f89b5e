"""One publication at many services at once: pause each, load by one of the ways, let it go on.

A service that hangs does not hold up the others for longer than `_GRACE_S` says; what became of
each is in its outcome.
"""

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

# Once a service has the weights, the others get as long again as it took, and at least so long.
_GRACE_S = 10.0
_CONTINUE_S = 10.0


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """The weights of one policy version, by the names of a Hugging Face checkpoint.

    `tensors` are on the CPU, in the dtype that is published; empty where only the folder is there.
    `folder` is absolute: services are other processes.
    """

    version: int
    folder: Path
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PublishOutcome:
    """What became of one publication at one service.

    `stall_s` is how long the service generated nothing; `error` is None when it now holds the
    version and generates again. `mixed`: it failed with some of the weights in, so that it must
    not be used before another update.
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
    """A service did not take weights. `mixed`: it has some of them."""

    def __init__(self, message: str, *, mixed: bool) -> None:
        super().__init__(message)
        self.mixed = mixed


class WeightUpdater(Protocol):
    """A way to bring weights to a service, and its name in `--weight_update`."""

    way: WeightWay

    async def load(self, engine: Engine, weights: PublishedWeights, *, flush_cache: bool) -> None:
        """Load all weights into a paused service, whose cache of the old ones is flushed if asked.

        Raises UpdateFailed when some of them may be in, another InferenceError when none is.
        """

    async def close(self) -> None:
        """Give back what is kept between updates."""


async def update_services(
    updater: WeightUpdater,
    engines: Sequence[Engine],
    weights: PublishedWeights,
    pause: UpdatePause = "retract",
) -> list[PublishOutcome]:
    """Bring the weights to every service at once; outcomes in the engines' order.

    Paused in mode "retract", running requests keep their tokens but recompute their keys and values
    under the new weights: each token's logprob is exactly that of the version it carries, and
    nothing of the old version is left in a cache. In mode "in_place" they go on at once with the
    keys and values of the old weights. Paused services always continue, also when the update
    failed. Failures are in the outcomes, not raised.
    """
    if not engines:
        return []
    began = time.monotonic()
    tasks = [asyncio.create_task(update_service(updater, c, weights, pause)) for c in engines]
    waiting = set(tasks)
    allowed_s: float | None = None
    try:
        while waiting:
            left = None if allowed_s is None else began + allowed_s - time.monotonic()
            if left is not None and left <= 0:
                break
            done, waiting = await asyncio.wait(
                waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            if allowed_s is None and any(task.result().ok for task in done):
                took = time.monotonic() - began
                allowed_s = took + max(_GRACE_S, took)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return [
        _late(engine, weights.version, began) if task.cancelled() else task.result()
        for engine, task in zip(engines, tasks, strict=True)
    ]


async def update_service(
    updater: WeightUpdater,
    engine: Engine,
    weights: PublishedWeights,
    pause: UpdatePause,
) -> PublishOutcome:
    """Bring the weights to one service, or to all behind a router: it has them when they have."""
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
        # Also after a failed pause, which may have arrived all the same.
        try:
            if mixed:
                # What runs here goes on elsewhere, from tokens that one version made.
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
    """The policy version that a service holds; the oldest one of those behind a router."""
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


def _late(engine: Engine, version: int, began: float) -> PublishOutcome:
    waited_s = time.monotonic() - began
    return PublishOutcome(
        engine.url,
        version,
        waited_s,
        f"{engine.url} did not take the weights within {waited_s:.0f} s, when others had them",
        mixed=True,
    )
