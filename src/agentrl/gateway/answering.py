"""The answers to a request while they are made: what they say so far, for any number of readers."""

import asyncio
from contextlib import suppress

from agentrl.gateway.exchange import ChatAnswer
from agentrl.rollout.chat.said import Said


class NotMade(Exception):
    """The session was closed before the answer was there. A client that asks again learns whether
    the attempt has ended, or goes on in another process."""


class Answering:
    """The `n` answers to a request.

    `number`: of the request in its session. `said`: what each says so far. `prompt_tokens`: 0 until
    it is known. `made`: ends with the answers when their turns are stored, or with an error.
    """

    made: "asyncio.Task[list[ChatAnswer]]"

    def __init__(self, number: int, n: int) -> None:
        self.number = number
        self.said = [Said() for _ in range(n)]
        self.prompt_tokens = 0
        self._news = asyncio.Event()

    def tell(self, index: int, said: Said) -> None:
        """Note what an answer says so far."""
        if said != self.said[index]:
            self.said[index] = said
            self._wake()

    @property
    def begun(self) -> bool:
        """Whether any of them says something."""
        return any(said != Said() for said in self.said)

    @property
    def failed(self) -> bool:
        """Whether there will be no answers."""
        made = self.made
        return made.done() and (made.cancelled() or made.exception() is not None)

    async def answers(self) -> list[ChatAnswer]:
        """The answers, as soon as they are there. Raises what `result` does."""
        await asyncio.wait({self.made})  # who waits may be cancelled, and the answers are made
        return self.result()

    def result(self) -> list[ChatAnswer]:
        """The answers, which are there. Raises their error, and `NotMade`."""
        if self.made.cancelled():
            raise NotMade("the session was closed before the answer was there")
        return self.made.result()

    def started(self, made: "asyncio.Task[list[ChatAnswer]]") -> None:
        """Note the task that makes them."""
        self.made = made
        made.add_done_callback(lambda _: self._wake())

    async def news(self, timeout_s: float) -> bool:
        """Wait until more is said or the answers are there. False if that takes too long."""
        waiting = self._news
        if self.made.done():
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await waiting.wait()
            return True
        return False

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
