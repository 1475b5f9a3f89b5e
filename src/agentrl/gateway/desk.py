"""Where clients on other machines wait for tasks, and attempts for clients.

    a client asks -> wanted -> the scheduler claims a slot -> the attempt's session meets the client

Nothing is claimed while no client asks. A client that has gone when its session is handed to it
leaves the session to the next one.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from agentrl.gateway.sessions import RunOver, Session
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.scheduling.attempt import HandedBack

_MEET_S = 2.0  # the longest time that an attempt waits for a client
_SETTLE_S = 60.0
_RECENT_S = 60.0


@dataclass(eq=False, slots=True)
class Offer:
    """A session for a client. `accepted`: whether the client has got it."""

    session: Session
    accepted: "asyncio.Future[bool]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def answer(self, accepted: bool) -> None:
        """Say whether the client has got the session."""
        if not self.accepted.done():
            self.accepted.set_result(accepted)


@dataclass(eq=False, slots=True)
class _Client:
    """A client that waits. `line`: the line of the tasks that it wants, if any."""

    line: str | None
    offer: "asyncio.Future[Offer]"


class Desk:
    """The clients and the attempts that wait for each other; a `Demand`.

    `kind`: makes the attempts. `place`: of the gateway.
    """

    kind: type[AsyncSampler]

    def __init__(self, place: str) -> None:
        self.place = place
        self.is_over = False
        self._clients: list[_Client] = []
        self._changed = asyncio.Event()
        self._coming: dict[str, str | None] = {}  # attempts on their way, by Record
        self._resuming: set[str] = set()
        self._is_ready = False  # whether it is known what an earlier process has left
        self._tell: Callable[[], None] = lambda: None
        self._asked_at = -_RECENT_S

    # -- for clients

    async def ask(self, line: str | None, patience_s: float) -> Offer | None:
        """A session of an attempt at the next task that is due, or at this line of the tasks.

        Returns None if none is due within `patience_s`. Raises `RunOver`. The caller answers the
        offer.
        """
        if self.is_over:
            raise RunOver
        client = _Client(line, asyncio.get_running_loop().create_future())
        self._clients.append(client)
        self._wake()
        try:
            await asyncio.wait({client.offer}, timeout=patience_s)
            return client.offer.result() if client.offer.done() else None
        except asyncio.CancelledError:
            if client.offer.done() and client.offer.exception() is None:
                client.offer.result().answer(False)
            raise
        finally:
            client.offer.cancel()
            self._asked_at = time.monotonic()
            if client in self._clients:
                self._clients.remove(client)

    @property
    def n_waiting(self) -> int:
        """How many clients wait."""
        return len(self._clients)

    @property
    def is_in_use(self) -> bool:
        """Whether a client waits, or did a short time ago."""
        return bool(self._clients) or time.monotonic() - self._asked_at < _RECENT_S

    async def settled(self, session: str) -> None:
        """Wait until a session that an earlier process has left is there again, if it has.

        Raises `TimeoutError` if that takes too long.
        """
        async with asyncio.timeout(_SETTLE_S):
            while not self._is_ready or session in self._resuming:
                await self._changed.wait()

    # -- for attempts

    async def meet(self, session: Session, line: str) -> None:
        """Hand a session to a client. Raises `HandedBack` if there is none any more."""
        deadline = time.monotonic() + _MEET_S
        while True:
            client = await self._next_client(line, deadline)
            offer = Offer(session)
            client.offer.set_result(offer)
            if await offer.accepted:
                break
        self.is_there(session.id)

    def is_there(self, session: str) -> None:
        """A session has met its client, or has been taken up again."""
        self._coming.pop(session, None)
        self._resuming.discard(session)
        self._wake()

    async def _next_client(self, line: str, deadline: float) -> _Client:
        while True:
            for client in self._clients:
                if client.line in (None, line) and not client.offer.done():
                    self._clients.remove(client)
                    return client
            left = deadline - time.monotonic()
            if left <= 0:
                raise HandedBack("no client asks for it any more")
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                continue

    # -- for the scheduler: see `Demand`

    def on_change(self, call: Callable[[], None]) -> None:
        """Call this whenever more attempts are wanted."""
        self._tell = call

    def wanted(self) -> Mapping[str | None, int]:
        """How many attempts are wanted beside those on their way, by line."""
        wanted = Counter(client.line for client in self._clients if not client.offer.done())
        n_coming = len(self._coming)
        for line in sorted(wanted, key=lambda line: line is None):
            met = min(n_coming, wanted[line])
            wanted[line] -= met
            n_coming -= met
        return +wanted

    def resumed(self, records: Collection[str]) -> None:
        """These attempts were taken over from an earlier process, and are about to go on."""
        self._resuming.update(records)
        self._is_ready = True
        self._wake()

    def begun(self, record: str) -> None:
        """An attempt was begun for somebody who asked."""
        self._coming[record] = None

    def ended(self, record: str) -> None:
        """An attempt has ended, whatever it came to."""
        self.is_there(record)

    def over(self) -> None:
        """The run is finished: tell all who wait."""
        self.is_over = True
        for client in self._clients:
            if not client.offer.done():
                client.offer.set_exception(RunOver())
        self._clients.clear()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._tell()
