"""What an inference service can be asked for, whatever API it speaks.

The pool, publication, evaluation and checks of a deployment know this class only. Which subclass
speaks to the service at a URL is decided in `engines`; tests/inference/conformance.py has the tests
that any of them must pass.
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
    """What an engine does beside generating and loading weights from a folder.

    `weight_ways`: how it takes new weights; `pauses`: how it can be paused; `memory`: whether it
    gives its GPU memory back while a trainer uses the GPU.
    """

    weight_ways: frozenset[WeightWay]
    pauses: frozenset[PauseMode]
    memory: bool


class Engine(ABC):
    """One inference service. Engines subclass this.

    Required of every engine; a subclass that lacks one cannot be made (`TypeError`):

        the engine      `__init__` (it sets `limits`), `url`, `capabilities`, `close`, `at`
        generating      `extend`, `abort`, `flush_cache`
        how it is       `alive`, `ready`, `health`, `loads`, `fetch_limits`, `description`
        its weights     `weight_version`, `update_weights_from_disk`

    Required with a capability; `RequestRejected` says that an engine does not have it:

        any pause       `pause`, `continue_`
        "tensor"        `weight_ranks`, `update_weights_from_tensor`
        "distributed"   `weight_ranks`, `init_weights_update_group`,
                        `destroy_weights_update_group`, `update_weights_from_distributed`
        memory          `release_memory_occupation`, `resume_memory_occupation`

    The rest has an answer that suits most engines: `generate` uses `extend`, `workers` is empty
    (not for a router), `begin_weight_update` and `end_weight_update` do nothing.

    Every method raises `ServiceUnreachable` when no complete answer came, `RequestTimedOut` past
    its time-out and `RequestRejected` when the service (or the engine, before sending) refused.
    `ready`, `alive` and `health` answer False instead.
    """

    limits: ModelLimits  # what requests are checked against before they are sent

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

        `limits` are what the caller knows of the model; without them `fetch_limits` asks the
        service. `session` is shared and stays open; without one the engine opens and closes its
        own. A service that says nothing about a request for `silence_s` seconds is asked whether
        it lives.
        """

    @property
    @abstractmethod
    def url(self) -> str:
        """Where the service answers, without a slash at the end: its name in the run's ledger."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What the service can do."""

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

    # Generating

    async def generate(self, request: GenerateRequest, *, timeout_s: float = 600.0) -> Generation:
        """Generate from a token prompt; `latency_s` runs from sending to the end of the answer.

        `timeout_s` as in `extend`.

        An answer that was aborted has the tokens made so far.
        """
        began = time.monotonic()
        building = GenerationBuilder(request)
        await self.extend(building, timeout_s=timeout_s)
        return building.generation(self.url, time.monotonic() - began)

    @abstractmethod
    async def extend(self, building: GenerationBuilder, *, timeout_s: float = 600.0) -> None:
        """Generate what an answer still lacks, as a piece of it.

        Its request is `building.next_request()`, cut to what the context leaves. Tokens go into
        `building` as they arrive, each with its logprob and version, and stay there when the
        service fails before the piece is whole. Raises PromptTooLong where the context leaves no
        room, and RequestTimedOut when no token has come for `timeout_s` seconds: an answer that
        goes on may take longer.
        """

    @abstractmethod
    async def abort(self, rid: str | None = None, *, timeout_s: float = 60.0) -> None:
        """Abort the request `rid`, or all requests when it is None. An unknown rid is no error."""

    async def pause(self, mode: PauseMode, *, timeout_s: float = 60.0) -> None:
        """Stop generating. Requests that come now wait.

        Running requests end ("abort"), wait with their keys and values ("in_place"), or wait and
        have those recomputed when they go on ("retract").
        """
        raise RequestRejected(f"{self.url} cannot be paused")

    async def continue_(self, *, timeout_s: float = 60.0) -> None:
        """Go on generating after `pause`."""
        raise RequestRejected(f"{self.url} cannot be paused")

    @abstractmethod
    async def flush_cache(self, *, timeout_s: float = 60.0) -> None:
        """Empty the prefix cache. Refused while requests run or wait."""

    # Health and loads

    @abstractmethod
    async def alive(self, *, timeout_s: float = 5.0) -> bool:
        """Whether somebody answers at once, also while generation is paused."""

    @abstractmethod
    async def ready(self, *, timeout_s: float = 5.0) -> bool:
        """Whether the service takes requests of ours and generates; at once.

        False while generation is paused, when nobody answers and when our key is another.
        """

    @abstractmethod
    async def health(self, *, timeout_s: float = 30.0) -> bool:
        """Whether the service can generate; it may generate a token to find out."""

    @abstractmethod
    async def loads(self, *, timeout_s: float = 30.0) -> ServiceLoad:
        """How busy the service is."""

    @abstractmethod
    async def fetch_limits(self) -> ModelLimits:
        """Ask the service for its model's limits and check every later request against them."""

    @abstractmethod
    async def description(self, *, timeout_s: float = 30.0) -> str:
        """For people: the folder of the model that it serves, and the version of its weights."""

    # Routers, which answer for several services

    async def workers(self, *, timeout_s: float = 30.0) -> list[str]:
        """The URLs of the services behind a router; none when this is a service itself."""
        return []

    @abstractmethod
    def at(self, url: str) -> "Engine":
        """The same engine at another URL, over the same connections."""

    # Weights

    @abstractmethod
    async def weight_version(self, *, timeout_s: float = 30.0) -> int:
        """The policy version that the service holds."""

    @abstractmethod
    async def update_weights_from_disk(
        self, path: str | Path, version: int, *, flush_cache: bool = True, timeout_s: float = 600.0
    ) -> None:
        """Load the weights of a model folder that the service can read, as policy `version`.

        All weights or none: the folder is checked before anything changes.
        """

    async def weight_ranks(self) -> int:
        """How many ranks hold the service's weights, which get them from tensors or in a group.

        Raises InferenceError for a service that has several copies and no single set of ranks.
        """
        raise RequestRejected(f"{self.url} takes weights from disk only")

    async def begin_weight_update(self, *, timeout_s: float = 60.0) -> None:
        """What `update_weights_from_tensor` or `_from_distributed` brings now belongs together."""
        return

    async def end_weight_update(self, *, timeout_s: float = 60.0) -> None:
        """The weights are whole."""
        return

    async def update_weights_from_tensor(
        self,
        serialized: Sequence[str],
        *,
        version: int | None,
        flush_cache: bool,
        timeout_s: float = 600.0,
    ) -> None:
        """Load tensors in shared memory: one text of `weights.shared_tensors` per rank.

        `version` is given with the last tensors of a version and None with those before.
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
        """Join a process group in which the caller is rank 0 and the service has all other ranks.

        Answers once everybody has joined.
        """
        raise RequestRejected(f"{self.url} takes no weights in a process group")

    async def destroy_weights_update_group(self, group: str, *, timeout_s: float = 60.0) -> None:
        """Leave a process group."""
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
        """Receive `tensors` (name to dtype and shape) as rank 0 of the group broadcasts them.

        `version` as in `update_weights_from_tensor`.
        """
        raise RequestRejected(f"{self.url} takes no weights in a process group")

    # Memory

    async def release_memory_occupation(self, *, timeout_s: float = 120.0) -> None:
        """Give GPU memory back. May kill a service where requests run: see `inference.memory`."""
        raise RequestRejected(f"{self.url} cannot give its GPU memory back")

    async def resume_memory_occupation(self, *, timeout_s: float = 120.0) -> None:
        """Take it again. May kill a service that did not give it back: see `inference.memory`."""
        raise RequestRejected(f"{self.url} cannot give its GPU memory back")
