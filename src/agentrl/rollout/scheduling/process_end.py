"""A sampler process ends when it is to, and not before, whatever code of users does in it.

    run_to_its_end   an event loop that goes on where a task of a user's calls sys.exit
    ProcessEnd       ends the process where something of a user's does not stop

An agent may go on when it is cancelled, block the event loop, or leave threads for which Python
waits. By then its trajectory is handed back: the process may go.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

import uvloop

from agentrl.rollout.user_frames import place, place_in_thread
from agentrl.user_errors import is_user_error

T = TypeVar("T")
log = logging.getLogger(__name__)

# The time for a process to close its connections and tools when its work is done. A tool server may
# take ten seconds of it, and the launcher waits for longer.
END_S = 12.0
_TELL_S = 1.0  # to say what did not stop
_SHOWN = 5  # of it


def run_to_its_end(main: Coroutine[Any, Any, T]) -> T:
    """What `main` returns. A task that it did not make itself, as `asyncio.gather` makes them in an
    agent, may call sys.exit or raise KeyboardInterrupt: that is the error of whoever awaits it."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        loop = runner.get_loop()
        task = loop.create_task(main, name="sampler")
        while True:
            try:
                return loop.run_until_complete(task)
            except (SystemExit, KeyboardInterrupt) as left:
                if task.done():
                    raise
                log.error(
                    "a task of an agent or a scorer raised %s", type(left).__name__, exc_info=left
                )


class ProcessEnd:
    """The end of this process, by force if it comes to that. `failure`: what its work ended with,
    which is then said too."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.failure: BaseException | None = None
        self._loop = loop

    def on_signal(self, number: int, stop: Callable[[int], None], seconds: float) -> None:
        """At this signal call `stop`, and end within so many seconds. Not by a handler of the
        event loop, which never runs where an agent blocks the loop."""

        def heard(number: int, frame: FrameType | None) -> None:
            self.within(seconds)
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(stop, number)

        signal.signal(number, heard)

    def within(self, seconds: float) -> None:
        """End in so many seconds at the latest. The shortest time that is set counts.

        A thread waits for it: the event loop may stand still.
        """
        waiting = threading.Timer(seconds, self._end, [seconds])
        waiting.daemon = True
        waiting.start()

    def _end(self, seconds: float) -> None:
        status = 0 if self.failure is None else 2 if is_user_error(self.failure) else 1
        # The main thread may hold the lock of the log for ever.
        telling = threading.Thread(target=self._tell, args=[seconds], daemon=True)
        try:
            telling.start()
            telling.join(_TELL_S)
        finally:
            os._exit(status)

    def _tell(self, seconds: float) -> None:
        went_on = [*_threads(), *_tasks(self._loop)]
        went_on.sort(key=lambda told: "site-packages" in told)  # libraries after users' files
        more = f", and {len(went_on) - _SHOWN} more" if len(went_on) > _SHOWN else ""
        told = "; ".join(went_on[:_SHOWN]) or "nothing of a user's code"
        log.error(
            "the process is ended: %g s after it was told to end, this had not stopped: %s%s",
            seconds, told, more, exc_info=self.failure,
        )  # fmt: skip
        sys.stdout.flush()
        sys.stderr.flush()


def _tasks(loop: asyncio.AbstractEventLoop) -> Iterator[str]:
    """The tasks that wait in code of a user's, and where."""
    for task in asyncio.all_tasks(loop):
        where = place(_awaiting(task.get_coro()))
        if where is not None:
            yield f"{task.get_name()} ({where})"


def _threads() -> Iterator[str]:
    """The threads that a process waits for and that are in code of a user's, and where. The main
    one is, where such code blocks the event loop."""
    for thread in threading.enumerate():
        where = None if thread.daemon else place_in_thread(thread.ident)
        if where is not None:
            yield f"thread {thread.name} ({where})"


def _awaiting(work: Any) -> Iterator[FrameType]:
    """The frames of a coroutine and of what it awaits, the outermost first."""
    while work is not None:
        frame = getattr(work, "cr_frame", None) or getattr(work, "gi_frame", None)
        if frame is not None:
            yield frame
        work = getattr(work, "cr_await", None) or getattr(work, "gi_yieldfrom", None)
