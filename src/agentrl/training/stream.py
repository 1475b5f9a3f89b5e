"""Rows for the next step, made ready in the background while the current step computes.

Rank 0 leases rows and plans which rank trains which; the plan travels as row ids, and every rank
fetches its own payloads. All of it runs on the background loops of the ranks: `start` begins it
for a step, `take` collects it.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar, cast

import torch.distributed as dist

from agentrl.databases.feeder import TaskFeeder
from agentrl.databases.rows import RowHeader, RowLedger
from agentrl.training.background import BackgroundLoop
from agentrl.training.batch import TrainingSequence, row_sequences
from agentrl.training.planner import assign_rows

T = TypeVar("T")

# Waiting for rows may take as long as sampling does; a rank that dies breaks the connection, which
# ends the wait at once.
_PLAN_TIMEOUT = timedelta(days=30)
_POLL_SECONDS = (0.05, 1.0)  # first and longest pause between two looks for rows


@dataclass(frozen=True)
class StepRows:
    """What one rank trains in a step."""

    headers: Sequence[RowHeader]  # of the whole step; on rank 0 only
    mine: Sequence[Sequence[TrainingSequence]]  # this rank's rows, each as its sequences


class RowSource(Protocol):
    """Where rank 0 gets the rows of a step from."""

    async def lease(self, step: int, oldest_version: int) -> list[RowHeader]:
        """The step's rows; fewer than usual when no more can come, none at the end."""
        ...


class LedgerSource:
    """Rows of the database, fed by the tasks of a `TaskFeeder`."""

    def __init__(
        self, ledger: RowLedger, feeder: TaskFeeder, rows_per_step: int, stop: threading.Event
    ) -> None:
        """`stop`: set when no further step is wanted; a wait for rows then ends without any."""
        self._ledger = ledger
        self._feeder = feeder
        self._rows_per_step = rows_per_step
        self._stop = stop

    async def lease(self, step: int, oldest_version: int) -> list[RowHeader]:
        """Wait until the step has all its rows, topping up tasks meanwhile."""
        headers: list[RowHeader] = []
        pause, longest = _POLL_SECONDS
        while not self._stop.is_set():
            # asked before leasing: a row that comes between the two is leased in this round
            exhausted = await self._feeder.exhausted()
            missing = self._rows_per_step - len(headers)
            new = await self._ledger.lease(step, missing, oldest_version)
            headers += new
            if len(headers) >= self._rows_per_step or (exhausted and not new):
                return headers
            await self._feeder.top_up()
            pause = _POLL_SECONDS[0] if new else min(pause * 1.5, longest)
            await asyncio.sleep(pause)
        return []


class RowStream:
    """The stream of one rank. All ranks start and take the same steps in the same order."""

    def __init__(
        self, background: BackgroundLoop, ledger: RowLedger, source: RowSource | None
    ) -> None:
        """`source`: on rank 0 only. Collective: every rank makes one."""
        self._background = background
        self._ledger = ledger
        self._source = source
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        # of its own, because it is used from another thread than training's collectives
        self._group = (
            dist.new_group(backend="gloo", timeout=_PLAN_TIMEOUT) if self._ranks > 1 else None
        )
        self._pending: Future[StepRows | None] | None = None

    def start(self, step: int, oldest_version: int) -> None:
        """Begin to get the rows of `step`; none with a token older than `oldest_version`."""
        assert self._pending is None, "the rows of the last step were not taken"
        self._pending = self._background.submit(self._prepare(step, oldest_version))

    def take(self) -> tuple[StepRows | None, float]:
        """The rows of the step that was started, or None at the end; and the seconds waited."""
        assert self._pending is not None, "no step was started"
        began = time.monotonic()
        rows = self._background.result(self._pending)
        self._pending = None
        return rows, time.monotonic() - began

    def drop(self) -> None:
        """Wait for the step that was started and do not train it: its rows stay leased."""
        self.take()

    async def _prepare(self, step: int, oldest_version: int) -> StepRows | None:
        headers: list[RowHeader] = []
        plan: list[list[str]] = []
        if self._source is not None:
            headers = await self._source.lease(step, oldest_version)
            by_rank = assign_rows([header.cost for header in headers], self._ranks)
            plan = [[headers[index].id for index in indices] for indices in by_rank]
        if self._group is not None:
            plan = await _in_daemon_thread(lambda: self._broadcast(plan))
        if not any(plan):
            return None
        rows = await self._ledger.fetch(plan[self._rank])
        return StepRows(headers=headers, mine=[row_sequences(row) for row in rows])

    def _broadcast(self, plan: list[list[str]]) -> list[list[str]]:
        box = [plan]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]


async def _in_daemon_thread(function: Callable[[], T]) -> T:
    """Like `asyncio.to_thread`, but a call that blocks for good does not keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, result))

    def call() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = (function(), None)
        except BaseException as error:  # handed to the waiter, whatever it is
            outcome = (None, error)
        loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=call, name="plan-broadcast", daemon=True).start()
    return await future
