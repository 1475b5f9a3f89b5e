"""The scorer `math`: whether two mathematical expressions are equal, by the math-verify library.

The library bounds its time with SIGALRM, which works in a main thread only, and an answer can make
it take all memory. So it runs in a child process (`math_worker.py`); a child that hangs or dies is
replaced, and costs that one score.
"""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from types import TracebackType
from typing import Self

_STEP_TIMEOUT_S = 5  # of reading an expression, and of comparing two
# Three bounded steps, and what the library does outside its bounds.
_TIMEOUT_S = 4.0 * _STEP_TIMEOUT_S
# By its file: as a module it would import this whole package, and all that scorers need.
_WORKER = ("-P", str(Path(__file__).with_name("math_worker.py")), str(_STEP_TIMEOUT_S))


class MathVerifier:
    """One child process, started by the first score and stopped on leaving."""

    def __init__(self, timeout_s: float = _TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._child: Process | None = None
        self._turn = asyncio.Lock()  # one at a time, so that the time-out counts from its start

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stop_child()

    async def score(self, model_answer: str, ground_truth: str) -> float:
        """1.0 if the answer equals the right one, else 0.0.

        An answer that cannot be read as mathematics is not equal. Raises ValueError if the ground
        truth cannot be read, TimeoutError if the child hangs, RuntimeError if it dies.
        """
        async with self._turn:
            try:
                async with asyncio.timeout(self._timeout_s):
                    equal = await self._compare(model_answer, ground_truth)
            except TimeoutError:
                await self._stop_child()
                raise TimeoutError(
                    f"scorer math took longer than {self._timeout_s:g} s for {model_answer[:80]!r}"
                ) from None
            except (OSError, json.JSONDecodeError):
                await self._stop_child()
                raise RuntimeError(f"scorer math died of {model_answer[:80]!r}") from None
            except asyncio.CancelledError:
                await self._stop_child()  # its answer would be taken for the next one's
                raise
        if equal is None:
            raise ValueError(f"the task's answer {ground_truth[:80]!r} is no mathematics")
        return float(equal)

    async def _compare(self, model_answer: str, ground_truth: str) -> bool | None:
        if self._child is None:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable, *_WORKER, stdin=PIPE, stdout=PIPE
            )
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(json.dumps([model_answer, ground_truth]).encode() + b"\n")
        await self._child.stdin.drain()
        equal = json.loads(await self._child.stdout.readline())  # empty if the child is dead
        assert equal is None or isinstance(equal, bool)
        return equal

    async def _stop_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        if child.returncode is None:
            child.kill()
        await child.wait()
