"""What follows an optimizer step in the database, against the rows that the database holds.

A run of so many rows (with their Records, and Tasks of eight): all trained, but for a hundredth
that was evicted and the rows of the next steps; and, as a second side, all waiting for their
training (`--enable_sampling false`). After each step, as in a run:

    rows        the look for the next step's rows: tasks topped up, old rows evicted, rows leased
    commit      the run's lease, the rows of the step, and the report of the step
    counts      the rows that the metrics name
    sampler     a sampler's look for work, and its admission limit
    view        one reading of the live view
    restart     not of a step: what a trainer that goes on does before its first one

Milliseconds are medians over the steps; databases of all sizes take theirs in turn. Then mongod's
profiler notes every operation of one more step and restart: its plan (explain's stages), and how
many index keys and documents were examined. A plan with COLLSCAN on a collection that grows ends
the benchmark, as do keys or documents examined that grow (rows that wait are counted up to 10,000).

    python benchmarks/bookkeeping.py [--quick] [--save]

`growth` is the milliseconds of the most rows over those of the fewest.
"""

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import uvloop
from report import finish, parse_flags

from agentrl.databases import policies, runs, services
from agentrl.databases.connection import RunDatabase, connect
from agentrl.databases.documents import (
    DBRecordData,
    Record,
    RecordStatus,
    RowStatus,
    SlotStatus,
    Split,
    StopReason,
    Task,
    TaskStatus,
    VersionRange,
)
from agentrl.databases.feeder import TaskFeeder, make_tasks
from agentrl.databases.hopeless import HopelessWatch
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.row_ledger import COUNTED, RowLedger
from agentrl.databases.runs import RunLease
from agentrl.databases.task_file import TaskLine
from agentrl.databases.token_tree import TokenTree
from agentrl.launcher.progress import ProgressReader
from agentrl.rollout.scheduling.work_view import Observer
from agentrl.training.data.stream import LedgerSource

GROUP, ROWS_PER_STEP, STALENESS = 8, 64, 2
BATCH = 5000
GROWING = ("tasks", "records", "record_data", "dispatched_sampling_tasks")
SERVICE = "http://127.0.0.1:1"
Timed = dict[str, list[float]]


def old_rows(first: int, last: int, waiting: bool) -> Iterator[tuple[DBRecordData, Record, int]]:
    """Rows with their Records, and the step that trained each."""
    tree = TokenTree.line(
        [1] * 24, mask=[0] * 8 + [1] * 16, advantages=[0] * 8 + [1] * 16, logprobs=[0] * 24,
        versions=[-1] * 8 + [0] * 16,
    )  # fmt: skip
    ended = datetime.now(UTC) - timedelta(days=1)
    for number in range(first, last):
        group, rollout = divmod(number, GROUP)
        step = number // ROWS_PER_STEP + 1
        name = f"train-0-g{group}-t{rollout}-a0"
        trained = [{"step": step, "trainer": "t", "fence": 1}]
        evicted = number % 100 == 0
        state: dict[str, Any] = {"status": RowStatus.READY}
        if not waiting:
            state = {"status": RowStatus.TRAINED, "trained": trained}
            if evicted:
                state = {"status": RowStatus.EVICTED, "step": step, "fence": 1}
        row = DBRecordData(
            id=name, task=f"train-0-g{group}", group_order=group, reward=1.0, n_train_tokens=16,
            cost=300.0, policy_versions=[0] if waiting else [step - 1], temperature=1.0, tree=tree,
            prefix_hash="p", **state,
        )  # fmt: skip
        record = Record(
            id=name, task=row.task, task_id=f"g{group}", rollout=rollout, attempt=0,
            split=Split.TRAIN, epoch=0, owner="s", status=RecordStatus.READY, query="q",
            turns=[f"{name}-0"], n_turns=1, final_answer="a", stop_reason=StopReason.ANSWERED,
            score=1.0, versions=VersionRange(min=step - 1, max=step - 1), started_at=ended,
            finished_at=ended + timedelta(milliseconds=number),
        )  # fmt: skip
        yield row, record, step


def old_tasks(first: int, last: int) -> Iterator[Task]:
    """The groups of those rows."""
    for group in range(first, last):
        (task,) = make_tasks(
            [TaskLine(id=f"g{group}", query="q")], Split.TRAIN, 0, GROUP, [0], first=group
        )
        for slot in task.slots:
            slot.status, slot.record, slot.score = SlotStatus.COMPLETED, f"{task.id}-a0", 1.0
        ended = datetime.now(UTC) - timedelta(days=1, milliseconds=-group)
        done = {"status": TaskStatus.COMPLETED, "pending": 0, "completed_at": ended}
        yield task.model_copy(update=done)


async def fill(database: RunDatabase, first: int, last: int, waiting: bool) -> None:
    """Insert rows `first` to `last` of the run with their Records and Tasks."""
    for begin in range(first, last, BATCH):
        made = list(old_rows(begin, min(begin + BATCH, last), waiting))
        await database.rows.insert_many([row.to_mongo() for row, _, _ in made], ordered=False)
        await database.records.insert_many([r.to_mongo() for _, r, _ in made], ordered=False)
        groups = old_tasks(begin // GROUP, min(begin + BATCH, last) // GROUP)
        await database.tasks.insert_many([task.to_mongo() for task in groups], ordered=False)


class Lines(Sequence[TaskLine]):
    """A task file of ten million lines, made on demand."""

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: Any) -> Any:
        return TaskLine(id=f"g{index}", query="q")


class Steps:
    """The queries of trainer, sampler and live view around a step."""

    def __init__(
        self, database: RunDatabase, lease: RunLease, feeder: TaskFeeder, staleness: int, done: int
    ) -> None:
        self.database, self.lease, self.done = database, lease, done
        self.ledger = RowLedger(database, "trainer", lease.fence)
        self.source = LedgerSource(
            database, self.ledger, feeder, rows_per_step=ROWS_PER_STEP, max_staleness=staleness,
            stop=threading.Event(), watch=HopelessWatch(database, 512),
        )  # fmt: skip
        self.observer = Observer(database, None, True, STALENESS, GROUP)
        self.view = ProgressReader(database, Path(tempfile.gettempdir()) / "no-run")
        self.times: Timed = {}

    async def take(self) -> None:
        """Take one step, and add as many rows as it trains."""
        self.done = step = self.done + 1
        await self._timed("sampler", self._look)
        await self._finish_rows(step)
        headers = await self._timed("rows", lambda: self.source.lease(step))

        async def commit() -> None:
            await self.lease.heartbeat()
            assert await self.ledger.commit(step, [h.id for h in headers]) == ROWS_PER_STEP
            await self.lease.progress(
                step=step, max_steps=10**6, version=step, status=runs.TRAINING
            )

        await policies.publish(self.database, step, step, "weights")
        await services.acknowledge(self.database, SERVICE, step)
        await policies.serve(self.database, step)
        await self._timed("commit", commit)
        await self._timed("counts", lambda: self.ledger.counts(step))
        await self._timed("view", self.view.read)

    async def _look(self) -> None:
        seen = await self.observer.look()
        assert seen.training is not None
        await self.observer.admission_limit(seen.training)

    async def _finish_rows(self, step: int) -> None:
        made, number = [], 10**8 + step * ROWS_PER_STEP
        for row, _, _ in old_rows(number, number + ROWS_PER_STEP, waiting=True):
            row.id, row.policy_versions = f"new-{row.id}", [step - 1]
            made.append(row.to_mongo())
        await self.database.rows.insert_many(made)

    async def _timed(self, what: str, operation: Callable[[], Awaitable[Any]]) -> Any:
        began = time.perf_counter()
        result = await operation()
        self.times.setdefault(what, []).append(1000 * (time.perf_counter() - began))
        return result


async def plans(database: RunDatabase) -> dict[str, dict[str, Any]]:
    """The profiler's plans, keys and documents of operations on growing collections."""
    noted: dict[str, dict[str, Any]] = {}
    async for entry in database.database["system.profile"].find():
        collection = entry["ns"].partition(".")[2]
        if collection not in GROWING or entry["op"] in ("insert", "killcursors"):
            continue
        command = entry.get("command", {})
        shape = command.get("filter") or command.get("query") or command.get("q") or (
            command.get("pipeline", [{}])[0]
        )  # fmt: skip
        name = f"{entry['op']} {collection} {_fields(shape)} {entry.get('planSummary', '-')}"
        seen = noted.setdefault(name, {"keys": 0, "documents": 0, "collscan": False})
        seen["keys"] = max(seen["keys"], entry.get("keysExamined", 0))
        seen["documents"] = max(seen["documents"], entry.get("docsExamined", 0))
        seen["collscan"] |= "COLLSCAN" in str(entry.get("planSummary")) + str(
            entry.get("execStats")
        )
    return noted


def _fields(shape: Any) -> str:
    """The names in a filter, for people."""
    if isinstance(shape, dict):
        return " ".join(
            _fields(value) if key in ("$match", "$and") else key for key, value in shape.items()
        )
    if isinstance(shape, list):
        return " ".join(_fields(each) for each in shape)
    return ""


async def go_on(database: RunDatabase, rows: int, staleness: int) -> Steps:
    """Start a trainer that continues after the existing rows."""
    done = rows // ROWS_PER_STEP
    lease = RunLease(database, "trainer", "here", 3600)
    await lease.acquire(ROWS_PER_STEP)
    feeder = TaskFeeder(
        database, Lines(), [], num_generations=GROUP, eval_rollouts=1, epochs=None,
        low_water=-(-(STALENESS + 2) * ROWS_PER_STEP // GROUP), seed=1,
    )  # fmt: skip
    feeder._order = (0, range(len(Lines())))  # type: ignore[assignment]  # an order of no cost
    steps = Steps(database, lease, feeder, staleness, done)
    for step in {0, *range(max(0, done - 10), done + 1)}:
        await policies.publish(database, step, step, "weights")
    await services.register_urls(database, [SERVICE])
    await lease.progress(step=done, max_steps=10**6, version=done, status=runs.TRAINING)

    async def restart() -> None:
        await lease.begin(done)
        await steps.ledger.rewind(done)
        await feeder.start()
        await steps.ledger.counts(done)

    await steps._timed("restart", restart)
    await steps.view.read()  # once, it reads the history of a run that goes on
    return steps


async def side(
    url: str, name: str, sizes: Sequence[int], waiting: bool, rounds: int
) -> list[dict[str, Any]]:
    """Measure databases of all sizes, one step of each in turn."""
    runs_of: dict[int, Steps] = {}
    staleness = 10**9 if waiting else STALENESS
    try:
        for rows in sizes:
            database = await connect(url, f"{name}-{rows}")
            await fill(database, 0, rows, waiting)
            runs_of[rows] = await go_on(database, rows, staleness)
            print(f"{name}: {rows} rows are there", file=sys.stderr, flush=True)
        for _ in range(rounds):
            for steps in runs_of.values():
                await steps.take()
        measured = []
        for rows, steps in runs_of.items():
            milliseconds = {what: round(statistics.median(t), 2) for what, t in steps.times.items()}
            print(rows, milliseconds, file=sys.stderr, flush=True)
            noted = await profiled(steps)
            measured.append({"rows": rows, "milliseconds": milliseconds, "plans": noted})
    finally:
        for steps in runs_of.values():
            await steps.database.client.drop_database(steps.database.name)
            await steps.database.close()
    return measured


async def profiled(steps: Steps) -> dict[str, dict[str, Any]]:
    """The operations of one more step, and of a restart."""
    database = steps.database
    await database.database.command("profile", 2)
    await steps.take()
    await steps.ledger.rewind(steps.done)
    await database.database.command("profile", 0)
    return await plans(database)


def refuse_growth(measured: Sequence[dict[str, Any]]) -> None:
    """Raise SystemExit if a collection is scanned, or if examined keys or documents grow."""
    few, many = measured[0]["plans"], measured[-1]["plans"]
    for name, plan in many.items():
        if plan["collscan"]:
            raise SystemExit(f"scans a collection: {name}")
        least = few.get(name, {"keys": 0, "documents": 0})
        for what in ("keys", "documents"):
            if plan[what] > max(2 * least[what] + 16 * ROWS_PER_STEP, COUNTED):
                raise SystemExit(f"{what} examined grow from {least[what]} to {plan[what]}: {name}")


async def main(quick: bool, save: bool) -> None:
    sizes = [1000, 10_000] if quick else [1000, 10_000, 100_000, 1_000_000]
    result: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedMongod(Path(folder) / "data", Path(folder) / "log", cache_gb=1.0) as mongod,
    ):
        for name, waiting in (("trained", False), ("waiting", True)):
            measured = await side(mongod.url, name, sizes, waiting, 5 if quick else 20)
            result[name] = measured
            first, last = measured[0]["milliseconds"], measured[-1]["milliseconds"]
            result[f"growth_{name}"] = {what: round(last[what] / first[what], 2) for what in first}
    for name in ("trained", "waiting"):
        refuse_growth(result[name])
    finish("bookkeeping", result, ("pymongo",), save=save)


if __name__ == "__main__":
    flags = parse_flags(__doc__ or "")
    uvloop.run(main(flags.quick, flags.save))
