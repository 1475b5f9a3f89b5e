"""JSON bodies of requests and answers."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import orjson
from aiohttp import web

from agentrl.gateway.exchange import BadRequest

log = logging.getLogger(__name__)


async def read_body(request: web.Request) -> dict[str, Any]:
    """The JSON object in a request's body. Raises `BadRequest`."""
    try:
        body = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


@contextmanager
def parsing() -> Iterator[None]:
    """What is done with a body before anything is done for it: if it fails, the body is wrong.

    Raises `BadRequest` for errors that say less than those that name a field.
    """
    try:
        yield
    except BadRequest:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        log.debug("a request cannot be read", exc_info=error)
        raise BadRequest(f"the request cannot be read: {error}") from error


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
