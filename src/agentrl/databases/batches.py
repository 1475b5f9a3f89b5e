"""Requests of one process that wait at the same time are sent together, one batch at a time.

A command to MongoDB costs sender and server far more than a document in it. So a process has at
most one batch of a kind in flight. A request that arrives meanwhile waits for the next batch, with
all others that arrive.

A process that works on many records also waits a moment for others before it sends (`Pace`). The
moments are the same for all kinds, so that the server makes their writes durable together. A
process with one record at a time never waits, nor does a request that is `at_once`: somebody waits
for it who would notice the moment.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from agentrl.databases.connection import DatabaseUnreachable

Request = TypeVar("Request")
Answer = TypeVar("Answer")


MOMENT_S = 0.05  # the longest wait for others
_MOMENT_OF_A_RECORD_S = 0.0004


class Pace:
    """The common moments at which a process sends its batches.

    `at_once`: returns the number of records in progress. A moment is short compared with the time
    of a turn, in which each of them makes about one request. `times`: how many times as far apart
    moments are, for requests that nobody waits for.
    """

    def __init__(self, at_once: Callable[[], int], times: int = 1) -> None:
        self._at_once = at_once
        self._times = times
        self._next = 0.0  # by the monotonic clock

    async def moment(self, hurry: asyncio.Event) -> None:
        """Wait for the next moment, or for `hurry`. It comes the later, the more records are in
        progress."""
        now = time.monotonic()
        if self._next <= now:
            others = max(0, self._at_once() - 1)
            self._next = now + self._times * min(others * _MOMENT_OF_A_RECORD_S, MOMENT_S)
        if self._next > now:
            with suppress(TimeoutError):
                await asyncio.wait_for(hurry.wait(), self._next - now)


@dataclass(frozen=True, slots=True, eq=False)
class Waiter(Generic[Request, Answer]):
    """A request, and the future of its answer. It is done early if the caller was cancelled."""

    request: Request
    done: "asyncio.Future[Answer]"

    def answer(self, answer: Answer) -> None:
        """Answer the caller, unless it was cancelled."""
        if not self.done.done():
            self.done.set_result(answer)

    def refuse(self, error: BaseException) -> None:
        """Raise `error` in the caller, unless it was cancelled."""
        if not self.done.done():
            self.done.set_exception(error)


class Batches(Generic[Request, Answer]):
    """Requests of one kind.

    `send` sends a batch and answers its waiters. If `send` raises, each part is sent alone and gets
    its own error. If the database is away, all callers get that error. So a request must be
    repeatable. `part_of`: requests with the same result stay together; None: each is a part.
    `name`: of the requests, for the task. `pace`: when to send; None: at once.
    """

    def __init__(
        self,
        send: Callable[[Sequence[Waiter[Request, Answer]]], Awaitable[None]],
        name: str,
        pace: Pace | None = None,
        part_of: Callable[[Request], Hashable] | None = None,
    ) -> None:
        self._send_batch = send
        self._name = name
        self._pace = pace
        self._part_of = part_of or id
        self._waiting: list[Waiter[Request, Answer]] = []
        self._hurry = asyncio.Event()  # one that waits is to be sent at once
        self._sender: asyncio.Task[None] | None = None

    async def ask(self, request: Request, *, at_once: bool = False) -> Answer:
        """The answer to `request`. A caller that is cancelled in time withdraws its request.

        `at_once`: it is sent, with those that wait already, as soon as no batch is in flight.
        """
        waiter: Waiter[Request, Answer] = Waiter(
            request, asyncio.get_running_loop().create_future()
        )
        self._waiting.append(waiter)
        if at_once:
            self._hurry.set()
        if self._sender is None:
            self._sender = asyncio.create_task(self._send(), name=self._name)
        return await waiter.done

    def hurry(self) -> None:
        """Send those that wait as soon as no batch is in flight."""
        if self._waiting:
            self._hurry.set()

    async def _send(self) -> None:
        """Send batch after batch until nobody waits."""
        batch: list[Waiter[Request, Answer]] = []
        try:
            while self._waiting:
                if self._pace is not None:
                    await self._pace.moment(self._hurry)
                self._hurry.clear()
                batch = [waiter for waiter in self._waiting if not waiter.done.done()]
                self._waiting = []
                if not batch:
                    return
                await self._send_isolated(batch)
        finally:
            self._sender = None
            for waiter in (*batch, *self._waiting):  # not empty only if this task was cancelled
                waiter.done.cancel()
            self._waiting = []

    async def _send_isolated(self, batch: Sequence[Waiter[Request, Answer]]) -> None:
        """Send a batch, so that a request that cannot be sent fails alone."""
        try:
            await self._send_batch(batch)
        except Exception as error:
            parts: dict[Hashable, list[Waiter[Request, Answer]]] = {}
            for waiter in batch:
                parts.setdefault(self._part_of(waiter.request), []).append(waiter)
            if len(parts) == 1 or isinstance(error, DatabaseUnreachable):
                for waiter in batch:
                    waiter.refuse(error)
                return
            for part in parts.values():
                await self._send_isolated(part)
