"""The interface of an inference service, independent of its API.

The pool, publication, evaluation and the checks before a launch use only `Engine`. `engines`
chooses the subclass for a URL. tests/inference/conformance.py has the tests that every subclass
must pass.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import aiohttp

from agentrl.inference.generation_builder import GenerationBuilder
from agentrl.inference.protocol import (
    UNKNOWN_LIMITS,
    GenerateRequest,
    Generation,
    ModelLimits,
    RequestRejected,
    ServiceLoad,
)

PauseMode = Literal["abort", "retract", "in_place"]
WeightWay = Literal["disk", "distributed", "tensor"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The optional features of an engine.

    `weight_ways`: ways in which it takes new weights. `pauses`: modes in which it can be paused.
    `memory`: whether it can release its GPU memory while a trainer uses the GPU.
    """

    weight_ways: frozenset[WeightWay]
    pauses: frozenset[PauseMode]
    memory: bool


class Engine(ABC):
    """One inference service. Engines subclass this.

    Required of every engine; a subclass without one cannot be instantiated (`TypeError`):

        the engine      `__init__` (it sets `limits`), `url`, `capabilities`, `close`, `at`
        generation      `extend`, `abort`, `flush_cache`
        state           `alive`, `ready`, `health`, `loads`, `fetch_limits`, `description`
        weights         `weight_version`, `update_weights_from_disk`

    Required with a capability; an engine without it raises `RequestRejected`:

        any pause       `pause`, `continue_`
        "tensor"        `weight_ranks`, `update_weights_from_tensor`
        "distributed"   `weight_ranks`, `init_weights_update_group`,
                        `destroy_weights_update_group`, `update_weights_from_distributed`
        memory          `release_memory_occupation`, `resume_memory_occupation`

    The other methods have defaults: `generate` uses `extend`, `workers` returns [] (a router
    overrides it), `begin_weight_update` and `end_weight_update` do nothing, `weight_checksums`
    refuses.

    Every method raises `ServiceUnreachable` without a complete answer, `RequestTimedOut` after
    `timeout_s` seconds, and `RequestRejected` if the service, or the engine before sending,
    refuses. `alive`, `ready` and `health` return False instead.
    """

    limits: ModelLimits  # requests are checked against these before they are sent

    @abstractmethod
    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        limits: ModelLimits = UNKNOWN_LIMITS,
        session: aiohttp.ClientSession | None = None,
        silence_s: float = 10.0,
    ) -> None:
        """An engine for the service at `url`, for instance `http://127.0.0.1:30000`.

        `api_key`: sent as bearer token. `limits`: known limits of the model; `fetch_limits` asks
        the service for them. `session`: a shared session, which stays open; None: the engine opens
        and closes its own. `silence_s`: seconds without output of a request after which the service
        is asked whether it is alive.
        """

    @property
    @abstractmethod
    def url(self) -> str:
        """The service's URL without a slash at the end, which is its id in the run's ledger."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """The optional features of the service."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @abstractmethod
    async def close(self) -> None:
        """Close the connections that this engine opened."""

    # Generation

    async def generate(self, request: GenerateRequest, *, timeout_s: float = 600.0) -> Generation:
        """Generate from a token prompt. `timeout_s` as in `extend`.

        `latency_s` of the result is the time from sending to the end of the answer. An aborted
        answer has the tokens generated so far.
        """
        began = time.monotonic()
        building = GenerationBuilder(request)
        await self.extend(building, timeout_s=timeout_s)
        return building.generation(self.url, time.monotonic() - began)

    @abstractmethod
    async def extend(self, building: GenerationBuilder, *, timeout_s: float = 600.0) -> None:
        """Generate the missing rest of an answer, as one piece.

        The request is `building.next_request()`, cut to the model's context. Tokens are added to
        `building` as they arrive, with logprobs and versions, and stay there if the service fails.
        Raises PromptTooLong if the context leaves no room, and RequestTimedOut if no token arrives
        for `timeout_s` seconds; the whole answer may take longer.
        """

    @abstractmethod
    async def abort(self, rid: str | None = None, *, timeout_s: float = 60.0) -> None:
        """Abort the request `rid`; None: all requests. An unknown rid is no error."""

    async def pause(self, mode: PauseMode, *, timeout_s: float = 60.0) -> None:
        """Pause generation. New requests wait.

        Running requests end ("abort"), wait and keep their KV cache ("in_place"), or wait and have
        it recomputed when they continue ("retract").
        """
        raise RequestRejected(f"{self.url} cannot be paused")

    async def continue_(self, *, timeout_s: float = 60.0) -> None:
        """Continue generation after `pause`."""
        raise RequestRejected(f"{self.url} cannot be paused")

    @abstractmethod
    async def flush_cache(self, *, timeout_s: float = 60.0) -> None:
        """Empty the prefix cache. Raises RequestRejected while requests run or wait."""

    # State

    @abstractmethod
    async def alive(self, *, timeout_s: float = 5.0) -> bool:
        """Whether the service answers at once, also while generation is paused."""

    @abstractmethod
    async def ready(self, *, timeout_s: float = 5.0) -> bool:
        """Whether the service accepts our requests and generates; it answers at once.

        False while generation is paused, if the service does not answer, and if it refuses our key.
        """

    @abstractmethod
    async def health(self, *, timeout_s: float = 30.0) -> bool:
        """Whether the service can generate. It may generate a token to find out."""

    @abstractmethod
    async def loads(self, *, timeout_s: float = 30.0) -> ServiceLoad:
        """The load of the service."""

    @abstractmethod
    async def fetch_limits(self) -> ModelLimits:
        """Ask the service for its model's limits. Later requests are checked against them."""

    @abstractmethod
    async def description(self, *, timeout_s: float = 30.0) -> str:
        """The served model folder and the version of its weights, for display."""

    # Routers, which forward to several services

    async def workers(self, *, timeout_s: float = 30.0) -> list[str]:
        """The URLs of the services behind a router; [] if this is a service itself."""
        return []

    @abstractmethod
    def at(self, url: str) -> "Engine":
        """Return an engine of the same class for another URL, over the same session."""

    # Weights

    @abstractmethod
    async def weight_version(self, *, timeout_s: float = 30.0) -> int:
        """The policy version of the service's weights."""

    @abstractmethod
    async def update_weights_from_disk(
        self, path: str | Path, version: int, *, flush_cache: bool = True, timeout_s: float = 600.0
    ) -> None:
        """Load the weights of a model folder, which the service can read, as policy `version`.

        The folder is checked first, so that either all weights change or none. `flush_cache`: empty
        the prefix cache.
        """

    async def weight_checksums(self, *, timeout_s: float = 600.0) -> dict[str, str]:
        """A checksum of each tensor of each rank, by the service's own names.

        For services that skip what they do not know. Others refuse that, and need not have any.
        """
        raise RequestRejected(f"{self.url} has no checksums of its weights")

    async def weight_ranks(self) -> int:
        """The number of ranks with the service's weights, for updates by tensors or in a group.

        Raises InferenceError for a service with several copies of the weights, which has no single
        set of ranks.
        """
        raise RequestRejected(f"{self.url} takes weights from disk only")

    async def begin_weight_update(self, *, timeout_s: float = 60.0) -> None:
        """Begin an update. The tensors sent until `end_weight_update` form one version."""
        return

    async def end_weight_update(self, *, timeout_s: float = 60.0) -> None:
        """End an update, after all its tensors."""
        return

    async def update_weights_from_tensor(
        self,
        serialized: Sequence[str],
        *,
        version: int | None,
        flush_cache: bool,
        timeout_s: float = 600.0,
    ) -> None:
        """Load tensors from shared memory.

        `serialized`: one text of `weights.shared_tensors` per rank. `version`: given with the last
        tensors of a version, None with earlier ones. `flush_cache`: empty the prefix cache.
        """
        raise RequestRejected(f"{self.url} takes no weights from shared memory")

    async def init_weights_update_group(
        self,
        *,
        address: str,
        port: int,
        world_size: int,
        group: str,
        backend: str,
        timeout_s: float = 120.0,
    ) -> None:
        """Join a process group. The caller is rank 0, and the service has all other ranks.

        Returns when all ranks have joined. `address`, `port`: of rank 0. `group`: its name.
        """
        raise RequestRejected(f"{self.url} takes no weights in a process group")

    async def destroy_weights_update_group(self, group: str, *, timeout_s: float = 60.0) -> None:
        """Leave the process group of this name."""
        raise RequestRejected(f"{self.url} takes no weights in a process group")

    async def update_weights_from_distributed(
        self,
        tensors: Mapping[str, tuple[str, Sequence[int]]],
        *,
        group: str,
        version: int | None,
        flush_cache: bool,
        timeout_s: float = 600.0,
    ) -> None:
        """Receive `tensors` (name to dtype and shape), which rank 0 of the group broadcasts.

        `version` and `flush_cache` as in `update_weights_from_tensor`.
        """
        raise RequestRejected(f"{self.url} takes no weights in a process group")

    # Memory

    async def release_memory_occupation(self, *, timeout_s: float = 120.0) -> None:
        """Release GPU memory. It may crash a service with running requests (`inference.memory`)."""
        raise RequestRejected(f"{self.url} cannot give its GPU memory back")

    async def resume_memory_occupation(self, *, timeout_s: float = 120.0) -> None:
        """Resume GPU memory. It may crash a service that has not released it."""
        raise RequestRejected(f"{self.url} cannot give its GPU memory back")
