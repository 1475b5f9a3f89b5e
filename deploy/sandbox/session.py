"""The server's side of a session: its keeper's process, and one call at a time."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from limits import PROGRAM_BYTES, Limits

_KEEPER = Path(__file__).with_name("keeper.py")
_GRACE_S = 15.0  # beyond a call's limit; a keeper that is silent for longer is killed
_CLOSING_S = 5.0  # which a keeper has to end by itself
_LINE_BYTES = 1 << 16  # of an answer, beside what was printed
_LONGEST_CHARACTER = 8  # bytes in JSON for a byte that was printed


class SessionGone(RuntimeError):
    """The session and its files are gone. The message is one sentence."""


class SessionRefused(ValueError):
    """A session cannot be made as requested, or a program cannot be run. One sentence."""


@dataclass(frozen=True)
class Result:
    """The result of a call, for its caller. `stopped`: whether a limit ended it."""

    text: str
    stopped: bool


class Session:
    """An open sandbox. `open` and `close` belong together."""

    def __init__(self, keeper: Process, limits: Limits) -> None:
        self._keeper = keeper
        self._limits = limits
        self._one_call = asyncio.Lock()
        self._unread = 0  # answers to calls whose callers went away

    @classmethod
    async def open(
        cls, limits: Limits, read_only: Sequence[str] = (), files: Mapping[str, str] | None = None
    ) -> Self:
        """Open a sandbox with `files` (path below its folder: text). Raises SessionRefused."""
        # Nothing of our environment, which has tokens in it, and of Python's start-up what the
        # keeper needs: it lives as long as its session.
        line_bytes = _LINE_BYTES + _LONGEST_CHARACTER * 1024 * limits.output_kib
        keeper = await asyncio.create_subprocess_exec(
            sys.executable, "-E", "-s", "-S", "-B", str(_KEEPER), stdin=PIPE, stdout=PIPE, env={},
            cwd="/", limit=line_bytes,
        )  # fmt: skip
        session = cls(keeper, limits)
        try:
            await session._ask(
                {"limits": asdict(limits), "read_only": list(read_only), "files": dict(files or {})}
            )
        except BaseException:
            await session.close()
            raise
        return session

    async def run(self, interpreter: str, program: str) -> Result:
        """Run a program to its end. Calls that come while one runs wait for it.

        Raises SessionRefused, and SessionGone.
        """
        if len(program.encode("utf-8", "surrogatepass")) > PROGRAM_BYTES:
            raise SessionRefused(f"a program has at most {PROGRAM_BYTES} bytes: write a file first")
        async with self._one_call:
            outcome = await self._ask({"argv": [interpreter, "/run/program"], "program": program})
        return _as_result(outcome)

    async def close(self) -> None:
        """End the session with all its processes and files."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        try:
            async with asyncio.timeout(_CLOSING_S):
                await self._keeper.wait()
        except TimeoutError:
            self._keeper.kill()
            await self._keeper.wait()

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._keeper.stdin is not None
        line = b""
        try:
            while self._unread:
                await self._answer()
                self._unread -= 1
            self._keeper.stdin.write(json.dumps(request).encode() + b"\n")
            self._unread += 1
            await self._keeper.stdin.drain()
            line = await self._answer()
            self._unread -= 1
        except asyncio.CancelledError:
            self._keeper.stdin.write(b"\n")  # stops the call, if it is at work
            raise
        except (ConnectionError, TimeoutError):
            pass  # told below
        if not line.endswith(b"\n"):
            await self.close()
            raise SessionGone("the sandbox was killed, and its files are gone with it")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SessionRefused(answer["error"])
        return answer

    async def _answer(self) -> bytes:
        """Read the keeper's next line; empty at the end. Raises TimeoutError."""
        assert self._keeper.stdout is not None
        async with asyncio.timeout(self._limits.call_seconds + _GRACE_S):
            return await self._keeper.stdout.readline()


def _as_result(outcome: dict[str, Any]) -> Result:
    """`outcome`: the fields of `call.Outcome`."""
    first, last = outcome["output"]
    left_out = outcome["left_out"]
    text = f"{first}\n[{left_out} bytes left out]\n{last}" if left_out else first + last
    if outcome["stopped"]:
        note = f"[stopped: {outcome['stopped']}]"
    elif outcome["status"] is None:
        note = "[killed, perhaps because the machine ran out of memory]"
    elif outcome["status"]:
        note = f"[exit status {outcome['status']}]"
    else:
        return Result(text or "[no output]", stopped=False)
    end = "" if not text or text.endswith("\n") else "\n"
    return Result(f"{text}{end}{note}", stopped=outcome["status"] is None)
