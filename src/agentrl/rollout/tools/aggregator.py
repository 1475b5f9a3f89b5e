"""Tools behind an aggregator: one HTTP API in front of several servers, under a URL in `/mcpapi`.

    GET  /servers                {"servers": ["browser", ...]}
    GET  /server/{server}/tools  {"tools": [{"type": "function", "function": {...}}, ...]}
    POST /tool/{server}.{tool}   the arguments -> {"status": "success" | "error", "content": ...}

`GET /tools` lists the same tools without their servers, which calls need: it is not asked. The API
has no sessions: all records share what is behind it. Headers tell it whom a call serves.
"""

import asyncio
import time
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx2
import orjson
from mcp_types import CallToolResult

from agentrl.limited_httpx import (
    UNPACKED,
    AnswerNotRead,
    limit_answer,
    tls_context,
)
from agentrl.rollout.tools.calls import (
    RECORD_ID_KEY,
    TASK_ID_KEY,
    CallFailed,
    ToolRequest,
    ToolServerUnreachable,
)
from agentrl.rollout.tools.catalogue import Offer
from agentrl.rollout.tools.connection import ConnectFailed
from agentrl.rollout.tools.server_list import ServerSpec
from agentrl.rollout.tools.sockets import KEEPALIVE_S
from agentrl.rollout.tools.status_answers import read_answer
from agentrl.rollout.tools.wire_faults import NOT_NOW, NOT_SERVING, refusal

_RETRY_PAUSE_S = 0.25
_LISTING_TIMEOUT_S = 10.0
_HEADERS = {TASK_ID_KEY: "X-AgentRL-Task-Id", RECORD_ID_KEY: "X-AgentRL-Record-Id"}


class AggregatedServer:
    """One of an aggregator's servers."""

    per_record = False

    def __init__(self, aggregator: "Aggregator", name: str, offers: tuple[Offer, ...]) -> None:
        self.name = name
        self.resettable = aggregator.resettable
        self.offers = offers
        self._aggregator = aggregator

    @property
    def label(self) -> str:
        """The server's name in messages."""
        return f"{self.name} behind {self._aggregator.label}"

    async def call(self, call: ToolRequest) -> CallToolResult:
        """Call a tool. Raises `CallFailed` or `ToolServerUnreachable`."""
        return await self._aggregator.call(self.name, call)


class Aggregator:
    """The client of an aggregator; an async context manager.

    Entering waits up to `startup_timeout_s` for it, then raises `ToolServerUnreachable`.
    """

    def __init__(self, spec: ServerSpec, startup_timeout_s: float) -> None:
        self.servers: tuple[AggregatedServer, ...] = ()
        self.resettable = spec.resettable
        self._spec = spec
        self._startup_timeout_s = startup_timeout_s
        self._http = httpx2.AsyncClient(
            headers={**spec.headers, **UNPACKED},
            event_hooks={"response": [limit_answer]},
            timeout=httpx2.Timeout(spec.timeout_s, pool=None),
            limits=httpx2.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S
            ),
            verify=tls_context(),
        )

    async def __aenter__(self) -> Self:
        try:
            self.servers = await self._reach()
        except BaseException:
            await self._http.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    @property
    def label(self) -> str:
        """The aggregator's name in messages."""
        return self._spec.label

    async def call(self, server: str, call: ToolRequest) -> CallToolResult:
        """Call a tool of a server.

        Raises `CallFailed`, and `ToolServerUnreachable` if the aggregator is not reached or its
        answer is lost.
        """
        path = f"/tool/{quote(f'{server}.{call.tool}', safe='.')}"
        headers = {name: quote(str(call.meta[key])) for key, name in _HEADERS.items()}
        try:
            async with asyncio.timeout(self._spec.timeout_s):  # of the whole answer, not each read
                response = await self._http.post(
                    self._spec.url + path, json=call.arguments, headers=headers
                )
        except AnswerNotRead as error:
            raise CallFailed(f"The tool {call.tool} gave {error}.") from None
        except (httpx2.ReadTimeout, TimeoutError):
            text = f"The tool {call.tool} did not answer within {self._spec.timeout_s:g} s."
            try:
                await self.check()
            except ConnectFailed:
                raise self._unreachable(text, text) from None
            raise CallFailed(text) from None
        except httpx2.RequestError as error:
            reason = str(error) or type(error).__name__
            text = f"The tool server cannot be reached: {reason}"
            raise self._unreachable(reason, text) from None
        reason = f"HTTP {response.status_code}"
        if response.status_code in NOT_NOW:
            raise self._unreachable(reason, f"The tool {call.tool} failed: {reason}")
        try:
            body = orjson.loads(response.content)
        except orjson.JSONDecodeError:
            if response.status_code in NOT_SERVING:
                raise self._unreachable(reason, f"The tool {call.tool} failed: {reason}") from None
            if response.is_error:
                raise CallFailed(f"The tool {call.tool} failed: {reason}") from None
            raise CallFailed(
                f"The tool {call.tool} gave an answer that cannot be read (not JSON)."
            ) from None
        return read_answer(body, failed=response.is_error)

    async def check(self) -> None:
        """Check that the aggregator answers. Raises `ConnectFailed`."""
        await self._names()

    def _unreachable(self, why: str, text: str) -> ToolServerUnreachable:
        return ToolServerUnreachable(
            f"the tool server {self.label} is out of reach: {why}",
            self.label,
            text=text,
            probe=self.check,
        )

    async def _reach(self) -> tuple[AggregatedServer, ...]:
        """Wait for the aggregator; returns its servers. Raises `ToolServerUnreachable`."""
        began = time.monotonic()
        while True:
            try:
                return tuple(
                    [
                        AggregatedServer(self, name, await self._offers(name))
                        for name in await self._names()
                    ]
                )
            except ConnectFailed as failure:
                waited = time.monotonic() - began
                if failure.refused or waited > self._startup_timeout_s:
                    raise ToolServerUnreachable(
                        f"the aggregator {self._spec.label} could not be used, tried for "
                        f"{waited:.1f} s: {failure}",
                        self._spec.label,
                    ) from None
            await asyncio.sleep(_RETRY_PAUSE_S)

    async def _names(self) -> list[str]:
        listed = await self._get("/servers", "servers")
        return [
            str(item.get("name", item.get("id")) if isinstance(item, dict) else item)
            for item in listed
        ]

    async def _offers(self, server: str) -> tuple[Offer, ...]:
        tools = await self._get(f"/server/{quote(server, safe='')}/tools", "tools")
        functions = [tool.get("function", tool) for tool in tools if isinstance(tool, dict)]
        return tuple(
            Offer(
                server,
                str(function["name"]),
                function.get("description") or "",
                function.get("parameters") or function.get("inputSchema") or {"type": "object"},
            )
            for function in functions
            if isinstance(function, dict) and "name" in function
        )

    async def _get(self, path: str, key: str) -> list[Any]:
        """GET a list, under `key` or at the top level. Raises `ConnectFailed`."""
        try:
            response = await self._http.get(self._spec.url + path, timeout=_LISTING_TIMEOUT_S)
        except httpx2.RequestError as error:
            raise ConnectFailed.of(error) from None
        if response.is_error:
            status = response.status_code
            known = refusal(status) if status in (401, 403) else f"HTTP {status} to GET {path}"
            raise ConnectFailed(known, refused=status < 500 and status not in NOT_NOW)
        try:
            body = response.json()
        except ValueError:
            body = None
        found = body.get(key) if isinstance(body, dict) else body
        if not isinstance(found, list):
            raise ConnectFailed(f"no list `{key}` in the answer to GET {path}", refused=True)
        return found
