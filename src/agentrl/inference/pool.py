"""A pool of inference services: routing of requests, and failover when a service dies.

The caller sets the services (`update`). An `Engine` handles one exchange with one service.
"""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import aiohttp

from agentrl.inference.engine_protocol import Engine
from agentrl.inference.engines import engine_at
from agentrl.inference.generation_builder import GenerationBuilder, OnTokens
from agentrl.inference.protocol import (
    UNKNOWN_LIMITS,
    GenerateRequest,
    Generation,
    InferenceError,
    ModelLimits,
    PromptTooLong,
    RequestRejected,
    RequestTimedOut,
    ServiceLoad,
    ServiceUnreachable,
)
from agentrl.inference.transport import open_session

log = logging.getLogger(__name__)

_FIRST_PROBE_S = 0.1
_LAST_PROBE_S = 5.0
_STICKY_RECORDS = 65_536
_FIRST_RETRY_S = 0.05  # after an abort without a token
_LAST_RETRY_S = 2.0
_LOADS_S = 5.0


@dataclass(slots=True, eq=False)
class _Member:
    """One service.

    outstanding: tokens of its requests in flight, prompt and largest output
    learning: asks once for the limits of its model
    probe: runs while the service is down
    failure: why the service was down the last time
    """

    engine: Engine
    up: bool = True
    failure: ServiceUnreachable | None = None
    outstanding: int = 0
    learning: asyncio.Task[None] | None = None
    probe: asyncio.Task[None] | None = None


@dataclass(slots=True)
class RequestCounts:
    """Requests of a pool since its start.

    answered: requests that ended with an answer
    unreachable, timed_out, aborted: times that a service failed a request, which then went on at
        another one or was given up
    """

    answered: int = 0
    unreachable: int = 0
    timed_out: int = 0
    aborted: int = 0


@dataclass(slots=True)
class ServicePool:
    """Sends requests to the service with the fewest outstanding tokens.

    A record stays with the service that answered its last turn, where its prefix is cached, while
    that service is up. A service is down when its connection fails, or when it sends nothing for
    `silence_s` seconds and does not respond; it is probed with back-off until it is ready. When a
    service dies, aborts a request or sends no token for `request_timeout_s` seconds, the request
    continues at another service after the tokens so far. `ServiceUnreachable` is raised after
    `patience_s` seconds without a service that can answer.

    `limits`: the caller's knowledge of the model; unknown limits are asked of each service before
    its first request. A pool belongs to one event loop. Use `async with ServicePool() as pool`.
    """

    api_key: str | None = None
    limits: ModelLimits = UNKNOWN_LIMITS
    request_timeout_s: float = 600.0
    patience_s: float = 60.0
    silence_s: float = 10.0
    counts: RequestCounts = field(default_factory=RequestCounts, init=False)
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
        """Use exactly these URLs from now on. Requests in flight at other services finish there."""
        wanted = {url.rstrip("/") for url in services}
        for url in self._members.keys() - wanted:
            probe = self._members.pop(url).probe
            if probe is not None:
                probe.cancel()
        for url in wanted - self._members.keys():
            self._members[url] = _Member(
                engine_at(
                    url,
                    self.api_key,
                    limits=self.limits,
                    session=self._session,
                    silence_s=self.silence_s,
                )
            )
        self._announce()

    @property
    def up(self) -> list[str]:
        """The URLs of the services that are up."""
        return [url for url, member in self._members.items() if member.up]

    @property
    def outstanding(self) -> dict[str, int]:
        """By URL, the tokens of the requests in flight: their prompts and largest outputs."""
        return {url: member.outstanding for url, member in self._members.items()}

    @property
    def outage(self) -> ServiceUnreachable | None:
        """The last failure if there are services and all are down, else None."""
        errors = [member.failure for member in self._members.values() if not member.up]
        return errors[-1] if errors and len(errors) == len(self._members) else None

    async def check(self) -> None:
        """Raise `ServiceUnreachable` if there are services and all are down."""
        if (outage := self.outage) is not None:
            raise outage

    async def loads(self) -> dict[str, ServiceLoad]:
        """The load of each service that is up and reports it, by URL."""
        engines = [m.engine for m in self._members.values() if m.up]
        loads = await asyncio.gather(*(_load(engine) for engine in engines))
        return {
            engine.url: load
            for engine, load in zip(engines, loads, strict=True)
            if load is not None
        }

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until a service is ready. Raises ServiceUnreachable after `timeout_s` seconds."""
        began = time.monotonic()
        while True:
            members = list(self._members.values())
            if any(await asyncio.gather(*(m.engine.ready() for m in members))):
                return
            left = timeout_s - (time.monotonic() - began)
            if left <= 0:
                raise self._nobody(time.monotonic() - began)
            await asyncio.sleep(min(0.2, left))

    async def generate(
        self, request: GenerateRequest, *, record_id: str, on_tokens: OnTokens | None = None
    ) -> Generation:
        """Generate at the record's service or the least busy one, and at others if it fails.

        The answer ends by "stop" or "length". `on_tokens`: called with all its ids so far, as they
        come. Raises ServiceUnreachable if no service was reached
        for `patience_s` seconds or all of them failed or aborted the request for so long,
        RequestTimedOut if it was too slow at each, PromptTooLong if its prompt leaves no room in
        the context, and RequestRejected if it cannot be served.
        """
        building = GenerationBuilder(request, on_tokens)
        tokens = len(request.input_ids) + request.sampling_params.max_new_tokens
        began = progressed = time.monotonic()
        too_slow: dict[str, RequestTimedOut] = {}
        aborted_by: _Member | None = None
        retry_s = _FIRST_RETRY_S
        failing_since: float | None = None  # the first failure since the last token
        while True:
            member = self._choose(record_id, aborted_by, too_slow)
            if member is None:
                await self._wait_for_change(progressed)
                continue
            had = len(building.ids)
            member.outstanding += tokens
            aborted_by = None
            try:
                await self._learn_limits(member)
                await member.engine.extend(building, timeout_s=self.request_timeout_s)
                aborted_by = member
            except ServiceUnreachable as error:
                self.counts.unreachable += 1
                self._mark_down(member, error)
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > self.patience_s:
                    raise  # the service reports ready but fails
            except RequestTimedOut as error:
                self.counts.timed_out += 1
                too_slow[member.engine.url] = error
            except PromptTooLong:
                if not building.ids:
                    raise
                # The output so far is too close to the end of the context to be continued.
                building.piece_ending = "length"
            finally:
                member.outstanding -= tokens
            if len(building.ids) > had:
                progressed, retry_s, failing_since = time.monotonic(), _FIRST_RETRY_S, None
            if building.ending is not None:
                self.counts.answered += 1
                return building.generation(member.engine.url, time.monotonic() - began)
            self.counts.aborted += aborted_by is not None
            if aborted_by is not None and len(building.ids) == had:
                if time.monotonic() - progressed > self.patience_s:
                    raise ServiceUnreachable(
                        f"request {request.rid} was aborted by its services for"
                        f" {self.patience_s:.0f} s, last by {member.engine.url}"
                    )
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)

    async def _learn_limits(self, member: _Member) -> None:
        """Ask for the limits before a service's first request, which might crash it otherwise."""
        if member.learning is None:
            member.learning = asyncio.create_task(_ask_limits(member.engine))
        try:
            # Several requests wait for one answer; cancelling one must not cancel it for the rest.
            await asyncio.shield(member.learning)
        except InferenceError:
            member.learning = None
            raise

    def _choose(
        self,
        record_id: str,
        aborted_by: _Member | None,
        too_slow: Mapping[str, RequestTimedOut],
    ) -> _Member | None:
        """Return the service for a request of the record; None if no service is up.

        Services where the request was too slow are excluded; raises that error if only such ones
        are up. The service that has just aborted the request is the last choice.
        """
        up = [m for m in self._members.values() if m.up]
        fit = [m for m in up if m.engine.url not in too_slow]
        if not fit:
            if up:
                raise next(iter(too_slow.values()))
            return None
        member = self._members.get(self._sticky.get(record_id, ""))
        if member not in fit or member is aborted_by:
            member = min(fit, key=lambda m: (m is aborted_by, m.outstanding))
            self._sticky[record_id] = member.engine.url
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
        failures = {m.failure for m in self._members.values() if m.failure is not None}
        said = f" ({'; '.join(map(str, failures))})" if failures else ""
        return ServiceUnreachable(
            f"no inference service answered for {waited_s:.0f} s: tried"
            f" {', '.join(sorted(self._members))}{said}; start one, or correct the URLs"
        )

    def _mark_down(self, member: _Member, error: ServiceUnreachable) -> None:
        if not member.up:
            return
        member.up, member.failure = False, error
        log.warning("inference service %s is down: %s", member.engine.url, error)
        if self._members.get(member.engine.url) is member:
            member.probe = asyncio.create_task(self._probe(member))

    async def _probe(self, member: _Member) -> None:
        delay_s = _FIRST_PROBE_S
        while True:
            await asyncio.sleep(delay_s)
            if await member.engine.ready():
                break
            delay_s = min(2 * delay_s, _LAST_PROBE_S)
        log.info("inference service %s is up again", member.engine.url)
        member.up = True
        member.probe = None
        self._announce()

    def _announce(self) -> None:
        """Wake the requests that wait for a service."""
        self._changed.set()
        self._changed = asyncio.Event()


async def _ask_limits(engine: Engine) -> None:
    """Fetch the limits that the engine checks requests against, if its service reports them."""
    try:
        await engine.fetch_limits()
    except RequestRejected as error:  # a router, for instance, has no model of its own
        log.warning("%s does not tell its limits, requests go unchecked: %s", engine.url, error)
    except RequestTimedOut as error:
        raise ServiceUnreachable(str(error)) from error


async def _load(engine: Engine) -> ServiceLoad | None:
    try:
        return await engine.loads(timeout_s=_LOADS_S)
    except InferenceError as error:
        log.debug("%s does not tell its load: %s", engine.url, error)
        return None
