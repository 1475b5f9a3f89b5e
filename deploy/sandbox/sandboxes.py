"""The sandboxes of MCP sessions.

A session is registered by the answer to its `initialize`. It gets its sandbox with the first call,
and loses it when the client ends the session, after a time without calls, or when the sandbox dies.
A session that has lost its sandbox gets no other one, because its files are gone and the model must
learn this.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from limits import Limits
from session import Result, Session, SessionGone, SessionRefused

_LOOKS_PER_IDLE_TIME = 10
_REMEMBERED = 10  # idle times for which it is known why a session has no sandbox any more


@dataclass
class Sandbox:
    """The place of one MCP session."""

    last_used: float = field(default_factory=time.monotonic)
    calls: int = 0  # at work or waiting
    session: Session | None = None
    lost: str | None = None  # why there is none any more
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, interpreter: str, program: str) -> Result:
        """Run a program. Raises SessionRefused, and SessionGone also for all later calls."""
        assert self.session is not None
        self.calls += 1
        try:
            return await self.session.run(interpreter, program)
        except SessionGone as error:
            self.lost = self.lost or str(error)
            self.session = None
            raise SessionGone(self.lost) from None
        finally:
            self.calls -= 1
            self.last_used = time.monotonic()


class Sandboxes:
    """All sandboxes of a server, as an async context manager that ends them.

    `limits`, `read_only`: of each. `max_sessions`: sandboxes at once. `idle_s`: seconds without a
    call after which one is closed.
    """

    def __init__(
        self, limits: Limits, read_only: Sequence[str], max_sessions: int, idle_s: float
    ) -> None:
        self._limits = limits
        self._read_only = read_only
        self._max_sessions = max_sessions
        self._idle_s = idle_s
        self._places: dict[str, Sandbox] = {}
        self._reaper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._reaper = asyncio.create_task(self._close_idle_ones(), name="idle sandboxes")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._reaper is not None
        self._reaper.cancel()
        await asyncio.wait({self._reaper})
        for session_id in list(self._places):
            await self.end(session_id)

    def begin(self, session_id: str) -> None:
        """Register a session that a client has opened."""
        self._places[session_id] = Sandbox()

    async def end(self, session_id: str) -> None:
        """Close the sandbox of a session that its client has ended."""
        place = self._places.pop(session_id, None)
        if place is not None:
            await self._lose(place, "its session has ended")

    async def of(self, session_id: str) -> Sandbox:
        """Return the sandbox, made at first use. Raises SessionRefused, SessionGone."""
        place = self._place(session_id)
        async with place.changing:
            if place.session is None:
                await self._make(place, self._limits, {})
            return place

    async def create(
        self, session_id: str, files: Mapping[str, str], limits: Mapping[str, Any]
    ) -> None:
        """Make the session's sandbox. Raises SessionRefused, SessionGone, ValueError."""
        place = self._place(session_id)
        async with place.changing:
            if place.session is not None:
                raise SessionRefused("this session has a sandbox already: open another session")
            await self._make(place, self._limits.lowered(limits), files)

    def _place(self, session_id: str) -> Sandbox:
        place = self._places.get(session_id)
        if place is None:
            raise SessionGone("this session has no sandbox any more: open another session")
        return place

    async def _make(self, place: Sandbox, limits: Limits, files: Mapping[str, str]) -> None:
        if place.lost is not None:
            raise SessionGone(place.lost)
        at_once = sum(other.session is not None for other in self._places.values())
        if at_once >= self._max_sessions:
            raise SessionRefused(
                f"all {self._max_sessions} sandboxes of this server are in use: try again later"
            )
        place.session = await Session.open(limits, self._read_only, files)
        place.last_used = time.monotonic()
        if place.lost is not None:  # meanwhile
            await self._lose(place, place.lost)
            raise SessionGone(place.lost)

    async def _lose(self, place: Sandbox, why: str) -> None:
        place.lost = why
        session, place.session = place.session, None
        if session is not None:
            await session.close()

    async def _close_idle_ones(self) -> None:
        while True:
            await asyncio.sleep(self._idle_s / _LOOKS_PER_IDLE_TIME)
            before = time.monotonic() - self._idle_s
            for session_id, place in list(self._places.items()):
                if place.calls or place.last_used > before:
                    continue
                if place.session is not None:
                    why = f"the sandbox was closed after {self._idle_s:g} s without a call"
                    await self._lose(place, f"{why}, and its files are gone with it")
                    place.last_used = time.monotonic()
                elif place.last_used < before - _REMEMBERED * self._idle_s:
                    self._places.pop(session_id, None)
