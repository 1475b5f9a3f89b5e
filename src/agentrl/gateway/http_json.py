"""JSON bodies of requests and answers."""

from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

from agentrl.gateway.exchange import BadRequest


async def read_body(request: web.Request) -> dict[str, Any]:
    """The JSON object in a request's body. Raises `BadRequest`."""
    try:
        body = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def json_response(
    body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """A response with a JSON body."""
    return web.Response(
        body=orjson.dumps(body),
        status=status,
        content_type="application/json",
        headers=headers,
    )
