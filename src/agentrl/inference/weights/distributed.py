"""Weight updates by broadcast, with NCCL between GPUs and gloo on CPUs. No shared disk is needed.

Each service has a separate process group with the trainer, so that a service that dies or hangs
does not affect the others, and services can come and go. The trainer therefore sends the weights
once for each service.
"""

import asyncio
import socket
import threading
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch

from agentrl.inference.engine_protocol import Engine, WeightWay
from agentrl.inference.protocol import InferenceError
from agentrl.inference.weights.buckets import in_buckets
from agentrl.inference.weights.group import Backend, WeightGroup, host_store
from agentrl.inference.weights.updates import PublishedWeights, UpdateFailed

T = TypeVar("T")

_TIMEOUT_S = 120.0  # for a service to join, and to take one bucket of tensors
_LEAVE_S = 5.0


class DistributedUpdater:
    """Broadcasts from this process, and keeps one group per service between updates.

    `device`: the device that the trainer sends from, a GPU for NCCL or the CPU for gloo.
    """

    way: WeightWay = "distributed"

    def __init__(self, device: torch.device, timeout_s: float = _TIMEOUT_S) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._groups: dict[str, tuple[str, WeightGroup]] = {}

    async def load(self, engine: Engine, weights: PublishedWeights, *, flush_cache: bool) -> None:
        """See `WeightUpdater`. After a failure the next update makes a new group."""
        name, group = await self._meet(engine)
        await engine.begin_weight_update()
        try:
            buckets = list(in_buckets(weights.tensors))
            for bucket in buckets:
                last = bucket is buckets[-1]
                receiving = engine.update_weights_from_distributed(
                    {n: (str(t.dtype).removeprefix("torch."), t.shape) for n, t in bucket.items()},
                    group=name,
                    version=weights.version if last else None,
                    flush_cache=flush_cache and last,
                )
                sending = _in_thread(partial(group.send, list(bucket.values())))
                # A limit of its own: a service may hang when it has all tensors, and NCCL may wait
                # for a peer before it begins to send.
                async with asyncio.timeout(self._timeout_s):
                    await _both(receiving, sending)
            await engine.end_weight_update()
        except TimeoutError as error:
            self._abandon(engine)
            raise UpdateFailed(
                f"{engine.url} did not take a part of the weights within {self._timeout_s:g} s",
                mixed=True,
            ) from error
        except (InferenceError, RuntimeError) as error:
            name = self._abandon(engine)
            with suppress(InferenceError):  # the group is gone already
                await engine.destroy_weights_update_group(name, timeout_s=_LEAVE_S)
            raise UpdateFailed(f"{engine.url}: {error}", mixed=True) from error
        except asyncio.CancelledError:
            self._abandon(engine)
            raise

    async def close(self) -> None:
        """Leave all groups."""
        self._groups.clear()

    def _abandon(self, engine: Engine) -> str:
        """Abort the group with a service, so that the next update meets in a new one.

        Returns its name. Nobody waits for the end of the abort, which may hang itself.
        """
        name, group = self._groups.pop(engine.url)
        threading.Thread(target=group.abort, name="weight-update", daemon=True).start()
        return name

    async def _meet(self, engine: Engine) -> tuple[str, WeightGroup]:
        """Return the group with a service, and make one if there is none.

        Raises InferenceError if the service does not join.
        """
        if engine.url in self._groups:
            return self._groups[engine.url]
        name = f"agentrl-{uuid.uuid4().hex}"
        address = await asyncio.to_thread(local_address, engine.url)
        world_size = 1 + await engine.weight_ranks()
        backend: Backend = "nccl" if self._device.type == "cuda" else "gloo"
        try:
            store = host_store(address, self._timeout_s)
            joining = engine.init_weights_update_group(
                address=address,
                port=store.port,
                world_size=world_size,
                group=name,
                backend=backend,
                timeout_s=self._timeout_s,
            )
            meet = partial(
                WeightGroup,
                store,
                rank=0,
                world_size=world_size,
                name=name,
                backend=backend,
                device=self._device,
                timeout_s=self._timeout_s,
            )
            async with asyncio.timeout(self._timeout_s + _LEAVE_S):
                group = await _both(joining, _in_thread(meet))
        except (RuntimeError, TimeoutError) as error:
            raise InferenceError(
                f"{engine.url} did not meet the trainer at {address} for --weight_update"
                f" distributed: {str(error) or f'not within {self._timeout_s:g} s'}"
            ) from error
        self._groups[engine.url] = name, group
        return name, group


def local_address(url: str) -> str:
    """This machine's address as the URL's host sees it. Raises InferenceError without a route."""
    parts = urlsplit(url)
    try:
        family, kind, *_, peer = socket.getaddrinfo(
            parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as route:
            route.connect(peer)  # sends nothing: it only picks the route
            return str(route.getsockname()[0])
    except OSError as error:
        raise InferenceError(f"{url}: no route to it ({error})") from error


def _in_thread(work: Callable[[], T]) -> "asyncio.Future[T]":
    """Run blocking work in a thread that does not keep the process alive when its peer hangs."""
    future: Future[T] = Future()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weight-update", daemon=True).start()
    return asyncio.wrap_future(future)


async def _both(asked: Coroutine[Any, Any, None], working: "asyncio.Future[T]") -> T:
    """Wait for a request and for the concurrent work that it needs. The first failure is raised."""
    asking = asyncio.ensure_future(asked)
    try:
        parts: set[asyncio.Future[Any]] = {asking, working}
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_EXCEPTION)
        for part in done:
            part.result()
        return working.result()
    finally:
        asking.cancel()
        working.cancel()
        await asyncio.gather(asking, return_exceptions=True)
