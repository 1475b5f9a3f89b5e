"""The thread of a module whose objects are servers: it imports it and runs their event loop.

    ModuleThread   the thread of a module, for all its servers and all agents of the process
    ServerThread   a thread with its event loop; another one takes its place if a tool blocks it
    Request        what it does for a client: whose call, and how long it may take

All servers of a module share the loop, as they share its variables: locks, pools of connections.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self, TypeVar
from weakref import WeakKeyDictionary

import anyio

from agentrl.configs import ConfigError
from agentrl.configs.user_module import load_user_module
from agentrl.foreign_text import error_line, one_line
from agentrl.rollout.contained import contained
from agentrl.rollout.user_frames import place_in_thread

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_LEFT = 20  # calls that go on after their time. The threads of a loop's `def` tools are 40
_FLAG = "mcp_manager_url"
_MOMENT_S = 5.0  # in which an event loop that is not blocked runs


@dataclass(eq=False)
class Request:
    """Work of a thread for a client. `who`: what does it, as in "the tool add".

    `record`, `task`: their ids, if it serves a record. `limit_s`: how long the client waits.
    """

    who: str
    limit_s: float
    task: str = ""
    record: str = ""
    began: float = field(default_factory=time.monotonic)
    at_work: bool = False  # in a tool

    @property
    def is_late(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() > self.began + self.limit_s

    def __str__(self) -> str:
        return f"{self.who} (task {self.task}, record {self.record})" if self.record else self.who


REQUEST: ContextVar[Request | None] = ContextVar("the request that a thread works for")


class ServerThread:
    """A thread with an event loop. `import_it`: is called in the thread, before the loop runs."""

    def __init__(self, name: str, import_it: Callable[[], ModuleType]) -> None:
        self.name = name
        self.module: Future[ModuleType] = Future()
        self.lost = False  # something blocks the loop, and nobody waits for it any more
        self.blocked_by: Request | None = None  # None: a callback
        self.blocked_at: str | None = None
        self._import = import_it
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(self._task)
        self._requests: WeakKeyDictionary[asyncio.Task[Any], Request] = WeakKeyDictionary()
        self._awaited: set[Future[Any]] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._left: set[Request] = set()
        self._closed = False
        self._warned: set[str] = set()
        # A daemon: a tool that blocks for ever must not keep the process.
        self._thread = threading.Thread(target=self._run, name=f"tools {name}", daemon=True)
        self._thread.start()

    @property
    def place(self) -> str | None:
        """Where in a user's code the thread stands."""
        return place_in_thread(self._thread.ident)

    @property
    def blocking(self) -> Request | None:
        """The request whose code runs now; None if none does, or if it is nobody's."""
        task = asyncio.current_task(self._loop)
        return None if task is None else self._requests.get(task)

    @property
    def left(self) -> set[Request]:
        """The calls that nobody waits for any more and that go on."""
        self._left = {request for request in self._left if request.at_work}
        return self._left

    def submit(self, request: Request, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a coroutine in the thread. Cancelling the future cancels it as the SDK's servers
        cancel a call, which waits for the thread of a `def` tool."""
        answer = self.awaited(Future[T]())

        async def served() -> None:
            REQUEST.set(request)
            try:
                with anyio.CancelScope() as scope:

                    def end(_: Future[T]) -> None:
                        if answer.cancelled():
                            self.call_soon(scope.cancel)

                    answer.add_done_callback(end)
                    given = await contained(work, request.who)
                    if answer.set_running_or_notify_cancel():
                        answer.set_result(given)
            except Exception as error:
                if answer.set_running_or_notify_cancel():
                    answer.set_exception(error)
            finally:
                answer.cancel()  # if there is none

        def begin() -> None:
            task = self._loop.create_task(served())
            self._requests[task] = request
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

        self._loop.call_soon_threadsafe(begin)
        return answer

    def awaited(self, future: Future[T]) -> Future[T]:
        """A future that is cancelled if the thread is given up."""
        self._awaited.add(future)
        future.add_done_callback(self._awaited.discard)
        return future

    def call_soon(self, callback: Callable[..., object], *arguments: object) -> None:
        """Call something in the thread, unless it has ended."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *arguments)

    def let_go(self, request: Request) -> None:
        """Nobody waits for this call any more. If it goes on all the same, count it."""
        if not self.lost:
            self.call_soon(self._loop.call_later, _MOMENT_S, self._note_left, request)

    async def runs(self) -> bool:
        """Whether its event loop runs. Waits a moment for it."""
        ran: Future[None] = self.awaited(Future())

        def run() -> None:
            if ran.set_running_or_notify_cancel():
                ran.set_result(None)

        self.call_soon(run)
        await asyncio.wait({asyncio.wrap_future(ran)}, timeout=_MOMENT_S)
        return ran.done() and not ran.cancelled()

    def give_up(self, blocked_by: Request | None) -> None:
        """Wait no longer for the thread, which ends when what blocks it does."""
        self.lost, self.blocked_by, self.blocked_at = True, blocked_by, self.place
        self.close()
        for future in tuple(self._awaited):
            future.cancel()

    def close(self) -> None:
        """Let the thread end, once nothing in it blocks."""
        self._closed = True
        self.call_soon(self._loop.stop)

    def _run(self) -> None:
        try:
            self.module.set_result(self._import())
        except ConfigError as error:
            self.module.set_exception(error)
        while not self._closed:
            try:
                self._loop.run_forever()
            except BaseException as left:  # such as sys.exit in a task that a tool began
                log.error("a task of the tools of %s ended with %s", self.name, error_line(left))
        self._end_tasks()
        self._loop.close()

    def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            try:
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=_MOMENT_S))
            except BaseException as left:
                log.error("a task of the tools of %s ended with %s", self.name, error_line(left))

    def _task(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Any,
        context: Context | None = None,
        **more: Any,
    ) -> asyncio.Task[Any]:
        """Make a task that works for whom the code that makes it works for."""
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context, **more)
        request = REQUEST.get(None) if context is None else context.get(REQUEST)
        if request is not None:
            self._requests[task] = request
        return task

    def _note_left(self, request: Request) -> None:
        if not request.at_work:
            return
        self._left.add(request)
        if request.who not in self._warned:
            self._warned.add(request.who)
            log.warning(
                "%s of %s goes on, although nobody waits for it after %g s: a `def` tool that "
                "hangs keeps its thread. With %d such calls the server counts as out of reach",
                request, self.name, request.limit_s, MOST_LEFT,
            )  # fmt: skip


class ModuleThread:
    """The thread of one module, for as long as a client uses it."""

    _all: ClassVar[dict[str, "ModuleThread"]] = {}

    def __init__(self, key: str, module: str) -> None:
        self._key = key
        self._module = module
        self._n_users = 0
        self._judging: set[asyncio.Task[None]] = set()
        self._thread = self._begin()

    @classmethod
    def use(cls, module: str) -> Self:
        """The thread of a module: `file.py` or an importable name. `close` it as often."""
        key = str(Path(module).resolve()) if module.endswith(".py") else module
        shared = cls._all.get(key) or cls._all.setdefault(key, cls(key, module))
        assert isinstance(shared, cls)
        shared._n_users += 1
        return shared

    async def imported(self) -> ModuleType:
        """The module, when it is imported. Raises `ConfigError` if it cannot be."""
        return await asyncio.shield(asyncio.wrap_future(self._thread.module))

    @property
    def place(self) -> str | None:
        """Where in a user's code the thread stands."""
        return self._thread.place

    def thread(self) -> ServerThread:
        """The thread, a new one if the last one is blocked for good."""
        if self._thread.lost:
            self._thread = self._begin()
        return self._thread

    def close(self) -> None:
        """Let the thread end, when all users have closed it."""
        self._n_users -= 1
        if not self._n_users:
            del self._all[self._key]
            if not self._thread.lost:
                self._thread.close()

    async def judge(self, thread: ServerThread, late: Request) -> None:
        """A request is out of time: give its thread up if that is what blocks the event loop.

        What blocks it has its own time first. What works for nobody, a callback, has that of
        `late`.
        """
        blocking = thread.blocking
        if thread.lost or await thread.runs() or thread.lost:
            return
        if thread.blocking is not blocking or not (blocking or late).is_late:
            return  # calls that block for a short time each, or one that may
        thread.give_up(blocking)
        log.error(
            "%s blocks the event loop of the tools of %s beyond the time limit of %g s, at %s: "
            "their thread is left to it, and a new one begun. Await what it waits for, or write "
            "`def` in place of `async def`",
            blocking or "a callback", thread.name, (blocking or late).limit_s, thread.blocked_at,
        )  # fmt: skip

    def judge_soon(self, thread: ServerThread, late: Request) -> None:
        """`judge`, for those who cannot wait."""
        task = asyncio.create_task(self.judge(thread, late), name="judge of tools")
        self._judging.add(task)
        task.add_done_callback(self._judging.discard)

    def _begin(self) -> ServerThread:
        return ServerThread(Path(self._module).stem, self._import)

    def _import(self) -> ModuleType:
        try:
            if self._module.endswith(".py"):
                return load_user_module(self._module, _FLAG)
            return import_module(self._module)
        except ConfigError:
            raise
        except BaseException as error:
            raise ConfigError(
                f"--{_FLAG}: {self._module} cannot be imported: {one_line(error_line(error))}"
            ) from error
