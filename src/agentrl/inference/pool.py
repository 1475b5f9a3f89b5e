"""Many inference services as one: which service gets a request, and what happens when one dies.

The services are given by the caller (`update`), who learns of them wherever they are registered.
One exchange with one service is `client`'s business.
"""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import aiohttp

from agentrl.inference.client import ModelLimits, SGLangClient, open_session
from agentrl.inference.protocol import (
    GenerateRequest,
    Generation,
    InferenceError,
    RequestRejected,
    ServiceLoad,
    ServiceUnreachable,
)

log = logging.getLogger(__name__)

_FIRST_PROBE_S = 0.1
_LAST_PROBE_S = 5.0
_LOADS_S = 5.0
_STICKY_RECORDS = 65_536


@dataclass(frozen=True, slots=True)
class Answer:
    """A generation and the URL of the service that made it."""

    service: str
    generation: Generation


@dataclass(slots=True, eq=False)
class _Member:
    """One service. `outstanding` counts the tokens of its requests in flight, prompt and maximum
    output; `learning` asks for its model's limits, once; `probe` runs while it is down."""

    client: SGLangClient
    up: bool = True
    outstanding: int = 0
    learning: asyncio.Task[None] | None = None
    probe: asyncio.Task[None] | None = None


@dataclass(slots=True)
class ServicePool:
    """Sends requests to the service with the fewest outstanding tokens.

    A record stays with the service that answered its last turn (its prefix is cached there) while
    that service is up. A service whose connection fails is down until `/ready` says otherwise,
    asked with back-off; a request that got no answer from it is sent to another. When none is up,
    requests wait `patience_s` seconds for one before `ServiceUnreachable` is raised.

    `limits` are what the caller knows of the model; the rest is asked of each service before its
    first request. Belongs to one event loop. Use as `async with ServicePool() as pool`.
    """

    api_key: str | None = None
    limits: ModelLimits = ModelLimits()  # noqa: RUF009  (frozen)
    request_timeout_s: float = 600.0
    patience_s: float = 60.0
    _members: dict[str, _Member] = field(default_factory=dict, init=False)
    _sticky: OrderedDict[str, str] = field(default_factory=OrderedDict, init=False)
    _session: aiohttp.ClientSession | None = field(default=None, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def __aenter__(self) -> Self:
        self._session = open_session()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop probing and close all connections."""
        members = self._members.values()
        tasks = [t for m in members for t in (m.probe, m.learning) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._members.clear()
        if self._session is not None:
            await self._session.close()
            self._session = None

    def update(self, services: Iterable[str]) -> None:
        """Use exactly these URLs from now on; requests in flight at others finish there."""
        wanted = {url.rstrip("/") for url in services}
        for url in self._members.keys() - wanted:
            probe = self._members.pop(url).probe
            if probe is not None:
                probe.cancel()
        for url in wanted - self._members.keys():
            self._members[url] = _Member(
                SGLangClient(url, self.api_key, limits=self.limits, session=self._session)
            )
        self._announce()

    @property
    def clients(self) -> list[SGLangClient]:
        """A client of each service that is up, for instance to publish weights to."""
        return [m.client for m in self._members.values() if m.up]

    async def loads(self) -> dict[str, ServiceLoad]:
        """How busy each service is that is up and says so, by URL."""
        clients = [m.client for m in self._members.values() if m.up]
        loads = await asyncio.gather(*(_load(client) for client in clients))
        return {
            client.url: load
            for client, load in zip(clients, loads, strict=True)
            if load is not None
        }

    async def wait_ready(self, timeout_s: float) -> None:
        """Return once some service says it is ready; raise ServiceUnreachable after `timeout_s`."""
        began = time.monotonic()
        while True:
            members = list(self._members.values())
            if any(await asyncio.gather(*(m.client.ready() for m in members))):
                return
            left = timeout_s - (time.monotonic() - began)
            if left <= 0:
                raise self._nobody(time.monotonic() - began)
            await asyncio.sleep(min(0.2, left))

    async def generate(self, request: GenerateRequest, *, record_id: str) -> Answer:
        """Generate at the record's service, or at the least busy one.

        Raises ServiceUnreachable when no service could be reached for `patience_s` seconds, and
        what `SGLangClient.generate` raises otherwise.
        """
        began = time.monotonic()
        tokens = len(request.input_ids) + request.sampling_params.max_new_tokens
        while True:
            member = self._choose(record_id)
            if member is None:
                await self._wait_for_change(began)
                continue
            member.outstanding += tokens
            try:
                await self._learn_limits(member)
                generation = await member.client.generate(request, timeout_s=self.request_timeout_s)
            except ServiceUnreachable as error:
                self._mark_down(member, error)
                continue
            finally:
                member.outstanding -= tokens
            return Answer(member.client.url, generation)

    async def _learn_limits(self, member: _Member) -> None:
        """Before a service's first request, so that none is sent that would kill it."""
        if member.learning is None:
            member.learning = asyncio.create_task(_ask_limits(member.client))
        try:
            # Several requests wait for one answer: a cancelled one must not take it from the rest.
            await asyncio.shield(member.learning)
        except InferenceError:
            member.learning = None
            raise

    def _choose(self, record_id: str) -> _Member | None:
        url = self._sticky.get(record_id)
        member = self._members.get(url) if url is not None else None
        if member is None or not member.up:
            up = [m for m in self._members.values() if m.up]
            if not up:
                return None
            member = min(up, key=lambda m: m.outstanding)
            self._sticky[record_id] = member.client.url
        self._sticky.move_to_end(record_id)
        while len(self._sticky) > _STICKY_RECORDS:
            self._sticky.popitem(last=False)
        return member

    async def _wait_for_change(self, began: float) -> None:
        left = self.patience_s - (time.monotonic() - began)
        with contextlib.suppress(TimeoutError):
            if left > 0:
                async with asyncio.timeout(left):
                    await self._changed.wait()
                return
        raise self._nobody(time.monotonic() - began)

    def _nobody(self, waited_s: float) -> ServiceUnreachable:
        if not self._members:
            return ServiceUnreachable(
                f"no inference service is registered after {waited_s:.0f} s: start one with"
                " `agentrl serve`, or give its URL"
            )
        return ServiceUnreachable(
            f"no inference service answered for {waited_s:.0f} s: tried"
            f" {', '.join(sorted(self._members))}; start one, or correct the URLs"
        )

    def _mark_down(self, member: _Member, error: ServiceUnreachable) -> None:
        if not member.up:
            return
        member.up = False
        log.warning("inference service %s is down: %s", member.client.url, error)
        if self._members.get(member.client.url) is member:
            member.probe = asyncio.create_task(self._probe(member))

    async def _probe(self, member: _Member) -> None:
        delay_s = _FIRST_PROBE_S
        while True:
            await asyncio.sleep(delay_s)
            if await member.client.ready():
                break
            delay_s = min(2 * delay_s, _LAST_PROBE_S)
        log.info("inference service %s is up again", member.client.url)
        member.up = True
        member.probe = None
        self._announce()

    def _announce(self) -> None:
        """Wake the requests that wait for a service."""
        self._changed.set()
        self._changed = asyncio.Event()


async def _ask_limits(client: SGLangClient) -> None:
    """Have the client check requests against the limits that its service tells, if it does."""
    try:
        await client.fetch_limits()
    except RequestRejected as error:  # a router, for instance, has no model of its own
        log.warning("%s does not tell its limits, requests go unchecked: %s", client.url, error)


async def _load(client: SGLangClient) -> ServiceLoad | None:
    try:
        return await client.loads(timeout_s=_LOADS_S)
    except InferenceError as error:
        log.debug("%s does not tell its load: %s", client.url, error)
        return None
