"""Handles HTTP requests before and after the MCP SDK: the token, and begin and end of sessions.

The SDK tells tools which session calls them, but not when a session begins or ends.
"""

import hmac
import ipaddress
import socket

from sandboxes import Sandboxes
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SESSION_HEADER = "mcp-session-id"


def is_loopback(host: str) -> bool:
    """Whether a server that binds to `host` is reachable from its own machine only."""
    try:
        found = socket.getaddrinfo(host or None, None, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    addresses = {str(address[0]).partition("%")[0] for *_, address in found}
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


class Gate:
    """An ASGI application around the MCP server's. `token`: required of clients, if not None."""

    def __init__(self, app: ASGIApp, sandboxes: Sandboxes, token: str | None) -> None:
        self._app = app
        self._sandboxes = sandboxes
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if not self._may_enter(headers.get("authorization", "")):
            await PlainTextResponse("another bearer token is needed", 401)(scope, receive, send)
            return
        session = headers.get(_SESSION_HEADER)

        async def watched_send(message: Message) -> None:
            if session is None and message["type"] == "http.response.start":
                begun = Headers(raw=message["headers"]).get(_SESSION_HEADER)
                if begun is not None and message["status"] == 200:
                    self._sandboxes.begin(begun)
            await send(message)

        await self._app(scope, receive, watched_send)
        if scope["method"] == "DELETE" and session is not None:
            await self._sandboxes.end(session)

    def _may_enter(self, authorization: str) -> bool:
        if not self._token:
            return True
        expected = f"Bearer {self._token}"
        return hmac.compare_digest(authorization.encode(), expected.encode())
