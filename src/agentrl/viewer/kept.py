"""Figures that several looks share, because each look would read much of the database for them."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")

_SHARE = 0.02  # of the time that may be spent on a figure
_MOST_S = 60.0
_PATIENCE_S = 1.0  # of a page that can do without a figure


class Kept:
    """Results by name. One that took long to make is kept for long: for 50 times as long.

    So a page that is open all day takes a fiftieth of the database's time at the most, however
    large the run is, and that of a small run is always fresh.
    """

    def __init__(self) -> None:
        self._making = asyncio.Lock()
        self._kept: dict[str, tuple[float, Any]] = {}  # until when, and the result
        self._going_on: dict[str, asyncio.Task[Any]] = {}

    async def get(self, name: str, make: Callable[[], Awaitable[T]], at_least_s: float = 0.0) -> T:
        """The result of `make`, as it was made now or some time ago; kept for so long at least."""
        async with self._making:
            until, result = self._kept.get(name, (0.0, None))
            began = time.monotonic()
            if began >= until:
                result = await make()
                took = time.monotonic() - began
                stays = max(at_least_s, min(_MOST_S, took / _SHARE))
                self._kept[name] = (began + took + stays, result)
        kept: T = result
        return kept

    async def get_soon(
        self, name: str, make: Callable[[], Awaitable[T]], at_least_s: float = 0.0
    ) -> T | None:
        """As `get`, of what may take longer to make than a page has: the page waits a second, then
        has the result before, or None, while `make` goes on for the next look."""
        until, _ = self._kept.get(name, (0.0, None))
        if time.monotonic() >= until:
            making = self._going_on.get(name)
            if making is None:
                # In a context of its own: the page's has the time that the database may take.
                going_on = self._go_on(name, make, at_least_s)
                making = asyncio.create_task(going_on, name=name, context=Context())
                self._going_on[name] = making
            await asyncio.wait([making], timeout=_PATIENCE_S)
            if making.done() and not making.cancelled():
                making.result()  # raises what it raised
        kept: T | None = self._kept.get(name, (0.0, None))[1]
        return kept

    async def _go_on(self, name: str, make: Callable[[], Awaitable[T]], at_least_s: float) -> None:
        began = time.monotonic()
        try:
            result = await make()
            took = time.monotonic() - began
            self._kept[name] = (began + took + max(at_least_s, took / _SHARE), result)
        finally:
            del self._going_on[name]

    async def close(self) -> None:
        """End what still goes on."""
        going_on = list(self._going_on.values())
        for making in going_on:
            making.cancel()
        await asyncio.gather(*going_on, return_exceptions=True)
