"""Prepares the rows of the next step in the background while the current step computes.

Rank 0 leases rows and assigns them to ranks; it sends the row ids, and every rank fetches its own
rows. If a rank cannot use a row, the row is quarantined and the step is planned again. All of this
runs on the background loops: `start` begins a step's rows, `take` returns them.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, Self, TypeVar, cast

from agentrl.databases.changes import Changes, inserted, updated
from agentrl.databases.connection import RunDatabase, retry_through_outages
from agentrl.databases.documents import RowStatus
from agentrl.databases.feeder import TaskFeeder
from agentrl.databases.hopeless import HopelessWatch
from agentrl.databases.policies import Lineage, load_lineage
from agentrl.databases.row_ledger import RowHeader, RowLedger, fetch_rows
from agentrl.databases.runs import RunHopeless
from agentrl.databases.transitions import ENDED_TASKS
from agentrl.training.background import BackgroundLoop
from agentrl.training.data.flops import FlopsModel
from agentrl.training.data.planner import plan_ranks, row_cost
from agentrl.training.data.row_checks import check_trainable
from agentrl.training.data.sequences import TrainingSequence, row_sequences
from agentrl.training.parallel import Mesh
from agentrl.training.parallel.agreement import Agreement

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LONGEST_WAIT_S = 1.0  # between two checks for rows and for a stop


@dataclass(frozen=True)
class StepRows:
    """The rows of a step, as one rank has them."""

    headers: Sequence[RowHeader]  # headers of all rows of the step; on rank 0 only
    balance: float  # of the ranks' costs, see `RankPlan`
    ids: Sequence[Sequence[str]]  # row ids of each data-parallel rank
    rank: int  # this data-parallel rank
    mine: Sequence[Sequence[TrainingSequence]]  # this rank's rows, each as its sequences

    def only(self, ids: Collection[str]) -> Self:
        """The step with only the rows of these ids."""
        return replace(
            self,
            headers=[header for header in self.headers if header.id in ids],
            ids=[[row for row in of_rank if row in ids] for of_rank in self.ids],
            mine=[
                row for row, name in zip(self.mine, self.ids[self.rank], strict=True) if name in ids
            ],
        )


class RowSource(Protocol):
    """The source of rank 0's rows."""

    async def lease(self, step: int) -> list[RowHeader]:
        """Lease the step's rows: fewer than usual if no more can come, none at the end."""
        ...

    async def quarantine(self, step: int, faults: Mapping[str, str]) -> None:
        """Quarantine rows of the step. `faults`: the reason of each, by row id."""
        ...


class LedgerSource:
    """Rows of the database, fed by the tasks of a `TaskFeeder`."""

    def __init__(
        self,
        database: RunDatabase,
        ledger: RowLedger,
        feeder: TaskFeeder,
        *,
        rows_per_step: int,
        max_staleness: int,
        stop: threading.Event,
        watch: HopelessWatch,
    ) -> None:
        """`stop`: when set, a wait for rows ends without rows. `watch`: detects a hopeless run."""
        self._database = database
        self._ledger = ledger
        self._feeder = feeder
        self._rows_per_step = rows_per_step
        self._max_staleness = max_staleness
        self._stop = stop
        self._watch = watch
        self._lineage = Lineage()

    async def lease(self, step: int) -> list[RowHeader]:
        """Wait until the step has all its rows, and add tasks meanwhile.

        Raises `RunHopeless` if no rows will come.
        """
        headers, complete = await self._look(step)
        if complete:
            return headers
        rows, tasks = self._database.rows, self._database.tasks
        new_row = inserted(rows)
        ready_again = updated(rows, "status", RowStatus.READY)
        group_done = updated(tasks, "status", *ENDED_TASKS)  # perhaps the last one
        async with Changes(self._database, new_row, ready_again, group_done) as changes:
            while not self._stop.is_set():
                headers, complete = await self._look(step)
                if complete:
                    return headers
                if (reason := await self._watch.look()) is not None:
                    raise RunHopeless(reason)
                await self._await_rows(changes, self._rows_per_step - len(headers))
        return []

    async def _await_rows(self, changes: Changes, missing: int) -> None:
        """Wait until so many more rows are ready; at most `_LONGEST_WAIT_S`.

        Rows come one group after the other. A look at them is ten commands, a count is one. When no
        task will follow, the wait is for any change: the step may stay smaller.
        """
        deadline = time.monotonic() + _LONGEST_WAIT_S
        before = ready = 0
        while (left_s := deadline - time.monotonic()) > 0 and not self._stop.is_set():
            await changes.wait(left_s, found=ready > before)
            if self._feeder.all_added:
                return
            before = ready
            ready = await retry_through_outages(
                lambda: self._ledger.ready(missing), "the count of rows"
            )
            if ready >= missing:
                return

    async def quarantine(self, step: int, faults: Mapping[str, str]) -> None:
        """Quarantine rows of the step and log the reasons."""
        await retry_through_outages(
            lambda: self._ledger.quarantine(step, faults), f"the quarantine of rows of step {step}"
        )
        for row, error in faults.items():
            logger.error("row %s is quarantined: %s", row, error)

    async def _look(self, step: int) -> tuple[list[RowHeader], bool]:
        return await retry_through_outages(
            lambda: self._look_once(step), f"the rows of step {step}"
        )

    async def _look_once(self, step: int) -> tuple[list[RowHeader], bool]:
        """The rows that the step has, and whether they are complete."""
        # Samplers may need tasks even if the step has its rows already.
        await self._feeder.top_up()
        # Checked before leasing, so that a row that arrives in between is leased now.
        exhausted = await self._feeder.exhausted()
        self._lineage = await load_lineage(self._database, self._lineage)
        bound = self._max_staleness
        await self._ledger.evict(step, self._lineage, bound)
        lease = partial(self._ledger.lease, step, self._rows_per_step, self._lineage, bound)
        headers = await lease()
        if len(headers) >= self._rows_per_step:
            return headers, True
        if exhausted and not await self._ledger.returning(step):
            # The remaining rows only wait for --retrained_interval.
            headers = await lease(waive_interval=True)
            if step == 1 and not headers and self._feeder.has_tasks:
                raise RunHopeless(await self._watch.never_trained(self._feeder.epochs))
            return headers, True
        return headers, False


class RowStream:
    """The stream of one process. All processes start and take the same steps in the same order."""

    def __init__(
        self,
        background: BackgroundLoop,
        database: RunDatabase,
        source: RowSource | None,
        mesh: Mesh,
        costs: FlopsModel,
        vocab_size: int,
    ) -> None:
        """`source`: on rank 0 only. `costs`, `vocab_size`: of the model. Collective."""
        self._vocab_size = vocab_size
        self._costs = costs
        self._background = background
        self._database = database
        self._source = source
        self._lineage = Lineage()
        self._rank, self._ranks = mesh.dp_rank, mesh.dp_size
        self._agreement = Agreement()  # a separate one, because other threads use it
        self._pending: Future[StepRows | None] | None = None

    def start(self, step: int) -> None:
        """Begin to prepare the rows of `step`."""
        assert self._pending is None, "the rows of the last step were not taken"
        self._pending = self._background.submit(self._prepare(step))

    def take(self) -> tuple[StepRows | None, float]:
        """Return the rows of the started step, or None at the end, and the seconds waited.

        Raises `RunHopeless` on all ranks.
        """
        assert self._pending is not None, "no step was started"
        began = time.monotonic()
        rows = self._background.result(self._pending)
        self._pending = None
        return rows, time.monotonic() - began

    def drop(self) -> None:
        """Wait for the started step without training it. Its rows stay leased."""
        self.take()

    async def _prepare(self, step: int) -> StepRows | None:
        while True:
            headers, ids, balance = await self._plan(step)
            if not any(ids):
                return None
            fetched = await retry_through_outages(
                partial(fetch_rows, self._database, ids[self._rank]), f"the rows of step {step}"
            )
            # Loaded after the rows, so that it has all their versions.
            self._lineage = await retry_through_outages(
                lambda: load_lineage(self._database, self._lineage), "the policy versions"
            )
            mine: list[Sequence[TrainingSequence]] = []
            faults = dict(fetched.faults)
            for row in fetched.rows:
                try:
                    check_trainable(row, self._vocab_size)
                    # Step `step` trains weights that have `step - 1` steps.
                    mine.append(row_sequences(row, self._lineage, step - 1))
                except (ValueError, KeyError) as error:
                    faults[row.id] = f"it cannot be trained: {error}"
            by_rank = await _in_daemon_thread(partial(self._agreement.gather, faults))
            faults = {row: error for of_rank in by_rank for row, error in of_rank.items()}
            if not faults:
                return StepRows(headers, balance, ids, self._rank, mine)
            if self._source is not None:
                await self._source.quarantine(step, faults)

    async def _plan(self, step: int) -> tuple[list[RowHeader], list[list[str]], float]:
        """The headers (rank 0 only), the row ids of each rank, and the balance of costs."""
        headers: list[RowHeader] = []
        failure: Exception | None = None
        hopeless: str | None = None
        if self._source is not None:
            try:
                headers = await self._source.lease(step)
            except RunHopeless as reason:  # raised on all ranks below
                hopeless = str(reason)
            except Exception as error:  # raised in `plan_step`, so that other ranks learn of it
                failure = error

        def plan_step() -> tuple[list[list[str]], float, str | None]:
            if failure is not None:
                raise failure
            by_rank = plan_ranks([row_cost(row, self._costs) for row in headers], self._ranks)
            rows = [[headers[index].id for index in indices] for indices in by_rank.rows]
            return rows, by_rank.balance, hopeless

        ids, balance, hopeless = await _in_daemon_thread(
            lambda: self._agreement.from_main(plan_step)
        )
        if hopeless is not None:
            raise RunHopeless(hopeless)
        return headers, ids, balance


async def _in_daemon_thread(function: Callable[[], T]) -> T:
    """Like `asyncio.to_thread`, but a call that blocks forever does not keep the process alive."""
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
