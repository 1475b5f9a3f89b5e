"""Which tasks' calls take a tool server down.

A server that goes away cuts off all calls that are under way, and any of them may be why. So, of
one server in one sampler process:

    a task under whose calls it went away twice   is suspected: its calls are made alone
    a suspect's call that is cut off, alone       counts: the first always, those after it only if
                                                  a call of another task was answered since
    a suspect with one that counts                lets such a call go first
    three of these                                the task is to blame: it makes no call more

Such a task cannot go on for ever, for it is cut off alone every time and the others are answered.
A plain outage hits all alike: whoever is alone is answered when the server is back, or nobody else
is, and then nothing more counts. A call that never reached the server counts for nothing at all.
An attempt that ends well clears its task.
"""

import asyncio
import time
from dataclasses import dataclass, field

from mcp_types import CallToolResult

from agentrl.rollout.tools.calls import (
    Callee,
    CallFailed,
    TaskTakesServerDown,
    ToolRequest,
    ToolServerUnreachable,
)

SUSPECTED_AFTER = 2  # times that the server went away under a task's calls
BLAMED_AFTER = 3  # of them, with the task's call alone
_PATIENCE_S = 10.0  # for the others; there may be none
_LOOK_S = 0.05


@dataclass(slots=True)
class _Losses:
    """What one task's calls lost. `alone`: of them those that count. `others_answered`: since the
    first of these."""

    times: int = 0
    alone: int = 0
    first_alone: float = 0.0
    others_answered: bool = False


@dataclass
class Blame:
    """What is known of the tasks that one server went away under. No I/O; times are of one
    monotonic clock."""

    _went_away_at: float = float("-inf")  # the last time
    _under_way: set[str] = field(default_factory=set)  # tasks that lost calls that time
    _losses: dict[str, _Losses] = field(default_factory=dict)  # until the task ends well

    def is_suspect(self, task: str) -> bool:
        """Whether the task's calls are to be made alone."""
        return task in self._losses and self._losses[task].times >= SUSPECTED_AFTER

    def is_to_blame(self, task: str) -> bool:
        """Whether the task takes the server down."""
        return task in self._losses and self._losses[task].alone >= BLAMED_AFTER

    def lets_others_first(self, task: str) -> bool:
        """Whether others are to be answered before the task's next call can say anything."""
        losses = self._losses.get(task)
        return losses is not None and losses.alone > 0 and not losses.others_answered

    def cut_off(self, task: str, sent: float, now: float, *, alone: bool) -> None:
        """The server went away under a call that was sent at `sent`; `alone`: beside no other."""
        if sent > self._went_away_at:  # it had come back since
            self._went_away_at = now
            self._under_way.clear()
        if task in self._under_way:
            return
        self._under_way.add(task)
        losses = self._losses.setdefault(task, _Losses())
        losses.times += 1
        if alone and losses.alone == 0:
            losses.alone, losses.first_alone = 1, now
        elif alone and losses.others_answered:
            losses.alone += 1

    def answered(self, task: str, sent: float) -> None:
        """The server answered a call that was sent at `sent`."""
        for other, losses in self._losses.items():
            if other != task and losses.alone > 0 and sent > losses.first_alone:
                losses.others_answered = True

    def ended_well(self, task: str) -> None:
        """An attempt at the task came to its end: it is suspected no more."""
        if not self.is_to_blame(task):
            self._losses.pop(task, None)


class Guard:
    """Makes the calls of all records to one server; those of suspects alone.

    `label`: the server for people.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._blame = Blame()
        self._door = asyncio.Lock()  # who is alone keeps it locked
        self._n_inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    async def call(self, task: str, callee: Callee, call: ToolRequest) -> CallToolResult:
        """The call of a task. Raises as `Callee.call`, and `TaskTakesServerDown`."""
        patient_until = time.monotonic() + _PATIENCE_S
        while self._blame.lets_others_first(task) and time.monotonic() < patient_until:
            await asyncio.sleep(_LOOK_S)
        async with self._door:
            self.refuse(task)
            if self._blame.is_suspect(task):
                await self._empty.wait()
                return await self._made(task, callee, call, alone=True)
            self._n_inside += 1
            self._empty.clear()
        try:
            return await self._made(task, callee, call, alone=False)
        finally:
            self._n_inside -= 1
            if not self._n_inside:
                self._empty.set()

    def refuse(self, task: str) -> None:
        """Raises `TaskTakesServerDown` for a task that is to blame."""
        if self._blame.is_to_blame(task):
            raise TaskTakesServerDown(
                f"this task takes the tool server {self._label} down: it went away "
                f"{BLAMED_AFTER} times while a call of this task alone was under way, and answered "
                "others meanwhile"
            )

    def ended_well(self, task: str) -> None:
        """An attempt at the task came to its end."""
        self._blame.ended_well(task)

    async def _made(
        self, task: str, callee: Callee, call: ToolRequest, *, alone: bool
    ) -> CallToolResult:
        sent = time.monotonic()
        try:
            result = await callee.call(call)
        except ToolServerUnreachable as outage:
            if outage.cut_off:
                self._blame.cut_off(task, sent, time.monotonic(), alone=alone)
                self.refuse(task)
            raise
        except CallFailed:  # it lives
            self._blame.answered(task, sent)
            raise
        self._blame.answered(task, sent)
        return result
