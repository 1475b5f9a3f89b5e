"""A server that is a process: MCP's messages as lines over its pipes.

The SDK's own client keeps a line however long it gets. Here a line is read up to
`MAX_ANSWER_BYTES`. A process that writes a longer one is killed: where its next message begins,
only who reads on could tell. The call that the line answers fails, as far as that can be seen; the
others have lost their connection.
"""

import logging
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from mcp.client.stdio import _close_subprocess_transport, get_default_environment
from mcp.os.posix.utilities import terminate_posix_process_tree
from mcp.shared.jsonrpc_dispatcher import cancelled_request_id_from_params
from mcp.shared.message import SessionMessage
from mcp_types import (
    ErrorData,
    JSONRPCError,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
    jsonrpc_message_adapter,
)

from agentrl.limited_httpx import MAX_ANSWER_BYTES, TOO_LARGE
from agentrl.rollout.tools.server_list import ServerSpec
from agentrl.rollout.tools.wire_faults import NOT_READ

log = logging.getLogger(__name__)

_GRACE_S = 2.0  # to end by itself, then after SIGTERM
_POLL_S = 0.01
_BROKEN = (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError)
# A line that begins with its id, as those of Python's SDK do.
_ID_FIRST = re.compile(rb'\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d+)\s*,')


@asynccontextmanager
async def process_pipes(
    spec: ServerSpec, on_killed: Callable[[], None]
) -> AsyncIterator[tuple[Any, Any]]:
    """A process with the SDK's read and write streams to it. It ends with the context.

    `on_killed`: called when it is killed for a line that is too long. Raises `OSError` if it cannot
    be started.
    """
    process = await anyio.open_process(
        [spec.command, *spec.args],
        env=get_default_environment() | dict(spec.env),
        stderr=None,  # ours
        cwd=spec.cwd,
        start_new_session=True,
    )
    to_session, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    pipes = _Pipes(process, to_session, from_session, on_killed)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipes.read_lines)
        tasks.start_soon(pipes.write_lines)
        try:
            yield read, write
        finally:
            with anyio.CancelScope(shield=True):  # every wait in here is bounded
                read.close()
                write.close()
                await pipes.flushed()
                await _end(process)
            tasks.cancel_scope.cancel()


class _Pipes:
    """What goes to and fro between a session and its process."""

    def __init__(
        self, process: Process, to_session: Any, from_session: Any, on_killed: Callable[[], None]
    ) -> None:
        self._process = process
        self._to_session = to_session
        self._from_session = from_session
        self._on_killed = on_killed
        self._asked: set[RequestId] = set()  # requests that are not answered
        self._written = anyio.Event()  # all there is

    async def read_lines(self) -> None:
        """Pass the process's messages on until its output ends, or the session does. What it writes
        then is thrown away, or it would wait for a reader and never end."""
        assert self._process.stdout is not None
        lines = BufferedByteReceiveStream(self._process.stdout)
        with suppress(anyio.IncompleteRead, *_BROKEN):
            async with self._to_session:
                try:
                    while True:
                        line = await lines.receive_until(b"\n", MAX_ANSWER_BYTES)
                        await self._to_session.send(self._message(line))
                except anyio.DelimiterNotFound:
                    await self._give_up(await lines.receive())
        with suppress(anyio.EndOfStream, *_BROKEN):
            while True:
                await self._process.stdout.receive()

    async def write_lines(self) -> None:
        """Pass the session's messages on until it ends, or the process takes none any more."""
        assert self._process.stdin is not None
        try:
            async with self._from_session:
                async for item in self._from_session:
                    message = item.message
                    if isinstance(message, JSONRPCRequest):
                        self._asked.add(message.id)
                    elif isinstance(message, JSONRPCNotification):
                        cancelled = cancelled_request_id_from_params(message.params)
                        self._asked -= {cancelled}
                    line = message.model_dump_json(by_alias=True, exclude_unset=True) + "\n"
                    await self._process.stdin.send(line.encode())
        except _BROKEN:
            await self._to_session.aclose()  # or its requests would wait for ever
        finally:
            self._written.set()

    async def flushed(self) -> None:
        """Wait a moment for messages that are being written."""
        with anyio.move_on_after(0.25 * _GRACE_S):
            await self._written.wait()

    def _message(self, line: bytes) -> SessionMessage | Exception:
        """One line, or what is wrong with it: the session says so."""
        try:
            message = jsonrpc_message_adapter.validate_json(
                line.decode(errors="replace"), by_name=False
            )
        except ValueError as error:
            log.warning("a tool server wrote what is no message: %.200r", line)
            return error
        if isinstance(message, JSONRPCResponse | JSONRPCError):
            self._asked -= {message.id}
        return SessionMessage(message)

    async def _give_up(self, start: bytes) -> None:
        """End a process whose line began with `start` and is too long; fail the call it answers."""
        log.warning("a tool server is killed: it wrote %s", TOO_LARGE)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        named = _ID_FIRST.match(start)
        answered = {int(named[1])} if named else self._asked
        if len(answered) == 1:
            [request] = answered
            error = ErrorData(code=NOT_READ, message=f"it gave {TOO_LARGE}")
            message = JSONRPCError(jsonrpc="2.0", id=request, error=error)
            await self._to_session.send(SessionMessage(message))
        self._on_killed()


async def _end(process: Process) -> None:
    """Close a process's input. If it does not end then, end it and all that it has started."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(*_BROKEN):
        await process.stdin.aclose()
    if not await _has_ended(process):
        await terminate_posix_process_tree(process, _GRACE_S)
        if not await _has_ended(process):
            log.warning("the process %d of a tool server cannot be ended", process.pid)
    await process.stdout.aclose()
    _close_subprocess_transport(process)  # what it has started may hold its output open


async def _has_ended(process: Process) -> bool:
    """Whether it ends within the grace. `wait()` would also wait for what it has started and that
    holds its output open."""
    with anyio.move_on_after(_GRACE_S):
        while process.returncode is None:
            await anyio.sleep(_POLL_S)
    return process.returncode is not None
