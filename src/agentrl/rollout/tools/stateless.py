"""Calls to servers without sessions, each as the one request that it is.

A server of a protocol version since 2026-07-28 keeps no session: a call is a POST, and its answer
is the POST's. The SDK passes it through three tasks and four streams, which take more CPU than the
exchange. Here it is awaited where it is made. All else is left to the SDK: the handshake, lists,
older versions, and redirects.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, TypeGuard

import httpx2
from mcp import MCPError
from mcp.shared.dispatcher import CallOptions
from mcp.shared.inbound import MCP_PROTOCOL_VERSION_HEADER
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp.shared.transport_context import TransportContext
from mcp_types import (
    INVALID_REQUEST,
    PARSE_ERROR,
    REQUEST_TIMEOUT,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCResponse,
    RequestId,
    jsonrpc_message_adapter,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from agentrl.limited_httpx import MAX_ANSWER_BYTES
from agentrl.rollout.tools.wire_faults import WIRE_FAULT

_NOT_TAKEN = frozenset({307, 308})  # redirects of a request that was not executed
_HEADERS = {"accept": "application/json, text/event-stream", "content-type": "application/json"}


class StatelessDispatcher(JSONRPCDispatcher[TransportContext]):
    """The SDK's dispatcher over `streams`, with calls past them where there is no session.

    `transport`: gives JSON-RPC errors for what fails below MCP. `headers`: of every request.
    """

    def __init__(
        self,
        streams: tuple[Any, Any],
        transport: httpx2.AsyncBaseTransport,
        url: str,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(*streams)
        self._transport = transport
        self._url = httpx2.URL(url)
        self._headers = {**headers, **_HEADERS}
        if self._url.userinfo:
            basic = httpx2.BasicAuth(self._url.username, self._url.password)
            [authorized] = basic.auth_flow(httpx2.Request("GET", self._url))
            self._headers["authorization"] = authorized.headers["authorization"]
        self._n_calls = 0

    async def send_raw_request(
        self,
        method: str,
        params: Mapping[str, Any] | None,
        opts: CallOptions | None = None,
        *,
        _related_request_id: RequestId | None = None,
    ) -> dict[str, Any]:
        """Send a request and return its result. Raises `MCPError`."""
        given = opts or CallOptions()
        headers = given.get("headers", {})
        stateless = headers.get(MCP_PROTOCOL_VERSION_HEADER) in MODERN_PROTOCOL_VERSIONS
        if method == "tools/call" and stateless:
            self._n_calls += 1
            call_id = f"call-{self._n_calls}"
            call = {"jsonrpc": "2.0", "id": call_id, "method": method}
            body = json.dumps({**call, "params": params}, ensure_ascii=False, allow_nan=False)
            request = httpx2.Request(
                "POST",
                self._url,
                headers={**self._headers, **headers},
                stream=httpx2.ByteStream(body.encode()),
            )
            try:
                async with asyncio.timeout(given.get("timeout")):
                    answer = await self._post(request, call_id)
            except TimeoutError:
                raise MCPError(
                    code=REQUEST_TIMEOUT, message=f"no answer within {given.get('timeout')} s"
                ) from None
            if isinstance(answer, JSONRPCError):
                error = answer.error
                raise MCPError(code=error.code, message=error.message, data=error.data)
            if answer is not None:
                return answer.result
        return await super().send_raw_request(
            method, params, opts, _related_request_id=_related_request_id
        )

    async def _post(
        self, request: httpx2.Request, call_id: str
    ) -> JSONRPCResponse | JSONRPCError | None:
        """The answer to a call; None if the server has not taken it and names another address.

        Raises `MCPError`.
        """
        response = await self._transport.handle_async_request(request)
        response.request = request
        try:
            if response.status_code in _NOT_TAKEN and response.has_redirect_location:
                return None
            if response.headers.get("content-type", "").lower().startswith("text/event-stream"):
                return await _answer_among_events(response, call_id)
            if response.headers.get("content-type", "").lower().startswith("application/json"):
                message = _message_in(await response.aread())
                if _answers(message, call_id):
                    return message
        finally:
            await response.aclose()
        raise MCPError(code=INVALID_REQUEST, message=f"HTTP {response.status_code} and no answer")


async def _answer_among_events(
    response: httpx2.Response, call_id: str
) -> JSONRPCResponse | JSONRPCError:
    try:
        async for event in httpx2.EventSource(response, max_event_size=MAX_ANSWER_BYTES):
            if event.event == "message" and event.data:
                message = _message_in(event.data)
                if _answers(message, call_id):
                    return message
    except httpx2.SSEError as error:
        raise MCPError(code=PARSE_ERROR, message=f"SSE stream failed: {error}") from None
    except httpx2.RequestError as error:
        raise MCPError(code=WIRE_FAULT, message=str(error)) from None
    raise MCPError(code=WIRE_FAULT, message="the stream of its answer ended without the answer")


def _answers(message: JSONRPCMessage, call_id: str) -> TypeGuard[JSONRPCResponse | JSONRPCError]:
    """Whether this is the answer to that call. An error may be of a call that was not read."""
    if isinstance(message, JSONRPCError):
        return message.id in (call_id, None)
    return isinstance(message, JSONRPCResponse) and message.id == call_id


def _message_in(body: str | bytes) -> JSONRPCMessage:
    try:
        return jsonrpc_message_adapter.validate_json(body, by_name=False)
    except ValidationError as error:
        raise MCPError(code=PARSE_ERROR, message=f"no JSON-RPC: {error}") from None
