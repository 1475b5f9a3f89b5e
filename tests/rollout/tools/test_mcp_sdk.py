"""The private parts of the MCP SDK that a client of ours relies on.

`Wires.client` and `StatelessDispatcher` have no public place to go: a new version of the SDK that
moves these parts would only make calls slow, or fail far from here.
"""

import inspect
from contextlib import AsyncExitStack
from typing import Any

import pytest
from mcp import Client
from mcp.client import stdio
from mcp.server.mcpserver import MCPServer
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher


async def test_a_client_opens_the_dispatcher_that_is_put_in_its_connect() -> None:
    client = Client(MCPServer("tools"))
    assert callable(client._connect)
    given: list[Any] = []

    async def connect(*arguments: Any) -> Any:
        given.extend(arguments)
        raise ConnectionError("ours")

    client._connect = connect
    with pytest.raises(ConnectionError, match="ours"):
        async with client:
            pass
    assert isinstance(given[0], AsyncExitStack), "what the dispatcher enters is left with it"


def test_a_dispatcher_takes_a_request_as_ours_passes_it_on() -> None:
    given = inspect.signature(JSONRPCDispatcher.send_raw_request).parameters
    assert list(given) == ["self", "method", "params", "opts", "_related_request_id"]
    assert given["_related_request_id"].kind is inspect.Parameter.KEYWORD_ONLY
    assert given["_related_request_id"].default is None


def test_the_pipes_of_a_process_can_be_closed() -> None:
    assert callable(stdio._close_subprocess_transport)
