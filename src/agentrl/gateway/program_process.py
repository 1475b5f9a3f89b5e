"""The processes of one attempt's program: started behind a subreaper, read, and ended for certain.

The subreaper ends all that the program started. A program of the same user can kill or stop the
subreaper itself. Then what is left is found by the attempt's key, which all of it inherited, or by
the session of processes that the subreaper began.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

from agentrl.subreaper import SUBREAPER

log = logging.getLogger(__name__)

GRACE_S = 2.0  # for a program that is ended
_SUBREAPER_S = 3 * GRACE_S  # for the subreaper, which kills what is left after the grace
_KEPT_BYTES = 200_000  # of each output
_READ_BYTES = 2**16


class ProgramProcess:
    """A running program. `mark`: a variable of its environment that no other process has.

    `status`: how it ended, as a shell gives it; None while it runs. `lost`: whether the subreaper
    was killed, or did not answer and was killed.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, outputs: Sequence["_Output"], mark: str
    ) -> None:
        assert process.stdin is not None
        self.lost = False
        self._mark = mark.encode()
        self._process = process
        self._stdin = process.stdin
        self._outputs = outputs
        self._ended = asyncio.create_task(process.wait())

    @classmethod
    async def start(cls, words: Sequence[str], environment: Mapping[str, str], mark: str) -> Self:
        """Start a command. `mark`: the name of the variable."""
        outputs = [await _Output.open(), await _Output.open()]
        out, err = (output.writes for output in outputs)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", SUBREAPER, str(GRACE_S), *words,
                stdin=asyncio.subprocess.PIPE, stdout=out, stderr=err, env=environment,
                start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(out)
            os.close(err)
        return cls(process, outputs, f"{mark}={environment[mark]}")

    async def wait(self, done: asyncio.Event) -> None:
        """Wait until it has ended; or until `done`, and it then has a moment to end."""
        finished = asyncio.create_task(done.wait())
        try:
            await asyncio.wait({finished, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            if not self._ended.done():
                await asyncio.wait({self._ended}, timeout=GRACE_S)
        finally:
            finished.cancel()

    async def end(self) -> int:
        """End what still runs. Returns the status."""
        self._stdin.close()  # the subreaper ends what is left
        await asyncio.wait({self._ended}, timeout=_SUBREAPER_S)
        self.lost = not self._ended.done() or self._ended.result() < 0
        if not self._ended.done():
            self._process.kill()
        status = await self._ended
        if self.lost:
            self._kill_left()
        # What left the session and has another environment may still hold the pipes.
        await asyncio.wait({output.reading for output in self._outputs}, timeout=GRACE_S)
        for output in self._outputs:
            output.close()
        return status if status >= 0 else 128 - status

    @property
    def outputs(self) -> tuple[str, str]:
        """What it wrote to standard output and to standard error; of much, the end."""
        out, err = (output.text for output in self._outputs)
        return out, err

    def _kill_left(self) -> None:
        """Kill what is left, until nothing is: a process may start others meanwhile."""
        killed: set[int] = set()
        while left := set(self._left()) - killed:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue  # it ended by itself
            killed |= left
        if killed:
            log.warning("the subreaper of a program was killed; ended what it left: %s", killed)

    def _left(self) -> Iterator[int]:
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # The name before the last parenthesis may hold anything.
                    session = int(file.read().rpartition(b")")[2].split()[3])
                with open(f"/proc/{name}/environ", "rb") as file:
                    marked = self._mark in file.read().split(b"\0")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it has ended, or is another user's
            if marked or session == self._process.pid:
                yield int(name)


class _Output:
    """What is written to a pipe. `writes`: its end for that, to be closed here once it is given.

    `reading`: a task that ends when nobody has that end any more. The pipe is not one of asyncio's
    processes, for which a process has ended only when its pipes have.
    """

    def __init__(
        self, stream: asyncio.StreamReader, transport: asyncio.ReadTransport, writes: int
    ) -> None:
        self.writes = writes
        self._transport = transport
        self._kept = b""
        self.reading = asyncio.create_task(self._read(stream))

    @classmethod
    async def open(cls) -> Self:
        """Make a pipe."""
        reads, writes = os.pipe()
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reads, "rb", buffering=0)
        )
        return cls(stream, transport, writes)

    @property
    def text(self) -> str:
        """What was written; of much, the end."""
        return self._kept.decode(errors="replace")

    def close(self) -> None:
        """Read no more."""
        self.reading.cancel()
        self._transport.close()

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while piece := await stream.read(_READ_BYTES):
            self._kept = (self._kept + piece)[-_KEPT_BYTES:]
