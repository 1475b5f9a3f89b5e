"""A server that is a Python object: it runs in this process, in a thread of its own.

The thread has an event loop, so that a tool that blocks holds up this server's calls and no
trajectory.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from importlib import import_module
from types import TracebackType
from typing import Any, Self, TypeVar

from mcp import Client, MCPError
from mcp.client.caching import CacheMode
from mcp.server import Server
from mcp.server.mcpserver import MCPServer
from mcp_types import (
    INTERNAL_ERROR,
    REQUEST_TIMEOUT,
    CallToolResult,
    ListToolsResult,
    RequestParamsMeta,
)

from agentrl.configs import ConfigError
from agentrl.configs.user_module import load_user_module
from agentrl.foreign_text import error_line
from agentrl.rollout.contained import contained
from agentrl.rollout.tools.handlers import is_handler, server_of

log = logging.getLogger(__name__)

T = TypeVar("T")
ServerObject = MCPServer[Any] | Server[Any]
_FLAG = "mcp_manager_url"


def load_server(python: str) -> ServerObject:
    """The object that `file.py:name` or `module:name` names.

    Raises `ConfigError` if there is none, if its module raises, or if it is no server.
    """
    place, _, name = python.rpartition(":")
    if place.endswith(".py"):
        module = load_user_module(place, _FLAG)
    else:
        try:
            module = import_module(place)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"--{_FLAG} {python}: {place} cannot be imported: {error_line(error)}"
            ) from error
    found = getattr(module, name, None)
    if isinstance(found, MCPServer | Server):
        return found
    if is_handler(found):
        return server_of(found, name)
    raise ConfigError(
        f"--{_FLAG} {python}: {name} must be an MCPServer or a Server of the package `mcp`, or a "
        f"handler with `openai_tools` and `call_tool`, and is "
        f"{'missing' if found is None else type(found).__name__}"
    )


class ServerThread:
    """A thread with the event loop of one server."""

    def __init__(self, server: ServerObject, name: str) -> None:
        self.server = server
        self.name = name
        self.loop = asyncio.new_event_loop()
        self._closed = False
        # A daemon: a tool that blocks for ever must not keep the process.
        threading.Thread(target=self._run, name=f"tools {name}", daemon=True).start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a coroutine in the thread."""
        return asyncio.run_coroutine_threadsafe(
            contained(work, f"a tool of {self.name}"), self.loop
        )

    def close(self) -> None:
        """Let the thread end, once nothing in it blocks."""
        self._closed = True
        self.loop.call_soon_threadsafe(self.loop.stop)

    def _run(self) -> None:
        while not self._closed:
            try:
                self.loop.run_forever()
            except BaseException as left:  # such as sys.exit in a task that a tool began
                log.error("a task of the tools of %s ended with %s", self.name, error_line(left))
        self.loop.close()


class ThreadClient:
    """The SDK's client of a server in a thread, for the event loop of the trajectories.

    An async context manager. `on_lost` is called if the server ends it. `timeout_s`, of requests,
    and `mode` are as of the SDK's client.
    """

    def __init__(
        self, thread: ServerThread, on_lost: Callable[[], None], timeout_s: float, mode: str
    ) -> None:
        self._thread = thread
        self._on_lost = on_lost
        self._timeout_s = timeout_s
        self._client = Client(thread.server, mode=mode)
        self._ending = asyncio.Event()  # of the thread's loop
        self._held: Future[None]

    async def __aenter__(self) -> Self:
        entered: Future[None] = Future()
        self._held = self._thread.submit(self._hold(entered))
        try:
            await asyncio.wrap_future(entered)
        except BaseException:
            self._held.cancel()
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
        self._thread.loop.call_soon_threadsafe(self._ending.set)
        await asyncio.wrap_future(self._held)

    async def call_tool(
        self,
        name: str,
        arguments: dict[str, Any] | None,
        read_timeout_seconds: float | None,
        *,
        meta: RequestParamsMeta | None,
    ) -> CallToolResult:
        """Call a tool. Raises as the SDK's client does."""

        async def call() -> CallToolResult:
            return await self._client.call_tool(name, arguments, meta=meta)

        return await self._within(read_timeout_seconds, call())

    async def list_tools(
        self, *, cursor: str | None = None, cache_mode: CacheMode = "use"
    ) -> ListToolsResult:
        """One page of the tools. Raises as the SDK's client does."""

        async def listed() -> ListToolsResult:
            return await self._client.list_tools(cursor=cursor, cache_mode=cache_mode)

        return await self._within(self._timeout_s, listed())

    async def _within(self, timeout_s: float | None, work: Coroutine[Any, Any, T]) -> T:
        """Await work in the thread, timed here: a tool that blocks stops the thread's clock too."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(self._thread.submit(work))
        except TimeoutError:
            raise MCPError(
                code=REQUEST_TIMEOUT, message=f"no answer within {timeout_s} s"
            ) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise MCPError(
                code=INTERNAL_ERROR, message="the server cancelled the request"
            ) from None

    async def _hold(self, entered: Future[None]) -> None:
        """Keep the client open. The same task must enter and leave it."""
        entered.set_running_or_notify_cancel()
        try:
            async with self._client:
                entered.set_result(None)
                await self._ending.wait()
        except BaseException as error:
            if entered.done():
                raise
            entered.set_exception(error)
