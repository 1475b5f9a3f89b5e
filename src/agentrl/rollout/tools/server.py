"""One MCP server: the sessions that all records share, and those of single records."""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from mcp_types import CallToolResult, Tool

from agentrl.configs import ConfigError
from agentrl.rollout.tools.calls import ToolRequest, ToolServerUnreachable
from agentrl.rollout.tools.catalogue import CLOSE_TOOL, CREATE_TOOL, Offer
from agentrl.rollout.tools.connection import ConnectFailed
from agentrl.rollout.tools.server_list import ServerSpec
from agentrl.rollout.tools.session import SDK_FAILURES, Ownership, Session
from agentrl.rollout.tools.transports import ToolClient, Wires

log = logging.getLogger(__name__)

_RETRY_PAUSE_S = 0.25
_HANDSHAKE_TIMEOUT_S = 10.0
_MOST_PAGES = 1000  # of a server's list of tools


class MCPServer:
    """A tool server; an async context manager.

    Entering waits up to `startup_timeout_s` for it, then raises `ToolServerUnreachable`. It raises
    `ConfigError` if the server is an object that cannot be loaded, or is to be what it cannot be.
    """

    def __init__(self, spec: ServerSpec, startup_timeout_s: float) -> None:
        self.spec = spec
        self.offers: tuple[Offer, ...] = ()
        self._startup_timeout_s = startup_timeout_s
        limit_s = float("inf") if spec.started_here else _HANDSHAKE_TIMEOUT_S  # it listens already
        self._handshake_s = min(startup_timeout_s, limit_s)
        self._wires = Wires(spec, self._handshake_s)
        self._stack = AsyncExitStack()
        self._shared: list[Session] = []

    @property
    def name(self) -> str:
        """The name in flags and config file."""
        return self.spec.name

    @property
    def label(self) -> str:
        """The server's name in messages."""
        return self.spec.label

    @property
    def creates_sessions(self) -> bool:
        """Whether the server has a tool `create_session`, which is called for each record."""
        return any(offer.tool == CREATE_TOOL for offer in self.offers)

    @property
    def per_record(self) -> bool:
        """Whether each record has its own session."""
        return self.spec.per_record or self.creates_sessions

    @property
    def resettable(self) -> bool | None:
        """Whether a new session begins as the last one began; None if that is not told."""
        return self.spec.resettable

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._wires.close)
            await self._open_wires()
            async with AsyncExitStack() as first:
                session, self.offers = await self._reach(first)
                if self.resettable and not self.per_record:
                    raise ConfigError(
                        f"the tool server {self.name} is resettable, and all records share its "
                        'session: give it "session": "record"'
                    )
                if not self.per_record:
                    self._shared.append(session)
                    stack.push_async_exit(first.pop_all())
            if not self.per_record:
                await self._open_more(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def call(self, call: ToolRequest) -> CallToolResult:
        """Call a tool in the shared session with the fewest calls. Raises as `Session.call`."""
        return await min(self._shared, key=lambda session: session.n_calls).call(call)

    def session_for(self, create_kwargs: dict[str, Any], meta: Mapping[str, Any]) -> Session:
        """A session for one record, not entered yet. `meta`: sent with its calls."""
        tools = {offer.tool for offer in self.offers}
        create = ToolRequest(CREATE_TOOL, create_kwargs, meta) if CREATE_TOOL in tools else None
        close = ToolRequest(CLOSE_TOOL, {}, meta) if CLOSE_TOOL in tools else None
        return Session(self.spec, self._wires, self._handshake_s, Ownership(create, close))

    async def _open_wires(self) -> None:
        try:
            await self._wires.open(self._startup_timeout_s)
        except TimeoutError as error:
            raise ToolServerUnreachable(
                f"the tool server {self.label} could not be used: {error}", self.label
            ) from None

    async def _reach(self, stack: AsyncExitStack) -> tuple[Session, tuple[Offer, ...]]:
        """Wait for the server; returns the first session and the tools.

        Raises `ToolServerUnreachable`.
        """
        began = time.monotonic()
        while True:
            session = Session(self.spec, self._wires, self._handshake_s)
            try:
                async with AsyncExitStack() as attempt:
                    await attempt.enter_async_context(session)
                    tools = await _list_tools(session.client)
                    stack.push_async_exit(attempt.pop_all())
                return session, tuple(_offer(self.name, tool) for tool in tools)
            except ConnectFailed as failure:
                failed = failure
            except SDK_FAILURES as error:
                failed = ConnectFailed.of(error)
            waited = time.monotonic() - began
            # Retrying to start one would fail again.
            if self.spec.started_here or failed.refused or waited > self._startup_timeout_s:
                raise ToolServerUnreachable(
                    f"the tool server {self.spec.label} could not be used, tried for "
                    f"{waited:.1f} s: {failed}",
                    self.spec.label,
                )
            await asyncio.sleep(_RETRY_PAUSE_S)

    async def _open_more(self, stack: AsyncExitStack) -> None:
        """Open the other shared sessions. Raises `ToolServerUnreachable`."""
        more = [
            Session(self.spec, self._wires, self._handshake_s)
            for _ in range(self.spec.sessions - 1)
        ]
        entered = await asyncio.gather(
            *(stack.enter_async_context(session) for session in more), return_exceptions=True
        )
        for failure in entered:
            if isinstance(failure, ConnectFailed):
                raise ToolServerUnreachable(
                    f"the tool server {self.spec.label} gave only some of {self.spec.sessions} "
                    f"sessions (--mcp_sessions): {failure}",
                    self.spec.label,
                ) from None
            if isinstance(failure, BaseException):
                raise failure
        self._shared += more


async def _list_tools(client: ToolClient) -> list[Tool]:
    """All tools, page by page. Raises `ConnectFailed` if there is no last page."""
    tools: list[Tool] = []
    cursor = None
    for _ in range(_MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        if not (cursor := page.next_cursor):
            return tools
    raise ConnectFailed(f"its list of tools has more than {_MOST_PAGES} pages", refused=True)


def _offer(server: str, tool: Tool) -> Offer:
    told = tool.annotations
    read_only = None if told is None else told.read_only_hint
    if read_only is None and told is not None and told.destructive_hint:
        read_only = False
    return Offer(server, tool.name, tool.description or "", tool.input_schema, read_only)
