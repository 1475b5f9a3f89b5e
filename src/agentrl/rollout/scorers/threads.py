"""Threads for scorers that are not async.

The event loop's threads are not used: there are few, other code needs them too, and Python waits
for them at exit. A scorer that never returns blocks only one thread here.
"""

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

THREADS = 64  # per scorer: most of them wait for I/O

_Work = tuple["Future[Any]", Callable[[], Any]]


@dataclass(eq=False)
class ScorerThreads:
    """The threads of one scorer, started on demand."""

    name: str
    _work: "queue.SimpleQueue[_Work]" = field(default_factory=queue.SimpleQueue, init=False)
    _idle: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0), init=False)
    _n_threads: int = field(default=0, init=False)

    async def run(self, function: Callable[[], Any]) -> Any:
        """Run a function in a thread; returns or raises what it does."""
        outcome: Future[Any] = Future()
        context = contextvars.copy_context()
        self._work.put((outcome, lambda: context.run(function)))
        if not self._idle.acquire(blocking=False) and self._n_threads < THREADS:
            self._n_threads += 1
            threading.Thread(target=self._serve, name=f"scorer {self.name}", daemon=True).start()
        return await asyncio.wrap_future(outcome)

    def _serve(self) -> None:
        while True:
            try:
                outcome, function = self._work.get_nowait()
            except queue.Empty:
                self._idle.release()
                outcome, function = self._work.get()
            if outcome.set_running_or_notify_cancel():
                _settle(outcome, function, self.name)
            del outcome, function  # release them before waiting


def _settle(outcome: "Future[Any]", function: Callable[[], Any], name: str) -> None:
    try:
        outcome.set_result(function())
    except StopIteration as raised:  # asyncio's futures do not accept it
        outcome.set_exception(RuntimeError(f"scorer {name!r} raised {raised!r}"))
    except BaseException as raised:
        outcome.set_exception(raised)
