"""Threads for scorers that are not async.

The event loop's threads are not used: there are few, other code needs them too, and Python waits
for them at exit. A call that never returns blocks one thread of its scorer here, for good: nothing
can end a thread. When all threads of a scorer are blocked so, its calls fail at once.
"""

import asyncio
import contextlib
import contextvars
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from agentrl.foreign_text import shown

log = logging.getLogger(__name__)

THREADS = 64  # per scorer: most of them wait for I/O

_Work = tuple["Future[Any]", Callable[[], Any]]


@dataclass(eq=False)
class ScorerThreads:
    """The threads of one scorer, started on demand."""

    name: str
    _work: "queue.SimpleQueue[_Work]" = field(default_factory=queue.SimpleQueue, init=False)
    _idle: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0), init=False)
    _n_threads: int = field(default=0, init=False)
    _left: set["Future[Any]"] = field(default_factory=set, init=False)  # nobody waits for them

    async def run(self, function: Callable[[], Any]) -> Any:
        """Run a function in a thread; returns or raises what it does.

        Raises RuntimeError if abandoned calls block all threads.
        """
        if self._all_held():
            raise RuntimeError(self._sentence)
        outcome: Future[Any] = Future()
        context = contextvars.copy_context()
        self._work.put((outcome, lambda: context.run(function)))
        if not self._idle.acquire(blocking=False) and self._n_threads < THREADS:
            self._n_threads += 1
            threading.Thread(target=self._serve, name=f"scorer {self.name}", daemon=True).start()
        try:
            return await asyncio.wrap_future(outcome)
        except asyncio.CancelledError:
            if outcome.running():
                self._leave(outcome)
            raise

    def _all_held(self) -> bool:
        self._left = {call for call in self._left if not call.done()}
        return len(self._left) >= THREADS

    def _leave(self, call: "Future[Any]") -> None:
        """Nobody waits for a call any more, and it goes on."""
        self._left.add(call)
        if not self._all_held():
            return
        log.error("%s", self._sentence)
        with contextlib.suppress(queue.Empty):
            while True:
                waiting, _ = self._work.get_nowait()
                if waiting.set_running_or_notify_cancel():
                    waiting.set_exception(RuntimeError(self._sentence))

    @property
    def _sentence(self) -> str:
        return (
            f"{THREADS} calls of scorer {self.name!r} have not returned, which is all that it may "
            "have at once: it scores nothing more in this sampler process; give it a time limit of "
            "its own, and start the run again"
        )

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
        outcome.set_exception(RuntimeError(f"scorer {name!r} raised {shown(raised)}"))
    except BaseException as raised:
        outcome.set_exception(raised)
