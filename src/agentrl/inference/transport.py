"""HTTP exchanges with one service: one body out, one answer or stream back, errors made ours.

What the bodies mean is not in here.
"""

import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from agentrl.inference.answers import error_message
from agentrl.inference.protocol import (
    KeyRefused,
    RequestRejected,
    RequestTimedOut,
    ServiceUnreachable,
)
from agentrl.limited_read import AnswerTooLarge, read_limited

_JSON_HEADERS = {"Content-Type": "application/json"}
_NOT_SERVING = frozenset({502, 503, 504})
_NO_ENTRY = frozenset({401, 403})
_LARGEST_ANSWER = 64 * 2**20  # of all routes but `/generate`, whose answers are streamed
_LARGEST_ERROR = 64 * 1024
_CONNECT_S = 10.0
_ENGINE_NAME = re.compile(r"([a-z0-9_]+)\+(?=https?://)")


def engine_name(url: str) -> str | None:
    """The name of the engine that a URL says before its scheme (`NAME+http://…`), if it does."""
    named = _ENGINE_NAME.match(url)
    return named[1] if named else None


def open_session() -> aiohttp.ClientSession:
    """A session for any number of clients of one event loop.

    No connection limit: the samplers bound their own concurrency, and a request that waits for a
    connection would only hide in a queue. Idle connections are dropped before the 5 s after which
    uvicorn closes them, so that a request never goes out on a closing connection.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
    )


class Transport:
    """Exchanges with the service at `url`.

    `session` is shared and stays open; without one the transport opens and closes its own. `url`
    may have the name of an engine before its scheme.

    Raises `ServiceUnreachable` when no complete answer came, `RequestTimedOut` past the time-out
    and `RequestRejected` when the service answers with an error.
    """

    def __init__(
        self, url: str, api_key: str | None, session: aiohttp.ClientSession | None
    ) -> None:
        self.url = url.rstrip("/")
        self._address = _ENGINE_NAME.sub("", self.url, count=1)
        self._headers = dict(_JSON_HEADERS)
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session = session
        self._owns_session = session is None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The connections."""
        if self._session is None:
            self._session = open_session()
        return self._session

    async def close(self) -> None:
        """Close the connections that this transport opened."""
        if self._owns_session and self._session is not None:
            await self._session.close()
            self._session = None

    async def call(self, method: str, path: str, body: bytes, timeout_s: float) -> bytes:
        """Send one request and return the body of its 2xx answer."""
        async with self._exchange(method, path, body, timeout_s) as response:
            return await read_limited(response, _LARGEST_ANSWER)

    async def stream(self, path: str, body: bytes) -> AsyncGenerator[bytes]:
        """POST a body and return the pieces of its 2xx answer as they come, however long it takes.

        How large a piece of meaning may be, and how long it may take, is the caller's to say.
        """
        async with self._exchange("POST", path, body, None) as response:
            async for piece in response.content.iter_any():
                yield piece

    @asynccontextmanager
    async def _exchange(
        self, method: str, path: str, body: bytes, timeout_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Map aiohttp's errors to ours, those of reading the answer included."""
        timeout = aiohttp.ClientTimeout(
            total=timeout_s, sock_connect=min(timeout_s or _CONNECT_S, _CONNECT_S)
        )
        try:
            async with self.session.request(
                method,
                self._address + path,
                data=body or None,
                headers=self._headers,
                timeout=timeout,
            ) as response:
                if response.status >= 400:
                    said = error_message(await read_limited(response, _LARGEST_ERROR))
                    message = f"{self.url}{path} answered {response.status}: {said}"
                    if response.status in _NO_ENTRY:
                        raise KeyRefused(
                            f"{message}: give its key by an environment variable that"
                            " --inference_api_key_env names"
                        )
                    if response.status in _NOT_SERVING:
                        raise ServiceUnreachable(message)
                    raise RequestRejected(message, status=response.status)
                yield response
        # A refused or unanswered connect is also a TimeoutError in aiohttp: ask for it first.
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ServiceUnreachable(f"cannot connect to {self.url}{path}: {error}") from error
        except TimeoutError as error:
            waited_s = timeout_s or _CONNECT_S
            raise RequestTimedOut(f"{self.url}{path} gave no answer in {waited_s:g} s") from error
        except AnswerTooLarge as error:
            raise ServiceUnreachable(f"{self.url}{path}: {error}") from None
        except aiohttp.ClientError as error:
            raise ServiceUnreachable(
                f"{self.url}{path} broke off: {error or type(error).__name__}"
            ) from error
