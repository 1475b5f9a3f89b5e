"""A server that is a Python object: it runs in this process, in the thread of its module.

A tool that waits holds up only this server's calls, or none but its own: `def` tools run in threads
of their own, `async def` tools take turns. A tool that computes takes turns with the whole sampler,
which shares the interpreter: such a server is better served as a process.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

from mcp import Client, MCPError
from mcp.client.caching import CacheMode
from mcp.server import Server
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.mcpserver import MCPServer
from mcp_types import (
    INTERNAL_ERROR,
    REQUEST_TIMEOUT,
    CallToolResult,
    ListToolsResult,
    RequestParamsMeta,
)
from pydantic import BaseModel

from agentrl.configs import ConfigError
from agentrl.limited_httpx import MAX_ANSWER_BYTES, TOO_LARGE
from agentrl.rollout.contained import contained
from agentrl.rollout.tools.calls import RECORD_ID_KEY, TASK_ID_KEY, ToolBlocks
from agentrl.rollout.tools.handlers import is_handler, server_of
from agentrl.rollout.tools.server_thread import (
    MOST_LEFT,
    REQUEST,
    ModuleThread,
    Request,
    ServerThread,
)
from agentrl.rollout.tools.wire_faults import NOT_READ, OUTAGE

log = logging.getLogger(__name__)

T = TypeVar("T")
ServerObject = MCPServer[Any] | Server[Any]
_FLAG = "mcp_manager_url"


class LocalServer:
    """A server of this process: the object that `file.py:name` or `module:name` names.

    `label`: its name in messages.
    """

    def __init__(self, python: str, label: str) -> None:
        self.label = label
        self.module = ModuleThread.use(python.rpartition(":")[0])
        self._python = python
        self._server: ServerObject | None = None

    async def load(self, timeout_s: float) -> None:
        """Import it. Raises `ConfigError` if it is not there, is no server, or its module raises.

        Raises `TimeoutError`, which says where the import stands.
        """
        name = self._python.rpartition(":")[2]
        try:
            async with asyncio.timeout(timeout_s):
                module = await self.module.imported()
        except TimeoutError:
            raise TimeoutError(
                f"it was not imported within {timeout_s:g} s; the import stands at "
                f"{self.module.place}"
            ) from None
        found = getattr(module, name, None)
        if is_handler(found):
            found = server_of(found, name)
        if not isinstance(found, MCPServer | Server):
            raise ConfigError(
                f"--{_FLAG} {self._python}: {name} must be an MCPServer or a Server of the package "
                f"`mcp`, or a handler with `openai_tools` and `call_tool`, and is "
                f"{'missing' if found is None else type(found).__name__}"
            )
        if _watched not in found.middleware:  # the same object may be loaded by several agents
            found.middleware.append(_watched)
        self._server = found

    def client(self, on_lost: Callable[[], None], timeout_s: float, mode: str) -> "ThreadClient":
        """A client of the server, which is loaded."""
        assert self._server is not None, "it is not loaded"
        return ThreadClient(self, self._server, on_lost, timeout_s, mode)

    def close(self) -> None:
        """Let the thread end, if no other server or agent uses it."""
        self.module.close()


class ThreadClient:
    """The SDK's client of a server in a thread, for the event loop of the trajectories.

    An async context manager. `on_lost` is called if the server ends it. `timeout_s`, of requests,
    and `mode` are as of the SDK's client.
    """

    def __init__(
        self,
        local: LocalServer,
        server: ServerObject,
        on_lost: Callable[[], None],
        timeout_s: float,
        mode: str,
    ) -> None:
        self._local = local
        self._on_lost = on_lost
        self._timeout_s = timeout_s
        self._client = Client(server, mode=mode)
        self._ending = asyncio.Event()  # of the thread's loop
        self._thread: ServerThread
        self._held: Future[None]

    async def __aenter__(self) -> Self:
        self._thread = self._local.module.thread()
        self._refuse_if_full()
        opening = Request(f"the lifespan of {self._local.label}", self._timeout_s)
        entered = self._thread.awaited(Future[None]())
        self._held = self._thread.submit(opening, self._hold(entered))
        try:
            await self._outcome(entered, opening)
        except BaseException:
            self._held.cancel()
            # `opening` may be late a moment later: it is given the time of `judge` for that.
            self._local.module.judge_soon(self._thread, opening)
            raise
        loop = asyncio.get_running_loop()

        def ended(_: Future[None]) -> None:
            if not self._ending.is_set():
                loop.call_soon_threadsafe(self._on_lost)

        self._held.add_done_callback(ended)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._thread.lost:
            self._thread.call_soon(self._ending.set)
            await asyncio.wrap_future(self._held)

    async def call_tool(
        self,
        name: str,
        arguments: dict[str, Any] | None,
        read_timeout_seconds: float | None,
        *,
        meta: RequestParamsMeta | None,
    ) -> CallToolResult:
        """Call a tool. Raises as the SDK's client does, and `ToolBlocks`."""

        async def call() -> CallToolResult:
            return await self._client.call_tool(name, arguments, meta=meta)

        self._refuse_if_full()
        limit_s = self._timeout_s if read_timeout_seconds is None else read_timeout_seconds
        served = dict(meta or {})
        task, record = (str(served.get(key, "")) for key in (TASK_ID_KEY, RECORD_ID_KEY))
        return await self._within(Request(f"the tool {name}", limit_s, task, record), call())

    async def list_tools(
        self, *, cursor: str | None = None, cache_mode: CacheMode = "use"
    ) -> ListToolsResult:
        """One page of the tools. Raises as the SDK's client does."""

        async def listed() -> ListToolsResult:
            return await self._client.list_tools(cursor=cursor, cache_mode=cache_mode)

        request = Request(f"the list of tools of {self._local.label}", self._timeout_s)
        return await self._within(request, listed())

    async def _within(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """Await work in the thread, timed here: a tool that blocks stops the thread's clock too."""
        if self._thread.lost:
            work.close()
            raise self._lost(request)
        try:
            async with asyncio.timeout(request.limit_s):
                future = self._thread.submit(request, _of_limited_size(work))
                return await self._outcome(future, request)
        except TimeoutError:
            self._thread.let_go(request)
            await self._local.module.judge(self._thread, request)
            if self._thread.lost:
                raise self._lost(request) from None
            raise MCPError(
                code=REQUEST_TIMEOUT, message=f"no answer within {request.limit_s} s"
            ) from None
        except asyncio.CancelledError:
            self._thread.let_go(request)
            raise

    async def _outcome(self, future: Future[T], request: Request) -> T:
        """What the thread makes of a request. Raises `MCPError` if it cancels it."""
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if self._thread.lost:
                raise self._lost(request) from None
            raise MCPError(
                code=INTERNAL_ERROR, message="the server cancelled the request"
            ) from None

    def _lost(self, request: Request) -> MCPError | ToolBlocks:
        """The error of a request in a thread that is given up."""
        blocking = self._thread.blocked_by
        if blocking is not None and blocking.record and blocking.record == request.record:
            return ToolBlocks(
                f"{blocking.who} of {self._local.label} blocked the event loop of its server "
                f"beyond its time limit of {blocking.limit_s:g} s, at {self._thread.blocked_at}"
            )
        return MCPError(code=OUTAGE, message=f"{blocking or 'a callback'} blocked its server")

    def _refuse_if_full(self) -> None:
        """Raise `MCPError` if too many calls went on after their time."""
        left = self._thread.left
        if len(left) >= MOST_LEFT:
            tools = ", ".join(sorted({request.who for request in left}))
            raise MCPError(
                code=OUTAGE,
                message=f"{len(left)} calls go on although their time is over, of {tools}",
            )

    async def _hold(self, entered: Future[None]) -> None:
        """Keep the client open. The same task must enter and leave it."""
        async with AsyncExitStack() as stack:
            try:
                opening = stack.enter_async_context(self._client)
                await contained(opening, f"the lifespan of {self._local.label}")
            except Exception as error:
                if entered.set_running_or_notify_cancel():
                    entered.set_exception(error)
                return
            if entered.set_running_or_notify_cancel():
                entered.set_result(None)
                await self._ending.wait()


async def _watched(ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
    """Middleware next to the tools: they are known while they work, and end nothing but a call."""
    request = REQUEST.get(None)
    if request is None or ctx.method != "tools/call":
        return await call_next(ctx)
    request.at_work = True
    try:
        return await contained(call_next(ctx), request.who)
    except RuntimeError as error:
        if error.__cause__ is None or isinstance(error.__cause__, Exception):
            raise
        log.error("%s, for task %s and record %s", error, request.task, request.record)
        raise MCPError(code=INTERNAL_ERROR, message=str(error)) from error
    finally:
        request.at_work = False


async def _of_limited_size(work: Coroutine[Any, Any, T]) -> T:
    """An answer of the server, up to the size of those that come over a wire.

    Raises `MCPError` in place of a larger one.
    """
    try:
        answer = await work
    except MCPError as error:
        if _size([error.message, error.data]) > MAX_ANSWER_BYTES:
            raise MCPError(code=NOT_READ, message=f"it gave {TOO_LARGE}") from None
        raise
    if _size([answer]) > MAX_ANSWER_BYTES:
        raise MCPError(code=NOT_READ, message=f"it gave {TOO_LARGE}")
    return answer


def _size(values: Iterable[object]) -> int:
    """About the bytes of values as JSON, counted until they are more than an answer may have."""
    size = 0
    rest = list(values)
    while rest and size <= MAX_ANSWER_BYTES:
        value = rest.pop()
        if isinstance(value, str):
            size += len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, BaseModel):
            rest += vars(value).values()
        elif isinstance(value, dict):
            rest += value.keys()
            rest += value.values()
        elif isinstance(value, list | tuple):
            rest += value
        size += 1
    return size
