"""Figures that several looks share, because each look would read much of the database for them."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")

_SHARE = 0.02  # of the time that may be spent on a figure
_MOST_S = 60.0


class Kept:
    """Results by name. One that took long to make is kept for long: for 50 times as long.

    So a page that is open all day takes a fiftieth of the database's time at the most, however
    large the run is, and that of a small run is always fresh.
    """

    def __init__(self) -> None:
        self._making = asyncio.Lock()
        self._kept: dict[str, tuple[float, Any]] = {}  # until when, and the result

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
