"""The demo's tools (`warehouse_tools.py`) over streamable HTTP.

No session carries state, so clients may share one session among many tasks, and reconnect at any
time.

    python assets/demo/tool_server.py --port 8931        # then http://127.0.0.1:8931/mcp

Clients must show the bearer token in TOOLS_TOKEN, if it is set. It must be set where other machines
reach --host.
"""

import argparse
import os
import sys

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from warehouse_tools import build_server

from agentrl import KeyNeeded, admits, require_key

TOKEN_VARIABLE = "TOOLS_TOKEN"


class Gate:
    """An ASGI application around the server's: whoever does not show the token is refused."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shown = Headers(scope=scope).get("authorization") if scope["type"] == "http" else None
        if scope["type"] == "http" and not admits(shown, self._token):
            await PlainTextResponse("another bearer token is needed", 401)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def main() -> None:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0, help="the world's: as given to make_tasks")
    parser.add_argument("--seconds", type=float, default=0.0, help="median duration of a call")
    args = parser.parse_args()
    token = os.environ.get(TOKEN_VARIABLE)
    try:
        how = f"set {TOKEN_VARIABLE} to one, and MCP_AUTH_TOKEN in the runs"
        require_key(args.host, token, how)
    except KeyNeeded as error:
        sys.exit(f"tool_server.py: {error}")
    app: ASGIApp = build_server(args.seed, args.seconds).streamable_http_app(
        host=args.host, stateless_http=True, json_response=True
    )
    uvicorn.run(
        Gate(app, token) if token else app, host=args.host, port=args.port, log_level="warning"
    )


if __name__ == "__main__":
    main()
