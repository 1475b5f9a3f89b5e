"""HTTP exchanges with one service, with aiohttp's errors mapped to those of `protocol`.

The content of bodies is opaque here.
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
_LARGEST_ANSWER = 64 * 2**20  # bytes, for all routes except `/generate`, which is streamed
_LARGEST_ERROR = 64 * 1024
_CONNECT_S = 10.0
_ENGINE_NAME = re.compile(r"([a-z0-9_]+)\+(?=https?://)")


def engine_name(url: str) -> str | None:
    """The engine that a URL names before its scheme (`NAME+http://…`); None if it names none."""
    named = _ENGINE_NAME.match(url)
    return named[1] if named else None


def open_session() -> aiohttp.ClientSession:
    """Open a session for any number of clients of one event loop.

    Connections are not limited, because samplers limit their concurrency. Idle connections are
    closed after 4 s, before uvicorn closes them after 5 s, so that no request is sent on a closing
    connection.
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

    Methods raise `ServiceUnreachable` without a complete answer, `RequestTimedOut` after the
    time-out and `RequestRejected` if the service answers with an error.
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
        """The aiohttp session, opened at first use."""
        if self._session is None:
            self._session = open_session()
        return self._session

    async def close(self) -> None:
        """Close the connections that this transport opened."""
        if self._owns_session and self._session is not None:
            await self._session.close()
            self._session = None

    async def call(self, method: str, path: str, body: bytes, timeout_s: float) -> bytes:
        """Send a request and return the body of its 2xx answer."""
        async with self._exchange(method, path, body, timeout_s) as response:
            return await read_limited(response, _LARGEST_ANSWER)

    async def stream(self, path: str, body: bytes) -> AsyncGenerator[bytes]:
        """POST a body and yield the pieces of its 2xx answer as they come, without a time limit.

        The caller limits the size and duration of the stream.
        """
        async with self._exchange("POST", path, body, None) as response:
            async for piece in response.content.iter_any():
                yield piece

    @asynccontextmanager
    async def _exchange(
        self, method: str, path: str, body: bytes, timeout_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open an exchange and map aiohttp's errors, those of reading the answer included."""
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
        # A connect error may also be a TimeoutError in aiohttp, so it is caught first.
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
