"""The scorer `math`: whether two mathematical answers are equal (`mathematics/`).

Answers are compared in processes of their own: one may take all memory, or for ever. A comparison
has a bounded processor time there. One that takes more than half a second becomes a hard one: its
process works at the lowest priority from then on, is ended afterwards, and gives its place to
another process. So hard answers do not keep easy ones waiting.
"""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentrl.rollout.scorers.results import Score

_PROCESSOR_S = 5.0  # the longest processor time of a comparison
_EASY_S = 0.5  # the longest processor time of an easy comparison; most take about 0.01 s
_TIMEOUT_S = 120.0  # wall-clock time, enough on a very busy machine
_MOST_PROCESSES = 4  # per sampler process; a machine may run one sampler per core
_AT_ONCE = 4  # concurrent hard comparisons, beside the easy ones
_LOWEST_PRIORITY = 19
_LONGEST_LINE = 1 << 16  # bytes of a reply


class MathVerifier:
    """A pool of comparing processes, started on demand; an async context manager."""

    def __init__(self, processes: int | None = None, processor_s: float = _PROCESSOR_S) -> None:
        self._processor_s = processor_s
        self._places = asyncio.Semaphore(
            processes or min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))
        )
        self._hard_places = asyncio.Semaphore(_AT_ONCE)
        self._idle: list[Process] = []
        self._all: set[Process] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.gather(*(self._stop(child) for child in list(self._all)))

    async def score(self, model_answer: str, ground_truth: str, question: str) -> Score:
        """1.0 if the answer equals the right one, else 0.0.

        An answer that cannot be parsed, or that takes too long to compare, is not equal. Raises
        ValueError if the ground truth cannot be parsed, RuntimeError if the answer crashes two
        processes, TimeoutError after `_TIMEOUT_S`.
        """
        request = {"truth": ground_truth, "answer": model_answer, "question": question}
        line = json.dumps(request).encode() + b"\n"
        reply = await self._compare(line) or await self._compare(line)
        if reply is None:
            raise RuntimeError(f"scorer math died of {model_answer[:80]!r}, twice")
        if "unreadable" in reply:
            raise ValueError(f"the task's answer {reply['unreadable']}")
        return Score(float(bool(reply["equal"])), reply.get("why"))

    async def _compare(self, line: bytes) -> dict[str, str] | None:
        """A process's reply; None if it died."""
        await self._places.acquire()
        place = self._places
        child: Process | None = None
        try:
            child = self._idle.pop() if self._idle else await self._start()
            replying = asyncio.ensure_future(_ask(child, line))
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    await self._until_done_or_hard(child, replying)
                    if not replying.done():
                        await self._hard_places.acquire()
                        self._places.release()
                        place = self._hard_places
                        _lower_priority(child)
                    reply = await replying
            finally:
                replying.cancel()
            if reply is None:
                return await self._became_of(child)
            if place is self._places:  # not a hard one: a lowered priority cannot be raised again
                self._idle.append(child)
                child = None
            return reply
        except TimeoutError:
            raise TimeoutError(f"scorer math had no reply within {_TIMEOUT_S:g} s") from None
        finally:
            if child is not None:  # a late reply would be taken for the next one's
                await self._stop(child)
            place.release()

    async def _until_done_or_hard(self, child: Process, replying: "asyncio.Future[Any]") -> None:
        began = _processor_s(child)
        while not replying.done() and (
            _processor_s(child) - began < _EASY_S or self._hard_places.locked()
        ):
            await asyncio.wait({replying}, timeout=_EASY_S)

    async def _became_of(self, child: Process) -> dict[str, str] | None:
        """The reply for a process that used up its time; None if it ended otherwise."""
        await child.wait()
        if child.returncode != -signal.SIGXCPU:
            return None
        why = f"the answer takes more than {self._processor_s:g} s of processor time to compare"
        return {"equal": "", "why": why}

    async def _start(self) -> Process:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "agentrl.mathematics.worker", str(self._processor_s),
            stdin=PIPE, stdout=PIPE, limit=_LONGEST_LINE,
        )  # fmt: skip
        self._all.add(child)
        assert child.stdout is not None
        if not await child.stdout.readline():
            await self._stop(child)
            raise RuntimeError("scorer math: its process ended as it began (see above)")
        return child

    async def _stop(self, child: Process) -> None:
        self._all.discard(child)
        if child in self._idle:
            self._idle.remove(child)
        if child.returncode is None:
            with suppress(ProcessLookupError):
                child.kill()
        await child.wait()


async def _ask(child: Process, line: bytes) -> dict[str, str] | None:
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(line)
        await child.stdin.drain()
        reply = await child.stdout.readline()
        return dict(json.loads(reply)) if reply else None
    except (OSError, ValueError):
        return None


def _processor_s(child: Process) -> float:
    """The processor time that a process has used, in seconds; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # user and system


def _lower_priority(child: Process) -> None:
    with suppress(ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, child.pid, _LOWEST_PRIORITY)
