"""An asyncio loop in a separate thread, for the database and HTTP work of a trainer process.

The training thread submits coroutines and collects results. The loop keeps leases alive while a
step computes. Errors of watched coroutines are raised in the training thread, at its next `check`,
`result` or `run`.
"""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

_CHECK_SECONDS = 0.2


class BackgroundLoop:
    """A context manager; leaving it cancels what still runs and waits for its end."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="background-io", daemon=True)
        self._watched: list[Future[Any]] = []

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; its result or error is in the future."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def watch(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine that runs beside training. Every wait here raises its error."""
        future = self.submit(coroutine)
        self._watched.append(future)
        return future

    def check(self) -> None:
        """Raise the error of a watched coroutine that has ended with one."""
        running = []
        for future in self._watched:
            if not future.done():
                running.append(future)
            elif not future.cancelled():
                future.result()
        self._watched = running

    def result(self, future: Future[T]) -> T:
        """Wait for a future, and for errors of watched coroutines meanwhile."""
        while not future.done():
            self.check()
            wait([future], timeout=_CHECK_SECONDS)
        return future.result()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it."""
        return self.result(self.submit(coroutine))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.submit(_cancel_others()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


async def _cancel_others() -> None:
    """Cancel every task of this loop but this one, and wait until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
