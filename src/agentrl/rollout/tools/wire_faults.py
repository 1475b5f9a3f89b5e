"""Error codes that our transport gives in place of an answer that did not come."""

import json

import httpx2

from agentrl.limited_httpx import AnswerNotRead

WIRE_FAULT = -32050  # the server's answer did not come, and it may have had the request
REFUSED = -32051
SESSION_GONE = -32052
NOT_READ = -32053  # an answer that is too large, or compressed
OUTAGE = -32054  # not the record's doing, whosever the session is

NOT_SERVING = frozenset({502, 503, 504, *range(520, 531)})
"""HTTP statuses of proxies, Cloudflare's included, while the server is away."""
NOT_NOW = frozenset({408, 429})
"""HTTP statuses of servers and proxies that have not taken a request, because of others."""


class FaultIsolation(httpx2.AsyncBaseTransport):
    """Turns failures below MCP into JSON-RPC error answers.

    In the SDK's transport, a failed connection ends the whole session with the calls of all other
    records. An error answer ends only its own call. The SDK also drops the HTTP status, which these
    answers contain.
    """

    def __init__(self, transport: httpx2.AsyncBaseTransport) -> None:
        self._transport = transport

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            response = await self._transport.handle_async_request(request)
            if response.status_code in (401, 403):
                await response.aclose()
                return _json_rpc_error(request, REFUSED, refusal(response.status_code))
            if response.status_code in NOT_SERVING:
                await response.aclose()
                return _json_rpc_error(request, WIRE_FAULT, f"HTTP {response.status_code}")
            if response.status_code in NOT_NOW:
                await response.aclose()
                return _json_rpc_error(request, OUTAGE, f"HTTP {response.status_code}")
            if "mcp-session-id" in request.headers and await _forgot_session(response):
                await response.aclose()
                return _json_rpc_error(request, SESSION_GONE, "the session is gone")
            if response.headers.get("content-type", "").lower().startswith("application/json"):
                await response.aread()  # read here, to catch a connection lost half way
            return response
        except AnswerNotRead as error:
            return _json_rpc_error(request, NOT_READ, f"it gave {error}")
        except httpx2.RequestError as error:
            return _json_rpc_error(request, WIRE_FAULT, str(error) or type(error).__name__)


async def _forgot_session(response: httpx2.Response) -> bool:
    """Whether the server does not know the request's session.

    The protocol's status is 404. Servers based on the TypeScript SDK's examples answer 400, and
    name no request: one that is named may have run.
    """
    if response.status_code != 400:
        return response.status_code == 404
    body = await response.aread()
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    names_request = isinstance(answer, dict) and answer.get("id") is not None
    return not names_request and b"session" in body.lower()


def refusal(status: int) -> str:
    """A sentence for HTTP status 401 or 403."""
    return f"HTTP {status}, the server wants another bearer token (--mcp_auth_token)"


def _json_rpc_error(request: httpx2.Request, code: int, message: str) -> httpx2.Response:
    error = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}}
    return httpx2.Response(502, json=error, request=request)
